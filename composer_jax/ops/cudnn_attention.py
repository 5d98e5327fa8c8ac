"""Causal attention of packed rows by cuDNN's fused kernels for NVIDIA GPUs, and its gradients.

The documents of a row are the runs of equal segments. cuDNN computes a list of documents, each given by the offset of
its first token and its length. So documents do not see each other, padding belongs to none and costs nothing, and no
array of scores exists. A call has a fixed number of places for documents; a loop calls again while a batch has more.

The calls are JAX's own primitives, bound here without JAX's public function around them. That function cannot be traced
without a GPU, keeps a float32 number per place, head and token for the backward pass, and in JAX 0.10.2 multiplies the
offsets of keys by the heads of queries. This file keeps one number per head and token, the log-sum-exp of the logits.

cuDNN knows nothing of attention sinks c. With logits z, their log-sum-exp l, l' = log(exp(l) + exp(c)) and cuDNN's
output o, the weights are P = exp(z - l') and the output is y = o exp(l - l'). cuDNN's backward pass takes the weights
from the log-sum-exp, and dv = P dy and dz = P (dy v - dy y) from the output that it is given: with l' and y these are
the gradients under sinks. A sink has the weight exp(c - l') and the value 0, so that dc = -sum exp(c - l') (dy y).

What the calls compute, take and need is read from cudnn-frontend 1.32, whose graphs XLA builds (include/cudnn_frontend/
node/scaled_dot_product_flash_attention.h).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from composer_jax.ops.shapes import check_shapes
from composer_jax.ops.vma import match_vma, pcast_varying, varying_axes

MAX_OFFSET = 2**31 - 1
"""cuDNN's offsets are int32 and count numbers instead of tokens."""
DOCUMENTS = 8
"""Places for documents in a call per row, at most; the rows of a call share them."""
WORKSPACE = 2**33
"""Bytes that cuDNN's backward pass may take for itself in a call, unless a row with two places needs more."""


class _Documents(NamedTuple):
    """The documents of one call, in C places; places without a document come last and have the length 0."""

    starts_C: jax.Array
    """int32: the first token, counted over the whole batch; B*S for none."""
    lengths_C: jax.Array
    """int32: tokens."""
    place_BS: jax.Array
    """int32: the place of each token's document."""
    position_BS: jax.Array
    """int32: position of each token in its document."""
    inside_BS: jax.Array
    """bool: whether the token's document is in this call; place and position mean nothing for other tokens."""


