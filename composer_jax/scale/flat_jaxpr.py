"""A traced program as the flat list of equations that runs on a TPU.

Calls are inlined, `lax.platform_dependent` is replaced by its TPU branch, and dead code is removed, as in XLA. A loop
or an ordinary cond stays one equation; its body is flattened separately.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params

# Primitives that only call the program in their parameters.
CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "shard_map",
}
# Primitives whose inner program is not inlined: a reduction's combiner, a kernel, a loop body.
OPAQUE = ("scatter", "reduce", "pallas_call", "scan", "while", "cond")
# Our own primitive: a device's shard of an array on the whole mesh.
SHARD = "shard"
# The result is the operand's bytes.
ALIASES = {
    "bitcast_convert_type",
    "copy",
    "copy_p",
    "expand_dims",
    "name",
    "optimization_barrier",
    "pbroadcast",
    "pcast",
    "pvary",
    "reshape",
    "sharding_constraint",
    "squeeze",
    "stop_gradient",
}


class Value:
    """An array of the flat program; two are equal if they are the same bytes, possibly in different shapes."""

    def __init__(self, aval, same_as: "Value | None" = None):
        self.aval = aval
        self._bytes_of = self if same_as is None else same_as._bytes_of

    def __eq__(self, other) -> bool:
        return isinstance(other, Value) and self._bytes_of is other._bytes_of

    def __hash__(self) -> int:
        return id(self._bytes_of)

    @property
    def bytes(self) -> float:
        """Size of the array; 0 for a value that is not an array, such as a random key."""
        size, dtype = getattr(self.aval, "size", 0), getattr(self.aval, "dtype", None)
        return float(size * getattr(dtype, "itemsize", 0))


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    primitive: str
    name: str
    """Name of the called kernel or function, otherwise of the primitive."""
    scope: str
    """The enclosing jax.named_scope, with the transformations around it."""
    params: Mapping[str, Any]
    inputs: Sequence[Value]
    outputs: Sequence[Value]


def flatten(jaxpr, inputs: Sequence[Value], kernels, scope: str = "") -> tuple[list[Equation], list[Value]]:
    """Returns the equations of a program in order, and its outputs.

    Args:
      jaxpr: open or closed.
      inputs: the program's arguments.
      kernels: returns whether a name is that of a kernel, which stays one equation.

    Raises:
      NotImplementedError: an unknown primitive contains a program.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    equations: list[Equation] = []
    values = dict(zip(jaxpr.invars, inputs, strict=True))
    values |= {v: Value(v.aval) for v in jaxpr.constvars}

    def value(atom) -> Value:
        return Value(atom.aval) if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        primitive, params = equation.primitive.name, equation.params
        name = _name(primitive, params)
        arguments = [value(v) for v in equation.invars]
        here = "/".join(filter(None, (scope, str(equation.source_info.name_stack))))
        inner = None if kernels(name) else _called(primitive, params)
        if inner is not None:
            if primitive == "cond":
                arguments = arguments[1:]
            if primitive == "shard_map":
                parts = [Value(v.aval) for v in inner.invars]
                equations += [Equation(SHARD, SHARD, here, {}, [a], [p]) for a, p in zip(arguments, parts, strict=True)]
                arguments = parts
            below, results = flatten(inner, arguments, kernels, here)
            equations += below
        elif _is_alias(primitive, arguments, equation.outvars) and not kernels(name):
            results = [Value(out.aval, a) for a, out in zip(arguments, equation.outvars, strict=True)]
        else:
            results = [Value(v.aval) for v in equation.outvars]
            equations.append(Equation(primitive, name, here, params, arguments, results))
        values |= dict(zip(equation.outvars, results, strict=True))
    return equations, [value(v) for v in jaxpr.outvars]


def per_device_programs(jaxpr) -> Iterator[Any]:
    """Yields the programs that a traced program runs under jax.shard_map, whose shapes are those of one device."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for inner in jaxprs_in_params(equation.params):
            if equation.primitive.name == "shard_map":
                yield inner
            else:
                yield from per_device_programs(inner)


def eliminate_dead_code(equations: Sequence[Equation], outputs: Iterable[Value]) -> tuple[list[Equation], set[Value]]:
    """Returns the equations whose results are used, and the set of all used values."""
    used, live = set(outputs), []
    for equation in reversed(equations):
        if any(out in used for out in equation.outputs):
            live.append(equation)
            used.update(equation.inputs)
    return live[::-1], used


def _name(primitive: str, params: Mapping[str, Any]) -> str:
    if primitive == "pallas_call":
        return str(getattr(params.get("name_and_src_info"), "name", None) or params.get("name") or primitive)
    return str(params["name"]) if primitive in CALLS and params.get("name") else primitive


def _is_alias(primitive: str, arguments: Sequence[Value], results) -> bool:
    grown = primitive == "broadcast_in_dim" and len(arguments) == 1 and arguments[0].aval.size == results[0].aval.size
    return grown or primitive in ALIASES


def _called(primitive: str, params: Mapping[str, Any]):
    """Returns the program that the primitive calls on a TPU; None if it is not a plain call."""
    if primitive == "cond" and params.get("branches_platforms") is not None:
        platforms = params["branches_platforms"]
        index = next((i for i, p in enumerate(platforms) if p is None or "tpu" in p), None)
        if index is None:
            raise NotImplementedError(f"lax.platform_dependent has no branch for TPUs, only for {platforms}")
        return params["branches"][index]
    if primitive in CALLS:
        (inner,) = (params[key] for key in ("jaxpr", "call_jaxpr") if key in params)
        return inner
    if any(True for _ in jaxprs_in_params(params)) and not primitive.startswith(OPAQUE):
        raise NotImplementedError(f"scale/flat_jaxpr.py does not know {primitive!r}, which contains a program")
    return None
