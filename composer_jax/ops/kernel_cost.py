"""What kernels cost, said beside them.

Whoever estimates a program (composer_jax/scale) reads its matrix products from the traced program, but cannot see into
a kernel, nor how many rows of a ragged product belong to anybody. So a kernel's file registers a formula under the name
by which the kernel appears in a traced program: that of a jitted function, a custom_vjp, a pallas_call or a primitive.
A name that ends in * stands for every name that begins so.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax


class KernelCost(NamedTuple):
    """Of one call on one device."""

    kind: Literal["matmul", "attention", "grouped_matmul"]
    flops: float
    """Two for every multiplication of a matrix product that the kernel really does."""
    hbm_bytes: float
    """Read and written."""


class Call(NamedTuple):
    """A kernel as it stands in a traced program."""

    inputs: Sequence[jax.core.ShapedArray]
    outputs: Sequence[jax.core.ShapedArray]
    params: Mapping[str, Any]
    occupancy: float
    """The share of rows sorted by expert that belong to somebody, on average."""


Formula = Callable[[Call], KernelCost]
_FORMULAS: dict[str, Formula] = {}


def kernel_cost(name: str) -> Callable[[Formula], Formula]:
    """Decorator: this function says what the kernel of that name costs."""

    def register(formula: Formula) -> Formula:
        if name in _FORMULAS:
            raise ValueError(f"the kernel {name!r} has a formula already")
        _FORMULAS[name] = formula
        return formula

    return register


def formula_of(name: str) -> Formula | None:
    """The formula of a kernel, the longest matching name first."""
    fitting = [n for n in _FORMULAS if n == name or (n.endswith("*") and name.startswith(n[:-1]))]
    return _FORMULAS[max(fitting, key=len)] if fitting else None


def array_bytes(*arrays: jax.core.ShapedArray) -> float:
    return float(sum(a.size * a.dtype.itemsize for a in arrays))
