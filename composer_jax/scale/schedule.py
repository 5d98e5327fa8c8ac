"""The schedule of a compiled program: which collectives it has, how often they run, and how long the device waits.

XLA prints a compiled program as text in which the instructions of a computation stand in the order of their execution.
A collective that overlaps with computation is two instructions, its start and its done; `wait_seconds` plays the
schedule. Between start and done matrix products and kernels hide it, each at the speed of scale/roofline.py; nothing
else does, because HBM traffic in XLA's fusions is not counted. Two collectives over the same mesh axes share their
links, so they follow each other. A single instruction is waited for from its beginning to its end.

What the compiler makes of a collective may differ from what the traced program (scale/costs.py) says: it may combine
several, cut one into permutes, or sum a whole array where a reduce-scatter would do.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from composer_jax.ops.kernel_cost import AT_MOST, KernelCall, KernelCost, array_bytes, find_formula
from composer_jax.scale.costs import Collective, CostAssumptions, Operation
from composer_jax.scale.network import Network
from composer_jax.scale.roofline import operation_seconds

PATTERNS = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
}
_SCATTERING_FUSION = "all-reduce-scatter"
"""How XLA names a fusion of an all-reduce and a slice, which runs as a reduce-scatter."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+\w*)\[([\d,]*)\]")
_DTYPES = {
    **{
        f"{letter}{bits}": f"{name}{bits}" for letter, name in (("s", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)
    },
    **{"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "pred": "bool"},
}
"""Names in XLA's text -> names of JAX; the others have eight bits or fewer."""
_NAME = re.compile(r"%([\w.\-]+)")
_EXPLICIT_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}")
_CHAIN = re.compile(r'chain_id="\d+"')
_CHAIN_START, _CHAIN_DONE = ('custom_call_target="AsyncCollective' + end + '"' for end in ("Start", "Done"))


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shape: str
    """As printed; a tuple has several arrays."""
    operands: tuple[str, ...]
    text: str
    """Operands and attributes."""

    def attribute(self, name: str) -> str | None:
        """Returns the computation that an attribute names."""
        match = re.search(rf"\b{name}=%([\w.\-]+)", self.text)
        return match and match[1]

    @property
    def scope(self) -> str:
        """Where the traced program has the operation."""
        match = re.search(r'op_name="([^"]*)"', self.text)
        return match[1] if match else ""


@dataclasses.dataclass
class Waiting:
    """Seconds of communication in one run of a program, by mesh axes ("data+context")."""

    sent: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of all collectives, one after another."""
    exposed: dict[str, float] = dataclasses.field(default_factory=dict)
    """In which the device computes nothing."""

    def add(self, other: "Waiting", times: float) -> None:
        for mine, theirs in ((self.sent, other.sent), (self.exposed, other.exposed)):
            for axes, seconds in theirs.items():
                mine[axes] = mine.get(axes, 0.0) + times * seconds


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective in one computation."""

    collective: Collective
    start: int
    """Position of the instruction at which it begins."""
    done: int
    """Position of the instruction that ends it; `start` if that is the same."""


class HloSchedule:
    """A compiled program as text, such as the file after_optimizations.txt of XLA's dump."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] | None = None
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                current = self.computations[match[2]] = []
                self.entry = match[2] if match[1] else self.entry
            elif current is not None and (match := _INSTRUCTION.match(line)):
                current.append(_parse_instruction(match[1], match[2]))

    def wait_seconds(self, network: Network, assumed: CostAssumptions) -> Waiting:
        """Returns the seconds of communication in one run of the program.

        A loop runs as often as `assumed.loop_counts` or its condition says, otherwise once. Of a conditional every
        branch counts.
        """
        return self._play(self.entry, network, assumed)[0]

    def _play(self, name: str, network: Network, assumed: CostAssumptions) -> tuple[Waiting, float]:
        """Returns the waiting and the seconds of computation of one run of a computation."""
        waiting, computing = Waiting(), 0.0
        begins: dict[int, list[Transfer]] = {}
        for transfer in self._transfers(name, assumed.sizes):
            begins.setdefault(transfer.start, []).append(transfer)
        left: dict[Transfer, float] = {}

        def advance(seconds: float) -> None:
            """Lets the first transfer over each set of axes go on."""
            for axes in {transfer.collective.axes for transfer in left}:
                time = seconds
                for transfer in [t for t in left if t.collective.axes == axes]:
                    passed = min(time, left[transfer])
                    left[transfer] -= passed
                    time -= passed

        def wait(transfer: Transfer) -> None:
            """Lets time pass until a transfer has ended, after those before it over the same axes."""
            axes = transfer.collective.axes
            before = list(left)[: list(left).index(transfer) + 1]
            seconds = sum(left[t] for t in before if t.collective.axes == axes)
            key = "+".join(axes)
            waiting.exposed[key] = waiting.exposed.get(key, 0.0) + seconds
            advance(seconds)
            del left[transfer]

        for position, instruction in enumerate(self.computations[name]):
            for transfer in begins.get(position, []):
                seconds = left[transfer] = network.seconds(transfer.collective)
                key = "+".join(transfer.collective.axes)
                waiting.sent[key] = waiting.sent.get(key, 0.0) + seconds
            for transfer in [t for t in left if t.done == position]:
                wait(transfer)
            seconds = self._compute_seconds(name, instruction, network, assumed.occupancy)
            for inner, runs in self._controlled(instruction, assumed):
                of_inner, inner_seconds = self._play(inner, network, assumed)
                waiting.add(of_inner, runs)
                seconds += runs * inner_seconds
            advance(seconds)
            computing += seconds
        return waiting, computing

    def _controlled(self, instruction: Instruction, assumed: CostAssumptions) -> list[tuple[str, float]]:
        """Returns the (computations, number of runs) that a loop, a call or a conditional runs."""
        if instruction.opcode == "while":
            return [(str(instruction.attribute("body")), self._trip_count(instruction, assumed))]
        if instruction.opcode not in ("call", "conditional"):
            return []
        named = re.findall(r"(?:to_apply|_computation)=%([\w.\-]+)", instruction.text)
        branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.text)
        return [(inner, 1.0) for inner in [*named, *(_NAME.findall(branches[1]) if branches else [])]]

    def _trip_count(self, loop: Instruction, assumed: CostAssumptions) -> float:
        """Returns how often a loop runs: by its jax.named_scope, or the constant that its counter is compared with."""
        *_, named, _ = ("", "", *loop.scope.split("/"))  # the last part is the loop's own
        if named in assumed.loop_counts or named.startswith(AT_MOST):
            return assumed.loop_counts.get(named) or float(named.removeprefix(AT_MOST))
        condition = self.computations[str(loop.attribute("condition"))]
        constants = [i for i in condition if i.opcode == "constant" and i.shape.startswith("s32[]")]
        counts = [int(match[1]) for i in constants if (match := re.match(r"(\d+)\)", i.text))]
        return float(max(counts, default=1))

    def _transfers(self, name: str, sizes: Mapping[str, int]) -> Iterator[Transfer]:
        """Yields the collectives of one computation without those in loops."""
        instructions = self.computations[name]
        for position, instruction in enumerate(instructions):
            found = self._find_collective(instruction)
            if found and (collective := _collective(*found, sizes)):
                yield Transfer(collective, *self._span(instructions, position, found[0]))

    def _find_collective(self, instruction: Instruction) -> tuple[Instruction, bool] | None:
        """Returns the collective that an instruction runs or starts, and whether a slice of its sum is all it keeps."""
        if instruction.opcode.removesuffix("-start") in PATTERNS:
            return instruction, False
        called = instruction.attribute("calls")
        if called is None or instruction.opcode not in ("fusion", "async-start"):
            return None
        inner = list(self._instructions_within(called))
        for part in inner:
            if part.opcode in PATTERNS:
                # A chain of fusions has the collective in each. Its start counts.
                if _CHAIN.search(part.text) and not any(_CHAIN_START in i.text for i in inner):
                    return None
                return part, _SCATTERING_FUSION in called
        return None

    def _instructions_within(self, name: str) -> Iterator[Instruction]:
        """Yields the instructions of a computation and of those that it calls."""
        for instruction in self.computations[name]:
            yield instruction
            for called in re.findall(r"\bcalls=%([\w.\-]+)|called_computations=\{%([\w.\-]+)\}", instruction.text):
                yield from self._instructions_within(called[0] or called[1])

    def _span(self, instructions: Sequence[Instruction], start: int, communicating: Instruction) -> tuple[int, int]:
        """Returns the positions at which a collective begins to communicate and ends."""
        started = instructions[start]
        if chain := _CHAIN.search(communicating.text):
            for position in range(start + 1, len(instructions)):
                called = instructions[position].attribute("calls")
                parts = self.computations[called] if called else []
                if any(_CHAIN_DONE in i.text for i in parts) and any(chain[0] in i.text for i in parts):
                    return start, position
        elif started.opcode.endswith("-start"):
            for position in range(start + 1, len(instructions)):
                later = instructions[position]
                if started.name in later.operands and later.opcode.endswith("-done"):
                    return start, position
                if started.name in later.operands and later.opcode.endswith("-update"):
                    # A SparseCore starts before it has its operands, which the update hands over.
                    name, after = later.name, range(position + 1, len(instructions))
                    return position, next((n for n in after if name in instructions[n].operands), position)
        return start, start

    def _compute_seconds(self, name: str, instruction: Instruction, network: Network, occupancy: float) -> float:
        """Returns the seconds of the matrix products or the kernel that an instruction runs."""
        chip, efficiency = network.chip, network.efficiency
        if 'custom_call_target="tpu_custom_call"' in instruction.text:
            cost = self._kernel_cost(name, instruction, occupancy)
            return operation_seconds(Operation(*cost), chip, efficiency) if cost else 0.0
        flops = self._product_flops(name, [instruction])
        called = instruction.attribute("calls") if instruction.opcode == "fusion" else None
        if called:
            flops += self._product_flops(called, self.computations[called])
        return operation_seconds(Operation("matmul", flops, 0.0), chip, efficiency)

    def _kernel_cost(self, name: str, call: Instruction, occupancy: float) -> KernelCost | None:
        """Returns the cost by the kernel's formula, which gets floating operands first; None without one."""
        names = [call.name, *reversed(call.scope.split("/"))]
        formula = next((found for kernel in names if (found := find_formula(kernel))), None)
        shapes = self._shapes[name]
        # Metadata, such as the bounds of groups, has no rows and columns.
        inputs = [a for operand in call.operands for a in _arrays(shapes.get(operand, "")) if a.ndim >= 2]
        inputs.sort(key=lambda a: not jnp.issubdtype(a.dtype, jnp.floating))
        return formula(KernelCall(inputs, _arrays(call.shape), {}, occupancy)) if formula else None

    def _product_flops(self, name: str, instructions: Sequence[Instruction]) -> float:
        """Returns two per multiplication of the matrix products among the instructions of a computation."""
        shapes = self._shapes[name]
        products = [i for i in instructions if i.opcode in ("convolution", "dot")]
        return sum(_flops(i, [shapes.get(operand, "") for operand in i.operands]) for i in products)

    @functools.cached_property
    def _shapes(self) -> dict[str, dict[str, str]]:
        """Computation -> instruction -> shape."""
        return {name: {i.name: i.shape for i in part} for name, part in self.computations.items()}


def _parse_instruction(name: str, text: str) -> Instruction:
    match = _OPCODE.search(text)
    assert match is not None, text
    # Attributes may name computations; operands end at the first closing parenthesis, because they have no shapes.
    operands = tuple(_NAME.findall(match[2].partition(")")[0]))
    return Instruction(name, match[1], text[: match.start(1)].strip(), operands, match[2])


def _arrays(shape: str) -> list[ShapedArray]:
    """Returns the arrays of a printed shape."""
    return [
        ShapedArray(tuple(int(n) for n in dims.split(",") if n), jnp.dtype(_DTYPES.get(dtype, "uint8")))
        for dtype, dims in _ARRAY.findall(shape)
    ]


def _flops(product: Instruction, operands: Sequence[str]) -> float:
    """Returns two per multiplication of a product, whose dimensions each are in two of its three arrays, or in all.

    The dimensions of all three, a batch, are those that a convolution's labels give the same spatial position.
    """
    (a,), (b,), (out,) = _arrays(operands[0]), _arrays(operands[1]), _arrays(product.shape)
    batch = 1
    if labels := re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", product.text):
        for spatial in (c for c in labels[3] if c.isdigit()):
            sizes = [x.shape[label.index(spatial)] for x, label in zip((a, b, out), labels.groups(), strict=True)]
            batch *= sizes[0] if sizes[0] == sizes[1] == sizes[2] else 1
    elif dims := re.search(r"lhs_batch_dims=\{([\d,]+)\}", product.text):
        batch = math.prod(a.shape[int(n)] for n in dims[1].split(","))
    return 2.0 * math.sqrt(a.size * b.size * out.size / batch)


def _collective(instruction: Instruction, is_scattering: bool, sizes: Mapping[str, int]) -> Collective | None:
    """Returns the collective of an instruction; None over a group of one device."""
    pattern = PATTERNS[instruction.opcode.removesuffix("-start")]
    axes = _axes(instruction.text, sizes)
    n = math.prod(sizes[axis] for axis in axes)
    if n == 1:
        return None
    total = array_bytes(*(a for a in _arrays(instruction.shape) if a.ndim))  # scalars are the state of a start
    if instruction.opcode.endswith("-start") and pattern != "all_reduce":
        # Its shape has operands and results, of which one side is n times the other or as large.
        total *= n / (n + 1) if pattern in ("all_gather", "reduce_scatter") else 1 / 2
    elif pattern == "reduce_scatter":
        total *= n  # the operand
    if is_scattering and pattern == "all_reduce":
        pattern = "reduce_scatter"
    return Collective(pattern, axes, total, instruction.scope)


def _axes(text: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the members of a collective's groups differ."""
    shape = tuple(sizes.values())
    differing = np.zeros(len(shape), bool)
    for group in _groups(text, math.prod(shape)):
        at = np.array(np.unravel_index(group, shape))
        differing |= (at != at[:, :1]).any(axis=1)
    return tuple(axis for axis, differs in zip(sizes, differing, strict=True) if differs)


def _groups(text: str, devices: int) -> list[np.ndarray]:
    """Returns the first group of devices, or all pairs of a permute."""
    if match := _EXPLICIT_GROUP.search(text):
        return [np.array([int(n) for n in match[1].split(",")])]
    if match := _IOTA_GROUPS.search(text):
        ids = np.arange(devices).reshape([int(n) for n in match[3].split(",")])
        if match[4]:
            ids = ids.transpose([int(n) for n in match[4].split(",")])
        return [ids.reshape(int(match[1]), int(match[2]))[0]]
    if match := _PAIRS.search(text):
        return [np.array([int(n) for n in pair.split(",")]) for pair in re.findall(r"\{(\d+,\d+)\}", match[0])]
    return [np.arange(devices)]  # without groups all devices take part
