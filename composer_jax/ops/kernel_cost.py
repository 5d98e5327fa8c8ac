"""Cost formulas of kernels, registered in the files of the kernels.

Plans (composer_jax/scale) read matrix products from the traced program, which shows neither the inside of a kernel nor
how many rows of a ragged product have a group. A kernel's file therefore registers a formula under the kernel's name in
a traced program: that of a jitted function, a custom_vjp, a pallas_call or a primitive. A name that ends in * matches
every name with that prefix.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax.core import ShapedArray

AT_MOST = "at_most_"
"""Begins the jax.named_scope of a while loop; the rest is the number of its iterations in the worst case."""


class KernelCost(NamedTuple):
    """Cost of one call on one device."""

    kind: Literal["matmul", "attention", "grouped_matmul"]
    flops: float
    """Two per multiplication of the matrix products that the kernel computes."""
    hbm_bytes: float
    """Bytes read and written."""


class KernelCall(NamedTuple):
    """A kernel's equation in a traced program."""

    inputs: Sequence[ShapedArray]
    outputs: Sequence[ShapedArray]
    params: Mapping[str, Any]
    occupancy: float
    """Mean fraction of the rows sorted by expert that have an expert."""


Formula = Callable[[KernelCall], KernelCost]
_FORMULAS: dict[str, Formula] = {}


def kernel_cost(name: str) -> Callable[[Formula], Formula]:
    """Decorator that registers a function as the cost formula of the kernel `name`."""

    def register(formula: Formula) -> Formula:
        if name in _FORMULAS:
            raise ValueError(f"the kernel {name!r} has a formula already")
        _FORMULAS[name] = formula
        return formula

    return register


def find_formula(name: str) -> Formula | None:
    """Returns the formula with the longest matching name, or None."""
    matches = [n for n in _FORMULAS if n == name or (n.endswith("*") and name.startswith(n[:-1]))]
    return _FORMULAS[max(matches, key=len)] if matches else None


def array_bytes(*arrays: ShapedArray) -> float:
    """Returns the sum of the arrays' sizes in bytes."""
    return float(sum(a.size * a.dtype.itemsize for a in arrays))
