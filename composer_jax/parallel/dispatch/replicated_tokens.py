"""Divides tokens that are replicated over some mesh axes among the devices along them, and gathers the results."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from composer_jax.parallel.dispatch.contract import DispatchOutput, group_size

Compute = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def split_replicated_tokens(
    compute: Compute, x_TD: jax.Array, ids_Tk: jax.Array, gates_Tk: jax.Array, axes: tuple[str, ...]
) -> DispatchOutput:
    """Applies compute(x, ids, gates) -> (y, dropped) to each device's part of tokens that are replicated over `axes`.

    If the tokens do not divide evenly, rows with expert id -1 pad the last part. The output is replicated again.
    """
    if not axes:
        return DispatchOutput(*compute(x_TD, ids_Tk, gates_Tk))
    rows = x_TD.shape[0]
    pad = lambda a, value=0: jnp.pad(a, ((0, -rows % group_size(axes)), (0, 0)), constant_values=value)  # noqa: E731
    y_TD, dropped = compute(
        slice_replicated(pad(x_TD), axes), _slice(pad(ids_Tk, -1), axes), slice_replicated(pad(gates_Tk), axes)
    )
    return DispatchOutput(_all_gather(y_TD, axes)[:rows], jax.lax.psum(dropped, axes))


def _slice(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    rows = a.shape[0] // group_size(axes)
    return jax.lax.dynamic_slice_in_dim(a, jax.lax.axis_index(axes) * rows, rows)


def _all_gather(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.all_gather(a, axes, axis=0, tiled=True, to="invarying")


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def slice_replicated(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns this device's rows of an array that is replicated over `axes`.

    The gradient all-gathers the parts. Autodiff would psum arrays that are zero outside one part, which sends twice as
    much.
    """
    return _slice(a, axes)


slice_replicated.defvjp(lambda a, axes: (_slice(a, axes), None), lambda axes, _, da: (_all_gather(da, axes),))
