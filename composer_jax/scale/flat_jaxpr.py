"""A traced program as a flat list of what really runs on a TPU.

Calls are written out, of the branches of `lax.platform_dependent` the TPU's is taken, and what nothing needs is left
out, as XLA does. Loops and ordinary branches stay: each is one step, whose inside is asked for separately.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

# Primitives that are nothing but a call of the one program in their parameters.
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
# Those whose inside is no program of its own to walk into: what they add up with, or a kernel.
OPAQUE = ("scatter", "reduce", "pallas_call", "scan", "while", "cond")
# Our own step: what a device has of an array that lies on the whole mesh.
SHARD = "shard"
# Other names for the same bytes.
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
    """An array of the flat program; equal are those that are the same bytes, whatever shape they are seen in."""

    def __init__(self, aval, same_as: "Value | None" = None):
        self.aval = aval
        self._bytes_of = self if same_as is None else same_as._bytes_of

    def __eq__(self, other) -> bool:
        return isinstance(other, Value) and self._bytes_of is other._bytes_of

    def __hash__(self) -> int:
        return id(self._bytes_of)

    @property
    def bytes(self) -> float:
        """Of the array; nothing for what is no array, such as a random key."""
        size, dtype = getattr(self.aval, "size", 0), getattr(self.aval, "dtype", None)
        return float(size * getattr(dtype, "itemsize", 0))


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    primitive: str
    name: str
    """Of the kernel or the function that is called, else that of the primitive."""
    scope: str
    """The jax.named_scope it stands in, with the transformations around it."""
    params: Mapping[str, Any]
    inputs: Sequence[Value]
    outputs: Sequence[Value]


def flatten(jaxpr, inputs: Sequence[Value], kernels, scope: str = "") -> tuple[list[Equation], list[Value]]:
    """The steps of a program in order, and its outputs.

    Args:
      jaxpr: open or closed.
      inputs: what the program is called with.
      kernels: whether a name belongs to a kernel, which stays one step.

    Raises:
      NotImplementedError: a primitive that contains a program, of which is not known what it does with it.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    steps: list[Equation] = []
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
                steps += [Equation(SHARD, SHARD, here, {}, [a], [p]) for a, p in zip(arguments, parts, strict=True)]
                arguments = parts
            below, results = flatten(inner, arguments, kernels, here)
            steps += below
        elif _is_alias(primitive, arguments, equation.outvars) and not kernels(name):
            results = [Value(out.aval, a) for a, out in zip(arguments, equation.outvars, strict=True)]
        else:
            results = [Value(v.aval) for v in equation.outvars]
            steps.append(Equation(primitive, name, here, params, arguments, results))
        values |= dict(zip(equation.outvars, results, strict=True))
    return steps, [value(v) for v in jaxpr.outvars]


def eliminate_dead_code(steps: Sequence[Equation], outputs: Iterable[Value]) -> tuple[list[Equation], set[Value]]:
    """The steps without those whose results nobody uses, and every value that somebody uses."""
    used, kept = set(outputs), []
    for step in reversed(steps):
        if any(out in used for out in step.outputs):
            kept.append(step)
            used.update(step.inputs)
    return kept[::-1], used


def _name(primitive: str, params: Mapping[str, Any]) -> str:
    if primitive == "pallas_call":
        return str(getattr(params.get("name_and_src_info"), "name", None) or params.get("name") or primitive)
    return str(params["name"]) if primitive in CALLS and params.get("name") else primitive


def _is_alias(primitive: str, arguments: Sequence[Value], results) -> bool:
    grown = primitive == "broadcast_in_dim" and len(arguments) == 1 and arguments[0].aval.size == results[0].aval.size
    return grown or primitive in ALIASES


def _called(primitive: str, params: Mapping[str, Any]):
    """The program that this primitive only calls on a TPU, or None."""
    if primitive == "cond" and params.get("branches_platforms") is not None:
        platforms = params["branches_platforms"]
        index = next((i for i, p in enumerate(platforms) if p is None or "tpu" in p), None)
        if index is None:
            raise NotImplementedError(f"a platform_dependent has no branch for TPUs, only for {platforms}")
        return params["branches"][index]
    if primitive in CALLS:
        (inner,) = _programs(params)
        return inner
    if any(True for _ in jaxprs_in_params(params)) and not primitive.startswith(OPAQUE):
        raise NotImplementedError(f"the primitive {primitive!r} contains a program; scale/steps.py does not know it")
    return None


def _programs(params: Mapping[str, Any]) -> list:
    return [params[key] for key in ("jaxpr", "call_jaxpr") if key in params]


def trace(function, *arguments):
    """The closed jaxpr of a jitted function, or of any other, at abstract arguments."""
    return function.trace(*arguments).jaxpr if hasattr(function, "trace") else jax.make_jaxpr(function)(*arguments)
