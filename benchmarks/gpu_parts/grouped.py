"""The grouped product of an expert layer, bfloat16, with unequal groups."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_parts.output import Figures, note
from benchmarks.gpu_parts.timing import teraflops
from benchmarks.gpu_parts.worker import print_figures
from composer_jax.ops.group_rounds import rounds
from composer_jax.ops.grouped_matmul import grouped_matmul

SHAPES = {"16384x32x2048x1024": (16_384, 32, 2048, 1024), "32768x128x2048x768": (32_768, 128, 2048, 768)}
"""Rows, groups, depth and width."""
SMALL_SHAPES = {"128x4x32x16": (128, 4, 32, 16)}


def measure(small: bool) -> Figures:
    """Returns the TFLOP/s of each form, by shape."""
    shapes = SMALL_SHAPES if small else SHAPES
    return {name: measure_shape(name, *shape, small=small) for name, shape in shapes.items()}


def measure_shape(name: str, rows: int, groups: int, depth: int, width: int, *, small: bool) -> Figures:
    """Returns {form: {forward, with_gradients}}; both gradients take twice the operations of the product."""
    rng = np.random.default_rng(0)
    shapes, keys = ((rows, depth), (groups, depth, width), (rows, width)), jax.random.split(jax.random.key(0), 3)
    x, w, dy = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    sizes = jnp.asarray(rng.multinomial(rows, rng.dirichlet(np.full(groups, 5.0))), jnp.int32)

    def batched(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.einsum("etd,edf->etf", x.reshape(groups, -1, depth), w).reshape(rows, width)

    forms: dict[str, Callable[..., jax.Array]] = {
        "ours": grouped_matmul,
        "rounds": lambda *operands: rounds(*operands),
        "ragged_dot": jax.lax.ragged_dot,
        "tokamax": _tokamax,
        "equal_groups": batched,
    }
    figures: Figures = {form: {} for form in forms}
    for key, gradients in (("forward", False), ("with_gradients", True)):
        note(f"grouped, {name}, {key}")
        calls = {form: _call(function, x, w, sizes, dy, gradients) for form, function in forms.items()}
        flops = dict.fromkeys(forms, 2.0 * rows * depth * width * (3 if gradients else 1))
        for form, rate in teraflops(calls, flops, "ours", in_flight=5, small=small).items():
            figures[form][key] = rate
    return figures


def _call(
    form: Callable[..., jax.Array], x: jax.Array, w: jax.Array, sizes: jax.Array, dy: jax.Array, gradients: bool
) -> Callable[[], Any]:
    """Returns a call of a form of the product, with both gradients or without."""

    def backward(x: jax.Array, w: jax.Array, sizes: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, transpose = jax.vjp(lambda x, w: form(x, w, sizes), x, w)
        return y, *transpose(dy)

    program = jax.jit(backward if gradients else form)
    arguments = (x, w, sizes, dy) if gradients else (x, w, sizes)
    return lambda: program(*arguments)


def _tokamax(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """tokamax' kernel (0.0.17), without autotuning."""
    import tokamax  # pyright: ignore[reportMissingImports]

    return tokamax.ragged_dot(x, w, sizes, implementation="mosaic")


if __name__ == "__main__":
    print_figures(measure)
