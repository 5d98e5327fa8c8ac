"""The largest attention logit of every head, computed in blocks beside the attention itself.

JAX's fused TPU kernel returns the log of a softmax's sum, which exceeds the largest logit by up to log T, and no
maximum. This form gives the exact maximum on every platform. It costs one more product of queries and keys, forward
only, and holds the scores of one block.
"""

import jax
import jax.numpy as jnp

from composer_jax.ops.packed_attention import AttentionMask
from composer_jax.ops.shapes import check_shapes
from composer_jax.ops.vma import match_vma

BLOCK = 512
"""Queries and keys of a block, at most."""


def max_logits(
    q_BSHX: jax.Array, k_BTNX: jax.Array, mask: AttentionMask, windowed: jax.Array | None = None
) -> jax.Array:
    """Returns the largest q k^T of every query head over what `mask` lets real tokens attend to, float32 [H].

    Queries and keys are those of ops/packed_attention.py: attend_rows. Without real tokens it is -inf. Attention sinks
    are not products of queries and keys and do not count. No gradient flows through it.

    Args:
      windowed: bool scalar, whether this layer has the sliding window; None where no layer has (mask.window=None).
    """
    check_shapes(
        q_BSHX=(q_BSHX, jnp.floating),
        k_BTNX=(k_BTNX, q_BSHX.dtype),
        positions_S=(mask.positions_S, jnp.integer),
        segments_BS=(mask.segments_BS, jnp.integer),
        key_segments_BT=(mask.key_segments_BT, jnp.integer),
        windowed=(windowed, bool),
    )
    _, s, h, x = q_BSHX.shape
    t, n = k_BTNX.shape[1:3]
    window = t
    if mask.window is not None:
        assert windowed is not None, f"mask.window={mask.window} needs `windowed`: whether this layer has it"
        window = jnp.where(windowed, mask.window, t)
    arrays = q_BSHX, k_BTNX, mask.positions_S, mask.segments_BS, mask.key_segments_BT, jnp.int32(window)
    q_BSHX, k_BTNX, positions_S, segments_BS, key_segments_BT, window = match_vma(
        *jax.tree.map(jax.lax.stop_gradient, arrays)
    )
    nothing_H, _ = match_vma(jnp.full(h, -jnp.inf), q_BSHX)
    positions_CQ, key_positions_CQ = _blocks(positions_S), _blocks(jnp.arange(t))

    def row(arrays: tuple[jax.Array, ...]) -> jax.Array:
        q_SHX, k_TNX, segments_S, key_segments_T = arrays

        def queries(block: tuple[jax.Array, ...]) -> jax.Array:
            q_QHX, positions_Q, segments_Q = block

            def keys(block: tuple[jax.Array, ...]) -> jax.Array:
                k_TNX, key_positions_T, key_segments_T = block

                def largest() -> jax.Array:
                    distance_QT = positions_Q[:, None] - key_positions_T
                    same_QT = (segments_Q[:, None] == key_segments_T) & (segments_Q[:, None] > 0)
                    visible_QT = (distance_QT >= 0) & (distance_QT < window) & same_QT
                    q_QNGX = q_QHX.reshape(-1, n, h // n, x)
                    scores = jnp.einsum("qngx,tnx->ngqt", q_QNGX, k_TNX, preferred_element_type=jnp.float32)
                    return jnp.where(visible_QT, scores, -jnp.inf).max((2, 3)).reshape(h)

                # The first key of a block after its last query: a block of the future.
                return jax.lax.cond(positions_Q.max() >= key_positions_T[0], largest, lambda: nothing_H)

            return jax.lax.map(keys, (_blocks(k_TNX), key_positions_CQ, _blocks(key_segments_T))).max(0)

        return jax.lax.map(queries, (_blocks(q_SHX), positions_CQ, _blocks(segments_S))).max(0)

    return jax.lax.map(row, (q_BSHX, k_BTNX, segments_BS, key_segments_BT)).max(0)


def _blocks(array: jax.Array) -> jax.Array:
    """Returns an array of S positions as [C,Q,...], padded with zeros, which are segment 0: no real tokens."""
    size = min(BLOCK, len(array))
    padding = -len(array) % size
    return jnp.pad(array, ((0, padding), *[(0, 0)] * (array.ndim - 1))).reshape(-1, size, *array.shape[1:])
