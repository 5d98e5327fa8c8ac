"""Varying manual axes (VMA): the mesh axes along which a value inside shard_map differs between devices.

A function with its own gradient (jax.custom_vjp) must return gradients that vary along the same axes as its operands.
Operands that are matched before the call satisfy this, and JAX then sums the gradients of replicated operands itself.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax._src.config  # see without_vma_checks


def match_vma(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays, typed as varying along every mesh axis that any of them varies along."""
    axes = frozenset().union(*map(varying_axes, arrays))
    return [pcast_varying(array, axes) for array in arrays]


def varying_axes(array: jax.Array) -> frozenset[str]:
    """Returns the mesh axes along which a value inside shard_map varies; none outside shard_map."""
    return jax.typeof(array).mat.varying


def pcast_varying(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Returns the array, typed as varying along these mesh axes as well."""
    missing = tuple(sorted(axes - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


@contextlib.contextmanager
def without_vma_checks() -> Iterator[Callable[[jax.Array], jax.Array]]:
    """Traces its body without VMA types, for kernels that JAX ships without them.

    Yields a function that removes the VMA type of an operand; restore the types of the results with `pcast_varying`.
    JAX's only public switch is shard_map's check_vma, which would give up the checks, and the gradient sums that follow
    from them, in the whole program.
    """
    # expand_dims and squeeze: any operation whose result type derives from its operand's would do.
    with jax._src.config._check_vma(False):
        yield lambda array: jax.lax.squeeze(jax.lax.expand_dims(array, (0,)), (0,))
