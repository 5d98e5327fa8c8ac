"""What a traced program costs one device: arithmetic, HBM traffic, and what it sends over which mesh axis.

Counted from the jaxpr, in which collectives stand with their axes and local shapes, loops with their lengths, and what
jax.checkpoint computes again. What the jaxpr does not say is assumed:

- Matrix products, kernels, sorts, gathers and collectives read their operands from HBM and write their results to it.
- Everything else (elementwise functions, reductions, broadcasts, transposes) is fused into loops around these. A
  loop's result is stored only if one of those reads it, if it leaves the layer, or if two computations use it (the
  residual stream, the exponentials of a softmax; a mere conversion is done twice instead, and none is stored for a
  matrix product). What is stored is written once and read once by all loops together. Results smaller than SMALL stay
  on the chip.
- Of two branches the one with more arithmetic runs, or with more traffic where that is equal.
- Of rows sorted by expert, the share `owned` belongs to somebody; a grouped product computes no others.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from composer_jax.ops.kernel_cost import Call, KernelCost, formula_of
from composer_jax.scale.steps import SHARD, Step, Value, flatten, needed

SMALL = 2**20
"""Bytes below which a fused loop's result is taken to stay in a core's own memory (16 to 128 MiB)."""

GATHERS = {"all_gather", "all_gather_invariant", "all_gather_reduced"}
SCATTERS = {"reduce_scatter", "unreduced_reduce_scatter"}
REDUCTIONS = {"psum", "psum2", "psum_invariant", "pmax", "pmin", "pmean"}
EXCHANGES = {"all_to_all", "ragged_all_to_all"}
PERMUTES = {"ppermute", "collective_permute"}
COLLECTIVES = GATHERS | SCATTERS | REDUCTIONS | EXCHANGES | PERMUTES
# Parts of an array: reading them reads their own bytes only.
VIEWS = {SHARD, "slice", "dynamic_slice", "split", "unstack"}
# Cheap enough to be done again by every loop that wants them.
REDONE = {"broadcast_in_dim", "concatenate", "convert_element_type", "iota", "pad", "rev", "transpose"} | VIEWS
# What a matrix product can do to an operand while it reads it.
OPERAND_FORMS = {"convert_element_type", "transpose"}
# Read whole, write whole.
PASSES = {"cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod", "reduce_window", "top_k", "approx_top_k"}
PRODUCTS = {"HIGH": 3, "HIGHEST": 6}
"""bfloat16 passes of a product at higher precision; the default is one, of float32 operands too."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """Arithmetic and HBM traffic that happen together: the slower of the two decides."""

    kind: str
    """matmul, attention, grouped_matmul, or hbm where there is no arithmetic to speak of."""
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
    """Of the array as one device holds it where it is largest: after a gather, before a reduction or exchange."""
    scope: str = ""

    def sent(self, sizes: Mapping[str, int]) -> float:
        """Bytes that each device sends, and receives, at least: (n-1)/n of the array, twice that to add up and
        share."""
        n = math.prod(sizes[axis] for axis in self.axes)
        whole = self.bytes * (2 if self.pattern == "all_reduce" else 1)
        return self.bytes if self.pattern == "permute" else whole * (n - 1) / n


@dataclasses.dataclass
class Region:
    """A stretch of program that runs `times` times: the whole, or the inside of a loop."""

    name: str
    times: float = 1.0
    operations: list[Operation] = dataclasses.field(default_factory=list)
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    regions: list["Region"] = dataclasses.field(default_factory=list)

    def everything(self, times: float = 1.0) -> Iterator[tuple[float, Operation | Collective]]:
        """Every operation and collective of this region and those in it, with how often it runs."""
        times *= self.times
        yield from ((times, part) for part in (*self.operations, *self.collectives))
        for region in self.regions:
            yield from region.everything(times)

    def flops(self, kind: str | None = None) -> float:
        parts = ((n, p) for n, p in self.everything() if isinstance(p, Operation))
        return sum(n * p.flops for n, p in parts if kind in (None, p.kind))

    def hbm_bytes(self) -> float:
        return sum(n * p.hbm_bytes for n, p in self.everything() if isinstance(p, Operation))

    def sent(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Bytes each device sends over every mesh axis; collectives over several axes at once under "data+expert"."""
        total: dict[str, float] = {}
        for times, part in self.everything():
            if isinstance(part, Collective):
                key = "+".join(part.axes)
                total[key] = total.get(key, 0.0) + times * part.sent(sizes)
        return total


