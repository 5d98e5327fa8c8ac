"""Context parallelism: rows divided over the mesh axis `context`, and the halo exchanges between their parts.

A row of S positions is cut into 2n chunks for n devices; device i holds chunks i and 2n-1-i, concatenated. Under a
causal mask early chunks need little attention and late chunks much, so this pairing gives every device the same amount
("zigzag": Llama 3, arXiv 2407.21783, section 3.3.2; Composer 2, arXiv 2603.24477, section 5). With one device the row
stays whole and the functions here add no collective to a program.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.errors import UserError
from composer_jax.parallel.sharding import axis_size

AXIS = "context"


def zigzag_order(length: int, devices: int) -> np.ndarray:
    """Returns int [length]: the position of every entry of the reordered row, whose i-th n-th belongs to device i.

    Raises:
      UserError: the length is not a multiple of twice the number of devices.
    """
    if devices == 1:
        return np.arange(length)
    if length % (2 * devices):
        raise UserError(
            f"Rows of {length} tokens do not divide over mesh axis context={devices}, which cuts them into "
            f"{2 * devices} chunks; use a multiple of {2 * devices}."
        )
    chunks = np.arange(length).reshape(2 * devices, -1)
    return np.stack([chunks[:devices], chunks[devices:][::-1]], axis=1).reshape(-1)


def local_positions(length: int) -> jax.Array:
    """Returns int32 [S]: the positions, in the whole row, of the S = `length` entries on this device."""
    n = axis_size(AXIS)
    if n == 1:
        return jnp.arange(length)
    half, i = length // 2, jax.lax.axis_index(AXIS)
    offsets = jnp.arange(half)
    return jnp.concatenate([i * half + offsets, (2 * n - 1 - i) * half + offsets])


def local_index(positions: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Returns where positions of the whole row are among the `length` entries on this device.

    Args:
      positions: int32 of any shape; negative ones are nowhere.

    Returns:
      int32 and bool of the same shape: the index, 0 for positions of other devices, and whether it is on this device.
    """
    n = axis_size(AXIS)
    if n == 1:
        is_here = positions >= 0
        return jnp.where(is_here, positions, 0), is_here
    half, i = length // 2, jax.lax.axis_index(AXIS)
    chunk, offset = positions // half, positions % half
    is_early, is_late = chunk == i, chunk == 2 * n - 1 - i
    return jnp.where(is_late, half + offset, jnp.where(is_early, offset, 0)), is_early | is_late


def gather_row(part: jax.Array) -> jax.Array:
    """All-gathers the parts [B,S,...] of every device into the whole row [B,nS,...], ordered by position."""
    n = _check_part(part)
    if n == 1:
        return part
    whole = jax.lax.all_gather(part, AXIS, axis=1, tiled=True)
    b, length, rest = whole.shape[0], whole.shape[1], whole.shape[2:]
    chunks = whole.reshape(b, n, 2, length // (2 * n), *rest)
    return jnp.concatenate([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1).reshape(whole.shape)


def shift_left(x: jax.Array) -> jax.Array:
    """Returns, for [B,S,...], the value one position later in the row; zeros after the last position."""
    n = _check_part(x)
    if n == 1:
        return jnp.pad(x, ((0, 0), (0, 1)) + ((0, 0),) * (x.ndim - 2))[:, 1:]
    early, late = _chunks(x)
    firsts = _gather_edges(jnp.stack([early[:, 0], late[:, 0]]))  # [2n,B,...]: the first entry of every chunk
    firsts = jnp.concatenate([firsts, jnp.zeros_like(firsts[:1])])
    i = jax.lax.axis_index(AXIS)
    return jnp.concatenate([early[:, 1:], firsts[i + 1][:, None], late[:, 1:], firsts[2 * n - i][:, None]], axis=1)


def shift_right(x: jax.Array) -> jax.Array:
    """Returns, for [B,S,...], the value one position earlier in the row; zeros before the first position."""
    n = _check_part(x)
    if n == 1:
        return jnp.pad(x, ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))[:, :-1]
    early, late = _chunks(x)
    lasts = _gather_edges(jnp.stack([early[:, -1], late[:, -1]]))  # [2n,B,...]: the last entry of every chunk
    lasts = jnp.concatenate([jnp.zeros_like(lasts[:1]), lasts])
    i = jax.lax.axis_index(AXIS)
    return jnp.concatenate([lasts[i][:, None], early[:, :-1], lasts[2 * n - 1 - i][:, None], late[:, :-1]], axis=1)


def _check_part(x: jax.Array) -> int:
    """Asserts that x is [B,S,...], with two chunks of equal length if the row is divided; returns the devices."""
    n = axis_size(AXIS)
    chex.assert_axis_dimension_gt(x, 1, 0)
    if n > 1:
        chex.assert_is_divisible(x.shape[1], 2)
    return n


def _chunks(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the early and the late chunk of this device's part."""
    half = x.shape[1] // 2
    return x[:, :half], x[:, half:]


def _gather_edges(edges: jax.Array) -> jax.Array:
    """All-gathers one entry of each of the two chunks [2,...] of every device into [2n,...], in the order of chunks."""
    gathered = jax.lax.all_gather(edges, AXIS, axis=0)
    return jnp.concatenate([gathered[:, 0], gathered[::-1, 1]])
