"""Rows cut over the mesh axis `context`: which positions a device holds, and how it learns of the others.

A row of S positions is cut into 2n chunks for n devices; device i holds chunks i and 2n-1-i, one behind the other. With
a causal mask the first chunk is cheap where the second is dear, so that all devices have the same amount of attention
("zigzag": Llama 3, arXiv 2407.21783, section 3.3.2; Composer 2, arXiv 2603.24477, section 5). With one device nothing
is cut and nothing here adds to a program.
"""

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.errors import UserError
from composer_jax.parallel.sharding import axis_size

AXIS = "context"


def zigzag(length: int, devices: int) -> np.ndarray:
    """int [length]: where in the row every entry of the cut row stands; device i's part is the i-th of n equal ones.

    Raises:
      UserError: the length does not divide.
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


def order(length: int) -> jax.Array:
    """int32 [S]: the position in the whole row of each of the S = `length` entries of this device's part."""
    n = axis_size(AXIS)
    if n == 1:
        return jnp.arange(length)
    half, i = length // 2, jax.lax.axis_index(AXIS)
    within = jnp.arange(half)
    return jnp.concatenate([i * half + within, (2 * n - 1 - i) * half + within])


def gather(part: jax.Array) -> jax.Array:
    """[B,S,...] of every device -> the whole row [B,nS,...], in the order of positions."""
    n = axis_size(AXIS)
    if n == 1:
        return part
    whole = jax.lax.all_gather(part, AXIS, axis=1, tiled=True)
    b, length, rest = whole.shape[0], whole.shape[1], whole.shape[2:]
    chunks = whole.reshape(b, n, 2, length // (2 * n), *rest)
    return jnp.concatenate([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1).reshape(whole.shape)


def following(x: jax.Array) -> jax.Array:
    """[B,S,...] -> the value one position later in the row; zeros behind the last position."""
    n = axis_size(AXIS)
    if n == 1:
        return jnp.pad(x, ((0, 0), (0, 1)) + ((0, 0),) * (x.ndim - 2))[:, 1:]
    first, second = _halves(x)
    begins = _in_order(jnp.stack([first[:, 0], second[:, 0]]))  # [2n, B, ...]: how every chunk begins
    begins = jnp.concatenate([begins, jnp.zeros_like(begins[:1])])
    i = jax.lax.axis_index(AXIS)
    return jnp.concatenate([first[:, 1:], begins[i + 1][:, None], second[:, 1:], begins[2 * n - i][:, None]], axis=1)


def preceding(x: jax.Array) -> jax.Array:
    """[B,S,...] -> the value one position earlier in the row; zeros before the first position."""
    n = axis_size(AXIS)
    if n == 1:
        return jnp.pad(x, ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))[:, :-1]
    first, second = _halves(x)
    ends = _in_order(jnp.stack([first[:, -1], second[:, -1]]))
    ends = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    i = jax.lax.axis_index(AXIS)
    return jnp.concatenate([ends[i][:, None], first[:, :-1], ends[2 * n - 1 - i][:, None], second[:, :-1]], axis=1)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    half = x.shape[1] // 2
    return x[:, :half], x[:, half:]


def _in_order(edges: jax.Array) -> jax.Array:
    """One entry of each of this device's two chunks [2,...] -> those of all chunks of the row [2n,...], in order."""
    whole = jax.lax.all_gather(edges, AXIS, axis=0)
    return jnp.concatenate([whole[:, 0], whole[::-1, 1]])