@dataclasses.dataclass(frozen=True)
class Rules:
    """What the program itself does not say."""

    sizes: Mapping[str, int]
    """Of the mesh axes."""
    owned: float = 1.0
    loops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """How often a while loop runs, by the jax.named_scope it stands in."""


def cost_of(jaxpr, rules: Rules) -> Region:
    """The cost of a traced program (open or closed jaxpr) on one device.

    Raises:
      NotImplementedError: a loop of unknown length that `rules.loops` does not name, or a primitive nobody described.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return _region("program", inner, rules, 1.0, [True] * len(inner.outvars), "")


def _region(name: str, jaxpr, rules: Rules, times: float, wanted: Sequence[bool], scope: str) -> Region:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    inputs = [Value(v.aval) for v in jaxpr.invars]
    steps, outputs = flatten(jaxpr, inputs, lambda kernel: formula_of(kernel) is not None, scope)
    outputs = [out for out, want in zip(outputs, wanted, strict=True) if want]
    steps, used = needed(steps, outputs)
    region = Region(name, times)
    forms = _operand_forms(steps)
    fused = [step for step in steps if not _counted(step, region, rules, used, forms)]
    region.operations += _loops(steps, fused, inputs, outputs, forms)
    return region


def _counted(step: Step, region: Region, rules: Rules, used: set[Value], forms: Mapping[Value, Value]) -> bool:
    """Adds the step to the region if it is one that reads and writes HBM by itself; False for what is fused."""
    primitive, reads = step.primitive, sum(v.bytes for v in step.inputs)
    writes = sum(v.bytes for v in step.outputs)

    def operation(kind: str, flops: float, hbm_bytes: float) -> None:
        region.operations.append(Operation(kind, flops, hbm_bytes, step.scope))

    if (formula := formula_of(step.name)) is not None:
        avals = ([v.aval for v in side] for side in (step.inputs, step.outputs))
        operation(*formula(Call(*avals, step.params, rules.owned)))
    elif primitive == "pallas_call":
        operation(*_estimate(step))
    elif primitive == "dot_general":
        # What is widened is widened while it is read; a copy in fewer bits is taken to cost nothing.
        read = sum(min(v.bytes, forms.get(v, v).bytes) for v in step.inputs)
        operation("matmul", _product(step), read + writes)
    elif primitive in COLLECTIVES:
        axes = tuple(axis for axis in _axes(step.params) if rules.sizes[axis] > 1)
        # Of a ragged exchange the buffer that receives is larger than what arrives.
        size = step.inputs[0].bytes if primitive == "ragged_all_to_all" else max(reads, writes)
        if axes:
            region.collectives.append(Collective(_pattern(primitive), axes, size, step.scope))
    elif primitive == "scan":
        region.regions.append(_scan(step, rules, used))
    elif primitive == "while":
        region.regions.append(_while(step, rules))
    elif primitive == "cond":
        wanted = [v in used for v in step.outputs]
        branches = [_region("branch", b, rules, 1.0, wanted, step.scope) for b in step.params["branches"]]
        region.regions.append(max(branches, key=lambda branch: (branch.flops(), branch.hbm_bytes())))
    elif primitive == "gather":
        operation("hbm", 0.0, 2 * writes)
    elif primitive.startswith("scatter"):
        moves = 2 if primitive == "scatter" else 3  # the rows themselves, and those that they are added to
        operation("hbm", 0.0, moves * step.inputs[2].bytes)
    elif primitive == "dynamic_update_slice":
        operation("hbm", 0.0, 2 * step.inputs[1].bytes)
    elif primitive == "sort":
        length = step.inputs[0].aval.shape[step.params["dimension"]]
        operation("hbm", 0.0, (reads + writes) * max(1, math.ceil(math.log2(max(length, 2)))))
    elif primitive in PASSES:
        operation("hbm", 0.0, reads + writes)
    elif primitive.startswith(("conv_general", "fft", "ragged_dot")):
        raise NotImplementedError(f"the cost of {primitive!r} is not described; scale/costs.py or kernel_cost should")
    else:
        return False
    return True


def _loops(
    steps: Sequence[Step],
    fused: Sequence[Step],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    forms: Mapping[Value, Value],
) -> list[Operation]:
    """HBM traffic of the fused loops, by scope; the module's docstring has the rules."""
    readers: dict[Value, list[Step]] = {}
    for step in steps:
        if step.outputs[0] not in forms:
            for value in dict.fromkeys(forms.get(v, v) for v in step.inputs):
                readers.setdefault(value, []).append(step)

    def source(value: Value) -> Value:
        return forms.get(value, value)

    loops = set(fused)
    leaves, stored = {source(out) for out in outputs}, set(inputs)
    traffic: dict[str, float] = {}

    def move(scope: str, value: Value) -> None:
        if value.bytes >= SMALL:
            traffic[scope] = traffic.get(scope, 0.0) + value.bytes

    for step in steps:
        if step not in loops or (step.primitive in VIEWS and source(step.inputs[0]) in stored):
            stored.update(step.outputs)
            continue
        for out in step.outputs:
            using = readers.get(out, [])
            again = step.primitive not in REDONE and len(using) > 1
            if again or out in leaves or any(reader not in loops for reader in using):
                stored.add(out)
                move(step.scope, out)
    for value in stored:
        reading = [s for s in readers.get(value, []) if s in loops and s.primitive not in VIEWS]
        if reading:
            move(reading[0].scope, value)
    return [Operation("hbm", 0.0, amount, scope) for scope, amount in traffic.items()]


