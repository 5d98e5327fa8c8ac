"""Attention alone on one row of 32,768 tokens, with the heads of Kimi K2 and of Qwen3-30B-A3B."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_parts.output import Figures, note
from benchmarks.gpu_parts.packed_batch import packed_segments
from benchmarks.gpu_parts.timing import teraflops
from benchmarks.gpu_parts.worker import print_figures
from composer_jax.models.flops import document_lengths
from composer_jax.ops.attention_form import RowShape, choose_form
from composer_jax.ops.local_gpu import local_gpu
from composer_jax.ops.packed_attention import AttentionMask, attend_rows


class HeadShape(NamedTuple):
    queries: int
    keys: int
    key_width: int
    value_width: int


HEADS = {"kimi_k2": HeadShape(64, 64, 192, 128), "qwen3_30b_a3b": HeadShape(32, 4, 128, 128)}
SMALL_HEADS = {"kimi_k2": HeadShape(4, 4, 48, 32), "qwen3_30b_a3b": HeadShape(4, 2, 32, 32)}


def measure(small: bool) -> Figures:
    """Returns the TFLOP/s of each form, by heads."""
    shapes, length = (SMALL_HEADS, 256) if small else (HEADS, 32_768)
    return {name: measure_heads(name, heads, length, small=small) for name, heads in shapes.items()}


def measure_heads(name: str, heads: HeadShape, length: int, *, small: bool) -> Figures:
    """Returns {form: {forward, with_gradients}}, and "form", the one that ours chooses.

    Operations are those of pairs of a query and a key that it attends to, twice as many in the backward pass.
    """
    widths = (heads.queries, heads.key_width), (heads.keys, heads.key_width), (heads.keys, heads.value_width)
    shapes = [(1, length, *of) for of in (*widths, (heads.queries, heads.value_width))]
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dy = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    q = q * heads.key_width**-0.5
    packed, whole = packed_segments(1, length), np.ones((1, length), np.int32)
    forms: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
        "ours": (attend_rows, packed),
        "ours_unpacked": (attend_rows, whole),
        "cudnn_unpacked": (_cudnn, whole),
    }
    row = RowShape(q.dtype, length, length, heads.queries, heads.key_width, heads.value_width)
    choice = choose_form("auto", jax.default_backend(), local_gpu(), row)
    figures: Figures = {key: {} for key in forms} | {"form": choice.form}
    for key, gradients in (("forward", False), ("with_gradients", True)):
        note(f"attention, {name}, {key}: {choice.form} {choice.reason}")
        calls = {
            each: _call(function, segments, (q, k, v), dy, gradients) for each, (function, segments) in forms.items()
        }
        flops = {each: _flops(heads, segments) * (3 if gradients else 1) for each, (_, segments) in forms.items()}
        for each, rate in teraflops(calls, flops, "ours", in_flight=1, small=small).items():
            figures[each][key] = rate
    return figures


def _call(
    form: Callable[..., jax.Array],
    segments: np.ndarray,
    operands: tuple[jax.Array, ...],
    dy: jax.Array,
    gradients: bool,
) -> Callable[[], Any]:
    """Returns a call of a form of attention, with the gradients of all operands or without."""

    def forward(segments_BS: jax.Array, *operands: jax.Array) -> jax.Array:
        mask = AttentionMask(jnp.arange(segments_BS.shape[1], dtype=jnp.int32), segments_BS, segments_BS)
        return form(*operands, mask)

    def backward(segments_BS: jax.Array, dy: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
        y, transpose = jax.vjp(functools.partial(forward, segments_BS), *operands)
        return y, *transpose(dy)

    program = jax.jit(backward if gradients else forward)
    # Segments are an argument as in training: XLA would compute all that follows from a constant while it compiles.
    arguments = (jnp.asarray(segments), dy, *operands) if gradients else (jnp.asarray(segments), *operands)
    return lambda: program(*arguments)


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """JAX's cuDNN attention, whose public form has no documents and takes values as wide as keys only."""
    width = v.shape[-1]
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[-1] - width)))
    y = jax.nn.dot_product_attention(q, k, v, scale=1.0, is_causal=True, implementation="cudnn")
    return y[..., :width]


def _flops(heads: HeadShape, segments: np.ndarray) -> float:
    """Returns the operations of the forward pass over documents."""
    lengths = document_lengths(segments).astype(np.float64)
    return 2 * heads.queries * (heads.key_width + heads.value_width) * float((lengths * (lengths + 1) / 2).sum())


if __name__ == "__main__":
    print_figures(measure)
