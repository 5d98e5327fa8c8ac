"""The cost of a traced program on one device: arithmetic, HBM traffic, and bytes sent over each mesh axis.

The count follows the jaxpr, which contains collectives with their axes and local shapes, loops with their lengths, and
the recomputation of jax.checkpoint. Beyond the jaxpr we assume:

- Matrix products, kernels, sorts, gathers and collectives read their operands from HBM and write their results to it.
- Everything else (elementwise functions, reductions, broadcasts, transposes) is fused into loops around these. The
  result of a loop is stored only if a matrix product, kernel, sort, gather or collective reads it, if it leaves the
  layer, or if two computations use it (the residual stream, the exponentials of a softmax). A conversion is recomputed
  instead, and is never stored for a matrix product. A stored value is written once and read once by all loops
  together. Results smaller than SMALL stay on the chip.
- The branch of a cond with more arithmetic runs; with equal arithmetic, the one with more traffic.
- The fraction `occupancy` of the rows in an expert buffer holds tokens; a grouped product computes only those.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from composer_jax.ops.kernel_cost import AT_MOST, KernelCall, KernelCost, find_formula
from composer_jax.scale.flat_jaxpr import SHARD, Equation, Value, eliminate_dead_code, flatten

SMALL = 2**20
"""Bytes below which the result of a fused loop is assumed to stay in a core's own memory (16 to 128 MiB)."""

COLLECTIVES = {
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all_gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "reduce_scatter"),
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin", "pmean"), "all_reduce"),
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), "all_to_all"),
    **dict.fromkeys(("ppermute", "collective_permute"), "permute"),
}
"""Primitive -> pattern of a Collective."""
# Parts of an array; reading one reads only its own bytes.
VIEWS = {SHARD, "slice", "dynamic_slice", "split", "unstack"}
# Cheap enough for every reading loop to recompute.
RECOMPUTED = {"broadcast_in_dim", "concatenate", "convert_element_type", "iota", "pad", "rev", "transpose"} | VIEWS
# A matrix product applies these to an operand while reading it.
FUSED_INTO_MATMUL = {"convert_element_type", "transpose"}
# Read all of their operands and write all of their results.
READ_AND_WRITE = {"cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod", "reduce_window", "top_k", "approx_top_k"}
PRECISION_PASSES = {"HIGH": 3, "HIGHEST": 6}
"""bfloat16 passes of a product by precision; the default precision has one, also for float32 operands."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """Arithmetic and HBM traffic that overlap; the slower of the two determines the time."""

    kind: str
    """matmul, attention, grouped_matmul, or hbm for negligible arithmetic."""
    flops: float
    hbm_bytes: float
    scope: str = ""


@dataclasses.dataclass(frozen=True)
class Collective:
    pattern: str
    """all_gather, reduce_scatter, all_reduce, all_to_all or permute."""
    axes: tuple[str, ...]
    """Mesh axes larger than 1."""
    bytes: float
    """Of one device's array at its largest: after a gather, before a reduction or all_to_all."""
    scope: str = ""

    def bytes_sent(self, sizes: Mapping[str, int]) -> float:
        """Returns the least bytes that a device sends and receives: (n-1)/n of the array, twice that for all_reduce."""
        n = math.prod(sizes[axis] for axis in self.axes)
        whole = self.bytes * (2 if self.pattern == "all_reduce" else 1)
        return self.bytes if self.pattern == "permute" else whole * (n - 1) / n


