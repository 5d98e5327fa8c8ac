"""What cuDNN's attention of packed documents computes, from the offsets and lengths that it is given.

NaN stands where cuDNN writes nothing. Offsets count the numbers of the arrays and not tokens, as cuDNN reads them.
"""

import jax.numpy as jnp


def forward(q, k, v, lengths_C, q_offsets, kv_offsets, window):
    """In place of composer_jax/ops/cudnn_attention.py: fused_forward."""
    q_CSHX, k_CSHX, v_CSHX = _documents(q, k, v, lengths_C, q_offsets, kv_offsets)
    scores = _scores(q_CSHX, k_CSHX, lengths_C, window)
    largest = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = weights.sum(-1)
    y_CSHX = jnp.einsum("chqt,cthx->cqhx", weights / total[..., None], v_CSHX)
    stats_CHS = jnp.log(total) + largest[..., 0]
    stats_CHS = jnp.where(_is_token(lengths_C, q.shape[1])[:, None], stats_CHS, jnp.nan)
    return _write(y_CSHX, q, lengths_C, q_offsets), stats_CHS


def backward(q, k, v, y, dy, stats_CHS, lengths_C, q_offsets, kv_offsets, window):
    """In place of composer_jax/ops/cudnn_attention.py: fused_backward."""
    q_CSHX, k_CSHX, v_CSHX = _documents(q, k, v, lengths_C, q_offsets, kv_offsets)
    y_CSHX, dy_CSHX = (_read(array, lengths_C, q_offsets) for array in (y, dy))
    stats_CHS = jnp.where(_is_token(lengths_C, q.shape[1])[:, None], stats_CHS, 0)
    weights = jnp.exp(_scores(q_CSHX, k_CSHX, lengths_C, window) - stats_CHS[..., None])
    delta = jnp.einsum("cqhx,cqhx->chq", dy_CSHX, y_CSHX)[..., None]
    dscores = weights * (jnp.einsum("cqhx,cthx->chqt", dy_CSHX, v_CSHX) - delta)
    dq_CSHX = jnp.einsum("chqt,cthx->cqhx", dscores, k_CSHX)
    dk_CSHX = jnp.einsum("chqt,cqhx->cthx", dscores, q_CSHX)
    dv_CSHX = jnp.einsum("chqt,cqhx->cthx", weights, dy_CSHX)
    shared = [array.reshape(*array.shape[:2], k.shape[2], -1, k.shape[3]).sum(3) for array in (dk_CSHX, dv_CSHX)]
    return [
        _write(dq_CSHX, q, lengths_C, q_offsets),
        *(_write(array, k, lengths_C, kv_offsets) for array in shared),
    ]


def _is_token(lengths_C, s):
    return jnp.arange(s) < lengths_C[:, None]


def _indices(array, lengths_C, offsets):
    """The index of each number of each document in the array as one row of numbers: [C,S,heads,X]."""
    _, s, heads, x = array.shape
    inside = jnp.arange(s * heads * x).reshape(s, heads, x)
    indices = offsets[: len(lengths_C), None, None, None] + inside
    return jnp.where(_is_token(lengths_C, s)[:, :, None, None], indices, array.size)


def _read(array, lengths_C, offsets):
    return array.astype(jnp.float32).reshape(-1).at[_indices(array, lengths_C, offsets)].get(mode="fill", fill_value=0)


def _write(values, like, lengths_C, offsets):
    nothing = jnp.full(like.size, jnp.nan, like.dtype)
    indices = _indices(like, lengths_C, offsets)
    return nothing.at[indices].set(values.astype(like.dtype), mode="drop").reshape(like.shape)


def _documents(q, k, v, lengths_C, q_offsets, kv_offsets):
    """Queries, keys and values of the documents, with the keys and values of every head of queries."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and k.shape == v.shape and len(lengths_C) >= 2 * len(q)
    assert len(q_offsets) == len(kv_offsets) == len(lengths_C) + len(q)
    k_CSNX, v_CSNX = (_read(array, lengths_C, kv_offsets) for array in (k, v))
    repeated = [jnp.repeat(array, q.shape[2] // k.shape[2], axis=2) for array in (k_CSNX, v_CSNX)]
    return _read(q, lengths_C, q_offsets), *repeated


def _scores(q_CSHX, k_CSHX, lengths_C, window):
    s = q_CSHX.shape[1]
    back = jnp.arange(s)[:, None] - jnp.arange(s)
    seen = (back >= 0) & (back < (window or s)) & _is_token(lengths_C, s)[:, None]
    return jnp.where(seen[:, None], jnp.einsum("cqhx,cthx->chqt", q_CSHX, k_CSHX), -1e30)
