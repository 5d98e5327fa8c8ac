"""Compiles a program for a TPU with XLA's own compiler: its memory, and its schedule."""

import dataclasses
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import jax
from jax.extend.core import ClosedJaxpr

from composer_jax.errors import UserError
from composer_jax.scale.schedule import HloSchedule

_NEEDED = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)")
_USED = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device while a program runs, as planned by the compiler."""

    arguments: float = 0.0
    outputs: float = 0.0
    """Without outputs that alias arguments."""
    temporary: float = 0.0
    """Includes the program's code."""


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """The compiler's report that a program does not fit into a device's memory."""

    needed: float | None
    """Bytes of arguments, results and temporaries together; None if the message lacks them."""
    available: float | None
    message: str


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    jaxpr: ClosedJaxpr
    memory: Memory | OutOfMemory
    schedule: HloSchedule | None
    """None for a program that does not fit into memory."""
    seconds: float
    """Of tracing, lowering and compiling."""


def compile_program(function, arguments: tuple, keywords: dict, options: Mapping[str, str]) -> CompiledProgram:
    """Traces, lowers and compiles a jitted function at abstract arguments.

    Args:
      options: of XLA's compiler.

    Raises:
      UserError: an option that the compiler does not know or refuses.
    """
    began = time.perf_counter()
    traced = function.trace(*arguments, **keywords)
    lowered = traced.lower()
    # JAX's own XLA cannot print every program of libtpu's newer one, so libtpu writes the text.
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiled = lowered.compile({**options, "xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                memory = parse_out_of_memory(str(error))
                return CompiledProgram(traced.jaxpr, memory, None, time.perf_counter() - began)
            if options:
                raise UserError(f"the compiler refuses an option of {dict(options)}: {error}") from error
            raise
        # The largest text: parts of the program, such as those of SparseCores, have files of their own.
        dumped = max(Path(folder).glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
        schedule = HloSchedule(dumped.read_text(encoding="utf-8"))
    stats = compiled.memory_analysis()
    memory = Memory(
        float(stats.argument_size_in_bytes),
        float(stats.output_size_in_bytes - stats.alias_size_in_bytes),
        float(stats.temp_size_in_bytes + stats.generated_code_size_in_bytes),
    )
    return CompiledProgram(traced.jaxpr, memory, schedule, time.perf_counter() - began)


def parse_out_of_memory(message: str) -> OutOfMemory:
    """Parses the compiler's RESOURCE_EXHAUSTED message; numbers that it lacks are None."""
    match = _NEEDED.search(message) or _USED.search(message)
    if match is None:
        return OutOfMemory(None, None, message)
    size, unit, available, available_unit = match.groups()
    return OutOfMemory(float(size) * _UNITS[unit], float(available) * _UNITS[available_unit], message.splitlines()[0])
