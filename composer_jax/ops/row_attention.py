"""Causal attention within whole rows: one contract, a fused kernel on TPUs, matrix products elsewhere.

The mask is a rule (`AttentionMask`) instead of an [S,S] array, which would have 64 billion entries per row at 256
thousand positions.
"""

import dataclasses

import jax
import jax.numpy as jnp

from composer_jax.ops import splash
from composer_jax.ops.attention import additive_mask, attend

BLOCK = 128
MOST_BLOCKS = 16
"""Queries of one product, and how many products at most: a block of queries meets the keys up to its own end only."""


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """A query attends to the keys of its own segment at its position or earlier, and within its window."""

    positions_S: jax.Array
    """int32: position of each query in the whole row; key t is at position t."""
    segments_BS: jax.Array
    """int32: segment of each query."""
    key_segments_BT: jax.Array
    """int32: segment of each key."""
    is_whole_row: bool = True
    """Whether the queries are the whole row, at positions 0, 1, ..., rather than one device's shard of it."""
    window: int | None = None
    """Tokens, the query included, that a layer with a sliding window attends to; None: no layer has a window."""


def attend_rows(
    q_BSHX: jax.Array,
    k_BTNX: jax.Array,
    v_BTNV: jax.Array,
    mask: AttentionMask,
    windowed: jax.Array | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k^T) v over what the mask shows, [B,S,H,V]. Heads, scale and sinks as in ops/attention.py: attend.

    windowed: bool scalar, whether this layer has the window; None where no layer has.
    """
    operands = (q_BSHX, k_BTNX, v_BTNV, windowed, sinks_H)
    plain = lambda *operands: products(*operands[:3], mask, *operands[3:])  # noqa: E731
    if not splash.takes(q_BSHX.shape, k_BTNX.shape):
        return plain(*operands)
    kernel = lambda q, k, v, windowed, sinks: splash.attend(  # noqa: E731
        q, k, v, mask.positions_S, mask.segments_BS, mask.key_segments_BT, mask.window, windowed, sinks
    )
    return jax.lax.platform_dependent(*operands, tpu=kernel, default=plain)


def products(
    q_BSHX: jax.Array,
    k_BTNX: jax.Array,
    v_BTNV: jax.Array,
    mask: AttentionMask,
    windowed: jax.Array | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """The form of ordinary matrix products. If the queries are the whole row, keys behind a block are not computed."""
    s, t = q_BSHX.shape[1], k_BTNX.shape[1]
    size = -(-s // min(MOST_BLOCKS, max(1, s // BLOCK)))

    def block(start: int) -> jax.Array:
        queries = slice(start, min(start + size, s))
        keys = slice(0, queries.stop if mask.is_whole_row else t)
        positions_Q, segments_BQ = mask.positions_S[queries], mask.segments_BS[:, queries]
        back_QT = positions_Q[:, None] - jnp.arange(keys.stop)[None, :]
        seen_QT = back_QT >= 0
        if mask.window is not None:
            seen_QT &= back_QT < jnp.where(windowed, mask.window, t)
        seen_BQT = seen_QT & (segments_BQ[:, :, None] == mask.key_segments_BT[:, None, keys])
        return attend(q_BSHX[:, queries], k_BTNX[:, keys], v_BTNV[:, keys], additive_mask(seen_BQT), sinks_H)

    return jnp.concatenate([block(start) for start in range(0, s, size)], axis=1)
