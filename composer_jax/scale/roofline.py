"""Predicted seconds of a program: a roofline for each operation, under three assumptions about overlap.

An operation takes max(flops / peak, bytes / bandwidth), a collective the time of its links, each divided by the
fraction of the peak that such work reaches (scale/efficiency.py). Operations of a region (the body of a loop over
layers) run one after another. The time of a region with its communication is:

- no_overlap: the sum of both;
- weight_gathers_overlap (our prediction): collectives that gather weights and sum gradients (is_weight_collective)
  overlap with computation, as XLA's latency-hiding scheduler arranges; exchanges of tokens (`expert`, `context`) and of
  partial results (`tensor`) do not. A region takes max(computation, weight collectives) + other collectives;
- full_overlap: max(computation, communication).
"""

import dataclasses
from collections.abc import Sequence

from composer_jax.parallel.chips import Chip
from composer_jax.scale.costs import Collective, Operation, Region
from composer_jax.scale.efficiency import Efficiency
from composer_jax.scale.network import Network

OVERLAPS = ("no_overlap", "weight_gathers_overlap", "full_overlap")
PREDICTION = "weight_gathers_overlap"


def is_weight_collective(axes: Sequence[str]) -> bool:
    """Whether a collective over these mesh axes moves weights or gradients, which `data` and `context` shard."""
    return bool({"replica", "data"} & set(axes)) and {"replica", "data", "context"}.issuperset(axes)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a program under the three assumptions about overlap, and without overlap by kind of work."""

    no_overlap: float = 0.0
    weight_gathers_overlap: float = 0.0
    full_overlap: float = 0.0
    profile: dict[str, float] = dataclasses.field(default_factory=dict)
    """By kind of operation and, for collectives, by mesh axes; adds up to `no_overlap`."""

    def __add__(self, other: "Times") -> "Times":
        keys = self.profile | other.profile
        profile = {key: self.profile.get(key, 0.0) + other.profile.get(key, 0.0) for key in keys}
        return Times(
            self.no_overlap + other.no_overlap,
            self.weight_gathers_overlap + other.weight_gathers_overlap,
            self.full_overlap + other.full_overlap,
            profile,
        )

    def __mul__(self, times: float) -> "Times":
        profile = {key: seconds * times for key, seconds in self.profile.items()}
        return Times(self.no_overlap * times, self.weight_gathers_overlap * times, self.full_overlap * times, profile)


def operation_seconds(operation: Operation, chip: Chip, efficiency: Efficiency) -> float:
    memory = operation.hbm_bytes / (chip.hbm_bandwidth / chip.devices * efficiency.hbm)
    if not operation.flops:
        return memory
    return max(operation.flops / (chip.peak_flops / chip.devices * getattr(efficiency, operation.kind)), memory)


def predict_times(region: Region, network: Network) -> Times:
    """Returns the seconds of a region, inner regions included."""
    chip, efficiency = network.chip, network.efficiency
    profile: dict[str, float] = {}
    compute = weights = tokens = 0.0
    for operation in region.operations:
        seconds = operation_seconds(operation, chip, efficiency)
        compute += seconds
        profile[operation.kind] = profile.get(operation.kind, 0.0) + seconds
    for collective in region.collectives:
        seconds = network.seconds(collective)
        if is_weight_collective(collective.axes):
            weights += seconds
        else:
            tokens += seconds
        key = "+".join(collective.axes)
        profile[key] = profile.get(key, 0.0) + seconds
    total = Times(
        compute + weights + tokens,
        max(compute, weights) + tokens,
        max(compute, weights + tokens),
        profile,
    )
    for inner in region.regions:
        total += predict_times(inner, network)
    return total * region.times


def largest_costs(region: Region, network: Network, most: int = 10) -> list[dict]:
    """Returns the scopes and kinds with the most seconds in all, largest first."""
    seconds: dict[tuple[str, str], float] = {}
    for times, part in region.walk():
        if isinstance(part, Collective):
            key, each = (part.scope, f"{part.pattern} over {'+'.join(part.axes)}"), network.seconds(part)
        else:
            key, each = (part.scope, part.kind), operation_seconds(part, network.chip, network.efficiency)
        seconds[key] = seconds.get(key, 0.0) + times * each
    ranked = sorted(seconds.items(), key=lambda item: -item[1])[:most]
    return [{"scope": scope, "kind": kind, "seconds": value} for (scope, kind), value in ranked]