@dataclasses.dataclass
class Region:
    """A part of a program that runs `times` times: the whole program or a loop body."""

    name: str
    times: float = 1.0
    operations: list[Operation] = dataclasses.field(default_factory=list)
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    regions: list["Region"] = dataclasses.field(default_factory=list)

    def walk(self, times: float = 1.0) -> Iterator[tuple[float, Operation | Collective]]:
        """Yields (number of runs, operation or collective) of this region and all inner ones."""
        times *= self.times
        yield from ((times, part) for part in (*self.operations, *self.collectives))
        for region in self.regions:
            yield from region.walk(times)

    def flops(self, kind: str | None = None) -> float:
        parts = ((n, p) for n, p in self.walk() if isinstance(p, Operation))
        return sum(n * p.flops for n, p in parts if kind in (None, p.kind))

    def hbm_bytes(self) -> float:
        return sum(n * p.hbm_bytes for n, p in self.walk() if isinstance(p, Operation))

    def bytes_sent(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Returns {mesh axis: bytes each device sends}; a collective over several axes has the key "data+expert"."""
        total: dict[str, float] = {}
        for times, part in self.walk():
            if isinstance(part, Collective):
                key = "+".join(part.axes)
                total[key] = total.get(key, 0.0) + times * part.bytes_sent(sizes)
        return total


@dataclasses.dataclass(frozen=True)
class CostAssumptions:
    """Quantities that the traced program does not contain."""

    sizes: Mapping[str, int]
    """Mesh axis -> devices along it."""
    occupancy: float = 1.0
    """Fraction of the rows in an expert buffer that hold tokens."""
    loop_counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Iterations of a while loop, by its jax.named_scope."""


def estimate_cost(jaxpr, assumed: CostAssumptions) -> Region:
    """Returns the cost of a traced program (open or closed jaxpr) on one device.

    Raises:
      NotImplementedError: a while loop in no scope that `assumed.loop_counts` or AT_MOST (ops/kernel_cost.py) names,
        or a primitive whose cost is not described.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return _region("program", inner, assumed, 1.0, [True] * len(inner.outvars), "")


def _region(name: str, jaxpr, assumed: CostAssumptions, times: float, live: Sequence[bool], scope: str) -> Region:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    inputs = [Value(v.aval) for v in jaxpr.invars]
    equations, outputs = flatten(jaxpr, inputs, lambda kernel: find_formula(kernel) is not None, scope)
    outputs = [out for out, want in zip(outputs, live, strict=True) if want]
    equations, used = eliminate_dead_code(equations, outputs)
    region = Region(name, times)
    originals = _unfused_operands(equations)
    fused = [equation for equation in equations if not _add_cost(equation, region, assumed, used, originals)]
    region.operations += _fused_traffic(equations, fused, inputs, outputs, originals)
    return region


def _add_cost(
    equation: Equation, region: Region, assumed: CostAssumptions, used: set[Value], originals: Mapping[Value, Value]
) -> bool:
    """Adds an equation that accesses HBM by itself to the region; returns False for an equation that is fused."""
    primitive, reads = equation.primitive, sum(v.bytes for v in equation.inputs)
    writes = sum(v.bytes for v in equation.outputs)

    def operation(kind: str, flops: float, hbm_bytes: float) -> None:
        region.operations.append(Operation(kind, flops, hbm_bytes, equation.scope))

    if (formula := find_formula(equation.name)) is not None:
        inputs, outputs = ([v.aval for v in side] for side in (equation.inputs, equation.outputs))
        operation(*formula(KernelCall(inputs, outputs, equation.params, assumed.occupancy)))
    elif primitive == "pallas_call":
        operation(*_declared_cost(equation))
    elif primitive == "dot_general":
        # Operands are widened while being read; a narrowed copy is assumed to be free.
        read = sum(min(v.bytes, originals.get(v, v).bytes) for v in equation.inputs)
        operation("matmul", _matmul_flops(equation), read + writes)
    elif primitive in COLLECTIVES:
        names = equation.params["axes"] if "axes" in equation.params else equation.params["axis_name"]
        axes = tuple(n for n in (names if isinstance(names, tuple) else (names,)) if assumed.sizes[n] > 1)
        # The receive buffer of ragged_all_to_all is larger than the data that arrives.
        size = equation.inputs[0].bytes if primitive == "ragged_all_to_all" else max(reads, writes)
        if axes:
            region.collectives.append(Collective(COLLECTIVES[primitive], axes, size, equation.scope))
    elif primitive == "scan":
        region.regions.append(_scan_region(equation, assumed, used))
    elif primitive == "while":
        name, count = _loop_count(equation.scope, assumed)
        body = equation.params["body_jaxpr"]
        region.regions.append(_region(name, body, assumed, count, [True] * len(body.jaxpr.outvars), equation.scope))
    elif primitive == "cond":
        live = [v in used for v in equation.outputs]
        branches = [_region("branch", b, assumed, 1.0, live, equation.scope) for b in equation.params["branches"]]
        region.regions.append(max(branches, key=lambda branch: (branch.flops(), branch.hbm_bytes())))
    elif primitive == "gather":
        operation("hbm", 0.0, 2 * writes)
    elif primitive.startswith("scatter"):
        moves = 2 if primitive == "scatter" else 3  # the updates, the result, and for scatter-add the rows added to
        operation("hbm", 0.0, moves * equation.inputs[2].bytes)
    elif primitive == "dynamic_update_slice":
        operation("hbm", 0.0, 2 * equation.inputs[1].bytes)
    elif primitive == "sort":
        length = equation.inputs[0].aval.shape[equation.params["dimension"]]
        operation("hbm", 0.0, (reads + writes) * max(1, math.ceil(math.log2(max(length, 2)))))
    elif primitive in READ_AND_WRITE:
        operation("hbm", 0.0, reads + writes)
    elif primitive.startswith(("conv_general", "fft", "ragged_dot")):
        raise NotImplementedError(f"the cost of {primitive!r} is unknown; add it to scale/costs.py or use kernel_cost")
    else:
        return False
    return True


def _fused_traffic(
    equations: Sequence[Equation],
    fused: Sequence[Equation],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    originals: Mapping[Value, Value],
) -> list[Operation]:
    """Returns the HBM traffic of the fused loops by scope, by the assumptions in the module's docstring."""
    readers: dict[Value, list[Equation]] = {}
    for equation in equations:
        if equation.outputs[0] not in originals:
            for value in dict.fromkeys(originals.get(v, v) for v in equation.inputs):
                readers.setdefault(value, []).append(equation)

    def source(value: Value) -> Value:
        return originals.get(value, value)

    loops = set(fused)
    leaves, stored = {source(out) for out in outputs}, set(inputs)
    traffic: dict[str, float] = {}

    def move(scope: str, value: Value) -> None:
        if value.bytes >= SMALL:
            traffic[scope] = traffic.get(scope, 0.0) + value.bytes

    for equation in equations:
        if equation not in loops or (equation.primitive in VIEWS and source(equation.inputs[0]) in stored):
            stored.update(equation.outputs)
            continue
        for out in equation.outputs:
            using = readers.get(out, [])
            again = equation.primitive not in RECOMPUTED and len(using) > 1
            if again or out in leaves or any(reader not in loops for reader in using):
                stored.add(out)
                move(equation.scope, out)
    for value in stored:
        reading = [s for s in readers.get(value, []) if s in loops and s.primitive not in VIEWS]
        if reading:
            move(reading[0].scope, value)
    return [Operation("hbm", 0.0, amount, scope) for scope, amount in traffic.items()]


def _unfused_operands(equations: Sequence[Equation]) -> dict[Value, Value]:
    """Returns {converted or transposed value: original} for values that only matrix products read.

    The product reads the original.
    """
    direct: dict[Value, list[Equation]] = {}
    for equation in equations:
        for value in dict.fromkeys(equation.inputs):
            direct.setdefault(value, []).append(equation)
    only_forms: set[Equation] = set()
    for equation in reversed(equations):
        if equation.primitive in FUSED_INTO_MATMUL:
            users = direct.get(equation.outputs[0], [])
            if users and all(u.primitive == "dot_general" or u in only_forms for u in users):
                only_forms.add(equation)
    original: dict[Value, Value] = {}
    for equation in equations:
        if equation in only_forms:
            original[equation.outputs[0]] = original.get(equation.inputs[0], equation.inputs[0])
    return original


def _scan_region(equation: Equation, assumed: CostAssumptions, used: set[Value]) -> Region:
    """Returns the loop's region; stacked results that nothing reads are not computed."""
    body = equation.params["jaxpr"]
    # A stacked result has one axis more than what the body returns; a carried value has the same shape.
    results = zip(equation.outputs, body.out_avals, strict=True)
    live = [out in used or out.aval.shape == inner.shape for out, inner in results]
    return _region("scan", body, assumed, float(equation.params["length"]), live, equation.scope)


def _loop_count(path: str, assumed: CostAssumptions) -> tuple[str, float]:
    """Returns the innermost named scope that says how often a while loop runs, and that number."""
    for scope in reversed(path.split("/")):
        if scope in assumed.loop_counts:
            return scope, assumed.loop_counts[scope]
        if scope.startswith(AT_MOST):
            return scope, float(scope.removeprefix(AT_MOST))
    raise NotImplementedError(
        f"the length of a while loop in the scope {path!r} is unknown; put it into a jax.named_scope and name that "
        f"scope in CostAssumptions.loop_counts, or call it {AT_MOST}N"
    )


def _matmul_flops(equation: Equation) -> float:
    """Returns the FLOPs of a dot_general: two for each multiplication, times the passes of its precision."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.inputs[0].aval.shape
    precision = equation.params.get("precision")
    names = {getattr(p, "name", str(p)) for p in (precision if isinstance(precision, tuple) else (precision,))}
    passes = max([PRECISION_PASSES.get(name, 1) for name in names])
    return 2.0 * passes * math.prod(equation.outputs[0].aval.shape) * math.prod(left[i] for i in contracted)


def _declared_cost(equation: Equation) -> KernelCost:
    estimate = equation.params.get("cost_estimate")
    if estimate is None:
        raise NotImplementedError(
            f"the kernel {equation.name!r} has neither a cost_estimate nor a formula (kernel_cost)"
        )
    return KernelCost("matmul", float(estimate.flops), float(estimate.bytes_accessed))
