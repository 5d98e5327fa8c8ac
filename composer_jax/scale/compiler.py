"""Memory of a program on a TPU, as XLA's compiler for TPUs reports it."""

import dataclasses
import re
import time

import jax

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


def compile_program(function, arguments: tuple, keywords: dict) -> tuple[object, Memory | OutOfMemory, float]:
    """Traces, lowers and compiles a jitted function at abstract arguments.

    Returns (closed jaxpr, memory, seconds of tracing, lowering and compiling).
    """
    began = time.perf_counter()
    traced = function.trace(*arguments, **keywords)
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return traced.jaxpr, parse_out_of_memory(str(error)), time.perf_counter() - began
    stats = compiled.memory_analysis()
    memory = Memory(
        float(stats.argument_size_in_bytes),
        float(stats.output_size_in_bytes - stats.alias_size_in_bytes),
        float(stats.temp_size_in_bytes + stats.generated_code_size_in_bytes),
    )
    return traced.jaxpr, memory, time.perf_counter() - began


def parse_out_of_memory(message: str) -> OutOfMemory:
    """Parses the compiler's RESOURCE_EXHAUSTED message; numbers that it lacks are None."""
    match = _NEEDED.search(message) or _USED.search(message)
    if match is None:
        return OutOfMemory(None, None, message)
    size, unit, available, available_unit = match.groups()
    return OutOfMemory(float(size) * _UNITS[unit], float(available) * _UNITS[available_unit], message.splitlines()[0])
