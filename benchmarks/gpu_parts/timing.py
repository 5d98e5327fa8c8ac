"""Seconds of calls that take turns, and the card's own limits: a large bfloat16 product, and a copy."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_parts.output import digits, error_line, note
from benchmarks.grouped_matmul import seconds

Call = Callable[[], Any]


def compile_calls(calls: Mapping[str, Call], ours: str) -> dict[str, Call]:
    """Returns the calls that run here, after a first one of each, which compiles.

    What does not run, because the card has too little memory or a library refuses it, is named on stderr.

    ours: the name of the call whose error ends the part instead, unless memory is too small for it.
    """
    compiled = {}
    for name, call in calls.items():
        note(f"  {name}: compiling ...")
        started = time.perf_counter()
        try:
            jax.block_until_ready(call())
        except Exception as error:
            if name == ours and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            note(f"  {name} does not run here: {error_line(error)}")
            continue
        compiled[name] = call
        note(f"  {name}: first call {time.perf_counter() - started:.1f} s")
    return compiled


def teraflops(
    calls: Mapping[str, Call], flops: Mapping[str, float], ours: str, *, in_flight: int, small: bool
) -> dict[str, Any]:
    """Returns TFLOP/s of each call, the median of alternated rounds; None of one that does not run here.

    Args:
      flops: useful operations of each call.
      in_flight: calls of one timing, whose results are all in memory at once. Several hide the start of a program.
    """
    compiled = compile_calls(calls, ours)
    medians = seconds(compiled, rounds=3 if small else 9, calls=1 if small else in_flight)
    return {name: digits(flops[name] / medians[name] / 1e12) if name in medians else None for name in calls}


def product_call(size: int) -> tuple[Call, float]:
    """Returns a product of two bfloat16 matrices [size,size], and its operations."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    return lambda: multiply(a, a), 2.0 * size**3


def copy_call(num_bytes: int) -> tuple[Call, float]:
    """Returns a copy of an array, and the bytes that it reads and writes together."""
    a = jnp.ones(num_bytes // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)  # XLA returns the argument itself where nothing is computed
    return lambda: copy(a), 2.0 * a.nbytes