def attend(
    q_BSHX: jax.Array,
    k_BSNX: jax.Array,
    v_BSNV: jax.Array,
    segments_BS: jax.Array,
    window: int | None = None,
    windowed: jax.Array | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Returns the same as ops/packed_attention.py: attend_rows for whole rows, computed by cuDNN.

    ops/attention_form.py: cudnn_refusal has the limits of shapes and GPUs.

    Args:
      q_BSHX, k_BSNX, v_BSNV: bfloat16 or float16.
      segments_BS, window: fields of an AttentionMask. Segments rise along a row, except for padding (segment 0).
    """
    check_shapes(
        q_BSHX=(q_BSHX, jnp.floating),
        k_BSNX=(k_BSNX, q_BSHX.dtype),
        v_BSNV=(v_BSNV, q_BSHX.dtype),
        segments_BS=(segments_BS, jnp.integer),
        windowed=(windowed, bool),
        sinks_H=(sinks_H, jnp.float32),
    )
    assert window is None or windowed is not None, f"window={window} needs `windowed`: whether this layer has it"
    arrays = match_vma(q_BSHX, k_BSNX, v_BSNV, segments_BS)
    axes = varying_axes(arrays[0])
    windowed, sinks_H = (None if array is None else pcast_varying(array, axes) for array in (windowed, sinks_H))
    return _attention(window, *arrays, windowed, sinks_H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(window, q, k, v, segments, windowed, sinks):
    return _forward(window, q, k, v, segments, windowed, sinks)[0]


def _forward(window, q, k, v, segments, windowed, sinks):
    def rows(q, k, v, segments):
        def call(documents: _Documents):
            widened, offsets = _widen(q, k, v), _offsets(documents, q, k, v)
            y, stats_CHS = _by_window(fused_forward, window, windowed, *widened, documents.lengths_C, *offsets)
            lse_BSH = stats_CHS[documents.place_BS, :, documents.position_BS]
            return y[..., : v.shape[-1]], lse_BSH

        return _each_document(call, segments, _places(len(q), _workspace_of(q, k, v)))

    y, lse = _in_groups_of_rows(rows, q, k, v, segments)
    if sinks is not None:
        without, lse = lse, jnp.logaddexp(lse, sinks)
        y = (y * jnp.exp(without - lse)[..., None]).astype(y.dtype)
    y, lse = (checkpoint_name(array, "attention") for array in (y, lse))
    return y, (q, k, v, segments, windowed, sinks, y, lse)


def _backward(window, residuals, dy):
    q, k, v, segments, windowed, sinks, y, lse = residuals

    def rows(q, k, v, segments, y, lse, dy):
        def call(documents: _Documents):
            widened, offsets = _widen(q, k, v, y, dy), _offsets(documents, q, k, v)
            tokens_CS = documents.starts_C[:, None] + jnp.arange(q.shape[1])
            stats_CHS = lse.reshape(-1, lse.shape[-1]).at[tokens_CS].get(mode="clip").swapaxes(1, 2)
            how = documents.lengths_C, *offsets
            dq, dk, dv = _by_window(fused_backward, window, windowed, *widened, stats_CHS, *how)
            return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]

        return _each_document(call, segments, _places(len(q), _workspace_of(q, k, v)))

    dq, dk, dv = _in_groups_of_rows(rows, q, k, v, segments, y, lse, dy)
    if sinks is None:
        return dq, dk, dv, None, None, None
    dy_y = jnp.einsum("bshv,bshv->bsh", dy, y, preferred_element_type=jnp.float32)
    return dq, dk, dv, None, None, -jnp.sum(jnp.exp(sinks - lse) * dy_y, axis=(0, 1))


_attention.defvjp(_forward, _backward)


def fused_forward(q, k, v, lengths_C, q_offsets, kv_offsets, window: int | None):
    """Returns cuDNN's outputs [B,S,H,X] and the log-sum-exp of the logits, float32 [C,H,S] by place and position.

    Only tokens of the documents have values; what lies elsewhere is undefined. q [B,S,H,X], k and v [B,S,N,X].

    Args:
      lengths_C: int32: tokens of each document. C is a multiple of B.
      q_offsets, kv_offsets: int32 [C+B]: where each document begins in q and the outputs, and in k and v, and then the
        ends of these arrays. They count numbers: one offset for keys and values needs both equally wide, and with
        grouped queries it counts the heads of keys.
      window: keys that a query attends to, its own included; None: all before it.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    return cudnn._dot_product_attention_fwd_p.bind(
        q, k, v, *_packed(q, lengths_C, q_offsets, kv_offsets), **_attributes(cudnn, window), is_training=True
    )


def fused_backward(q, k, v, y, dy, stats_CHS, lengths_C, q_offsets, kv_offsets, window: int | None):
    """Returns cuDNN's gradients of q, k and v; undefined except for tokens of the documents.

    Args:
      y, dy: [B,S,H,X]: outputs and their gradients.
      stats_CHS: the log-sum-exp that the weights follow from. The other arguments are those of fused_forward.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    packed = _packed(q, lengths_C, q_offsets, kv_offsets)
    return cudnn._dot_product_attention_bwd_p.bind(q, k, v, *packed, stats_CHS, y, dy, **_attributes(cudnn, window))


def _packed(q, lengths_C, q_offsets, kv_offsets):
    """Returns the operands that JAX's primitives take after q, k and v: bias, lengths, offsets, tables of pages."""
    unused = jnp.zeros(0, q.dtype)
    lengths, *offsets = (array.reshape(q.shape[0], -1) for array in (lengths_C, q_offsets, kv_offsets))
    return unused, lengths, lengths, *offsets, unused, unused


def _attributes(cudnn, window: int | None):
    return dict(
        scale=1.0,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=window,
    )


def _by_window(fused: Callable, window: int | None, windowed: jax.Array | None, *operands):
    if window is None:
        return fused(*operands, None)
    with_window, without = (lambda *operands, w=w: tuple(fused(*operands, w)) for w in (window, None))
    return jax.lax.cond(windowed, with_window, without, *operands)


def _widen(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays [...,X] with zeros behind the narrower ones, so that all are equally wide."""
    width = max(array.shape[-1] for array in arrays)
    return [jnp.pad(array, [(0, 0)] * 3 + [(0, width - array.shape[-1])]) for array in arrays]


def _offsets(documents: _Documents, q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """Returns the offsets of queries and of keys, int32 [C+B] (fused_forward)."""
    b, s, _, x = q.shape
    starts = jnp.pad(documents.starts_C, (0, b), constant_values=b * s)
    return [starts * (heads * max(x, v.shape[-1])) for heads in (q.shape[2], k.shape[2])]


def backward_workspace(rows: int, tokens: int, heads: int, kv_heads: int, width: int) -> int:
    """Returns the bytes that cuDNN's backward pass takes for itself at once, beside operands and results.

    Args:
      rows, tokens: B and S. heads, kv_heads: H and N.
      width: the larger one of X and V.
    """
    per_place = _workspace_per_place(tokens, heads, kv_heads, width)
    return per_place * _places(_rows_at_once(rows, per_place), per_place)


def _workspace_per_place(tokens: int, heads: int, kv_heads: int, width: int) -> int:
    """Returns the bytes that cuDNN's backward pass takes for each place, as if a document there had a whole row.

    The gradient of queries is summed in float32. With grouped queries those of keys and values exist for every head of
    queries, in 2 bytes.
    """
    return tokens * heads * width * (4 if kv_heads == heads else 8)


def _workspace_of(q: jax.Array, k: jax.Array, v: jax.Array) -> int:
    """Returns _workspace_per_place of operands [B,S,H,X]."""
    _, s, h, x = q.shape
    return _workspace_per_place(s, h, k.shape[2], max(x, v.shape[-1]))


def _places(rows: int, per_place: int) -> int:
    """Returns the places for documents of a call, at least 2 per row: with one, JAX makes a call without offsets."""
    return rows * min(DOCUMENTS, max(2, WORKSPACE // (rows * per_place)))


def _rows_at_once(rows: int, per_place: int) -> int:
    """Returns how many of the rows are computed at once: as many as WORKSPACE allows."""
    most = max(1, WORKSPACE // (DOCUMENTS * per_place))
    return max(at_once for at_once in range(1, min(rows, most) + 1) if rows % at_once == 0)


def _in_groups_of_rows(function: Callable, *arrays: jax.Array):
    """Returns function(*arrays), with as many of the B rows at once as WORKSPACE allows. Arrays are [B,...]."""
    q, k, v, *_ = arrays
    b = len(q)
    rows = _rows_at_once(b, _workspace_of(q, k, v))
    if rows == b:
        return function(*arrays)
    groups = [array.reshape(b // rows, rows, *array.shape[1:]) for array in arrays]
    results = jax.lax.map(lambda group: function(*group), groups)
    return jax.tree.map(lambda array: array.reshape(b, *array.shape[2:]), results)


def _each_document(call: Callable, segments_BS: jax.Array, places: int):
    """Returns the arrays [B,S,...] that `call` returns, each token's from the call with its document; 0 for padding.

    call: a function of _Documents. Its arrays may hold anything for tokens outside of them.
    """
    neighbours = jnp.pad(segments_BS, ((0, 0), (1, 1)))
    begins_BS = (segments_BS > 0) & (segments_BS != neighbours[:, :-2])
    ends_BS = (segments_BS > 0) & (segments_BS != neighbours[:, 2:])
    numbers_BS = jnp.cumsum(begins_BS.reshape(-1)).reshape(segments_BS.shape) - 1
    numbers_BS = jnp.where(segments_BS > 0, numbers_BS, -1)

    def fill(first: jax.Array, arrays):
        documents = _documents(begins_BS, ends_BS, numbers_BS, first, places)
        fresh = call(documents)

        def merge(fresh, old):
            inside = documents.inside_BS.reshape(*documents.inside_BS.shape, *(1,) * (fresh.ndim - 2))
            return jnp.where(inside, fresh, old)

        return tuple(merge(a, b) for a, b in zip(fresh, arrays or (0,) * len(fresh), strict=True))

    count = begins_BS.sum()
    first = jnp.zeros_like(count)
    _, arrays = jax.lax.while_loop(
        lambda carry: carry[0] < count,
        lambda carry: (carry[0] + places, fill(*carry)),
        (first + places, fill(first, None)),
    )
    return arrays


def _documents(
    begins_BS: jax.Array, ends_BS: jax.Array, numbers_BS: jax.Array, first: jax.Array, places: int
) -> _Documents:
    """Returns the `places` documents from number `first` on, counted over all rows.

    Args:
      begins_BS, ends_BS: bool, whether a token is the first and the last of its document.
      numbers_BS: int32, the number of each token's document; -1 for padding.
    """
    size = numbers_BS.size
    tokens_BS = jnp.arange(size, dtype=jnp.int32).reshape(numbers_BS.shape)
    place_BS = numbers_BS - first
    inside_BS = (place_BS >= 0) & (place_BS < places)

    def by_place(marked_BS: jax.Array, nothing: int) -> jax.Array:
        indices_BS = jnp.where(inside_BS & marked_BS, place_BS, places)
        return jnp.full(places, nothing, jnp.int32).at[indices_BS].set(tokens_BS, mode="drop")

    starts_C = by_place(begins_BS, size)
    lengths_C = by_place(ends_BS, size - 1) - starts_C + 1
    place_BS = jnp.clip(place_BS, 0, places - 1)
    position_BS = jnp.clip(tokens_BS - starts_C[place_BS], 0)
    return _Documents(starts_C, lengths_C, place_BS, position_BS, inside_BS)