def _operand_forms(steps: Sequence[Step]) -> dict[Value, Value]:
    """Value -> what it is another form of: of steps that only feed matrix products, the product reads the original."""
    direct: dict[Value, list[Step]] = {}
    for step in steps:
        for value in dict.fromkeys(step.inputs):
            direct.setdefault(value, []).append(step)
    only_forms: set[Step] = set()
    for step in reversed(steps):
        if step.primitive in OPERAND_FORMS:
            users = direct.get(step.outputs[0], [])
            if users and all(u.primitive == "dot_general" or u in only_forms for u in users):
                only_forms.add(step)
    original: dict[Value, Value] = {}
    for step in steps:
        if step in only_forms:
            original[step.outputs[0]] = original.get(step.inputs[0], step.inputs[0])
    return original


def _scan(step: Step, rules: Rules, used: set[Value]) -> Region:
    """One region per loop; a stacked result that nobody uses is not computed."""
    carry = step.params["num_carry"]
    wanted = [i < carry or out in used for i, out in enumerate(step.outputs)]
    return _region("scan", step.params["jaxpr"], rules, float(step.params["length"]), wanted, step.scope)


def _while(step: Step, rules: Rules) -> Region:
    scopes = [name for name in rules.loops if name in step.scope.split("/")]
    if not scopes:
        raise NotImplementedError(
            f"a while loop in the scope {step.scope!r} runs nobody knows how often; put it into a jax.named_scope and "
            "say how often that runs (Rules.loops)"
        )
    body = step.params["body_jaxpr"]
    wanted = [True] * len(body.jaxpr.outvars)
    return _region(scopes[0], body, rules, rules.loops[scopes[0]], wanted, step.scope)


def _product(step: Step) -> float:
    """Two operations for every multiplication of a dot_general, more passes at higher precision."""
    (contracted, _), _ = step.params["dimension_numbers"]
    left = step.inputs[0].aval.shape
    precision = step.params.get("precision")
    names = {getattr(p, "name", str(p)) for p in (precision if isinstance(precision, tuple) else (precision,))}
    passes = max([PRODUCTS.get(name, 1) for name in names])
    return 2.0 * passes * math.prod(step.outputs[0].aval.shape) * math.prod(left[i] for i in contracted)


def _estimate(step: Step) -> KernelCost:
    estimate = step.params.get("cost_estimate")
    if estimate is None:
        raise NotImplementedError(f"the kernel {step.name!r} has neither a cost_estimate nor a formula (kernel_cost)")
    return KernelCost("matmul", float(estimate.flops), float(estimate.bytes_accessed))


def _axes(params: Mapping) -> tuple[str, ...]:
    axes = params["axes"] if "axes" in params else params["axis_name"]
    return axes if isinstance(axes, tuple) else (axes,)


def _pattern(primitive: str) -> str:
    families = {"all_gather": GATHERS, "reduce_scatter": SCATTERS, "all_reduce": REDUCTIONS, "all_to_all": EXCHANGES}
    return next((pattern for pattern, names in families.items() if primitive in names), "permute")
