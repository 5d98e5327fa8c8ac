"""Which mesh axes a value inside shard_map differs along, and how operands are brought to the same ones.

A function with a gradient of its own (jax.custom_vjp) must return gradients that differ along the axes that its
operands do. With all operands marked alike before the call, JAX itself sums the gradient of what devices share.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax


def match_vma(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays, marked as different between devices along every axis that any of them is."""
    axes = frozenset().union(*map(varying_axes, arrays))
    return [pcast_varying(array, axes) for array in arrays]


def varying_axes(array: jax.Array) -> frozenset[str]:
    """Mesh axes along which a value inside shard_map differs between devices; none outside."""
    return jax.typeof(array).mat.varying


def pcast_varying(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The array, marked as different between the devices along these mesh axes."""
    missing = tuple(sorted(axes - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


@contextlib.contextmanager
def without_vma_checks() -> Iterator[Callable[[jax.Array], jax.Array]]:
    """Traces what is inside without the book-keeping of axes, for kernels that JAX ships without it. Gives a function
    that takes the marks off an operand; put them back on the results with `pcast_varying`.

    JAX has no public switch but shard_map's check_vma, which would give up the checks, and the sums of gradients that
    follow from them, in the whole program.
    """
    # expand and squeeze: any operation would do that derives its result's type from its operand's.
    with jax._src.config._check_vma(False):
        yield lambda array: jax.lax.squeeze(jax.lax.expand_dims(array, (0,)), (0,))
