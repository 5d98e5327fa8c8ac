"""Devices that have the same tokens divide the work: each takes its part of them, and all get the whole result."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from composer_jax.parallel.dispatch.contract import Dispatched, devices_along

Compute = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def in_parts(
    compute: Compute, x_TD: jax.Array, ids_Tk: jax.Array, gates_Tk: jax.Array, axes: tuple[str, ...]
) -> Dispatched:
    """compute(x, ids, gates) -> (y, dropped) of each device's part of the tokens, which are the same along `axes`.

    Where they do not divide, rows that choose expert -1, so nobody, fill the last part.
    """
    if not axes:
        return Dispatched(*compute(x_TD, ids_Tk, gates_Tk))
    rows = x_TD.shape[0]
    pad = lambda a, value=0: jnp.pad(a, ((0, -rows % devices_along(axes)), (0, 0)), constant_values=value)  # noqa: E731
    y_TD, dropped = compute(own_part(pad(x_TD), axes), _part(pad(ids_Tk, -1), axes), own_part(pad(gates_Tk), axes))
    return Dispatched(_whole(y_TD, axes)[:rows], jax.lax.psum(dropped, axes))


def _part(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    rows = a.shape[0] // devices_along(axes)
    return jax.lax.dynamic_slice_in_dim(a, jax.lax.axis_index(axes) * rows, rows)


def _whole(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.all_gather(a, axes, axis=0, tiled=True, to="invarying")


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def own_part(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """This device's rows of an array that is the same along `axes`. Its gradient gathers the parts; left to
    differentiation it would add up arrays that are zero but for one part, which moves twice as much."""
    return _part(a, axes)


own_part.defvjp(lambda a, axes: (_part(a, axes), None), lambda axes, _, da: (_whole(da, axes),))
