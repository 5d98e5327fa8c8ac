"""Seconds of a program from its cost: a roofline per operation, and three ways in which communication can hide.

Every operation takes max(flops / peak, bytes / bandwidth), every collective the time of its links, each over the
fraction of the peak that such work reaches (scale/chips.py). Within a region (the inside of a loop over layers)
operations follow each other; communication then adds to them, or hides behind them:

- no_overlap: the sum of both;
- weight_gathers_overlap (our prediction): collectives that gather weights and sum gradients (is_weight_collective)
  overlap with computation, as XLA's latency-hiding scheduler arranges; exchanges of tokens (`expert`, `context`) and of
  partial results (`tensor`) do not. A region takes max(computation, weight collectives) + other collectives;
- full_overlap: max(computation, communication).
"""

import dataclasses
from collections.abc import Sequence

from composer_jax.scale.chips import Chip, Efficiency
from composer_jax.scale.costs import Collective, Operation, Region
from composer_jax.scale.network import Network


def is_weight_collective(axes: Sequence[str]) -> bool:
    """Whether a collective over these mesh axes is about weights: those are stored over `data`, and over `context`
    beside it."""
    return bool({"replica", "data"} & set(axes)) and {"replica", "data", "context"}.issuperset(axes)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a program, under the three assumptions and by what they go into."""

    no_overlap: float = 0.0
    weight_gathers_overlap: float = 0.0
    full_overlap: float = 0.0
    profile: dict[str, float] = dataclasses.field(default_factory=dict)
    """By kind of operation and, for collectives, by mesh axes; adds up to `none`."""

    def __add__(self, other: "Times") -> "Times":
        profile = dict(self.profile)
        for key, seconds in other.profile.items():
            profile[key] = profile.get(key, 0.0) + seconds
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
    return max(operation.flops / (chip.peak_flops / chip.devices * efficiency.fraction_of_peak(operation.kind)), memory)


def predict_times(region: Region, network: Network) -> Times:
    """Times of a region and all that it contains."""
    chip, efficiency = network.chip, network.efficiency
    profile: dict[str, float] = {}
    computing = hidden = waiting = 0.0
    for operation in region.operations:
        seconds = operation_seconds(operation, chip, efficiency)
        computing += seconds
        profile[operation.kind] = profile.get(operation.kind, 0.0) + seconds
    for collective in region.collectives:
        seconds = network.seconds(collective)
        if is_weight_collective(collective.axes):
            hidden += seconds
        else:
            waiting += seconds
        key = "+".join(collective.axes)
        profile[key] = profile.get(key, 0.0) + seconds
    total = Times(
        computing + hidden + waiting,
        max(computing, hidden) + waiting,
        max(computing, hidden + waiting),
        profile,
    )
    for inner in region.regions:
        total += predict_times(inner, network)
    return total * region.times


def largest_costs(region: Region, network: Network, most: int = 10) -> list[dict]:
    """What takes most of the time, summed up by scope and kind; for those who want to make it faster."""
    seconds: dict[tuple[str, str], float] = {}
    for times, part in region.walk():
        if isinstance(part, Collective):
            key, each = (part.scope, f"{part.pattern} over {'+'.join(part.axes)}"), network.seconds(part)
        else:
            key, each = (part.scope, part.kind), operation_seconds(part, network.chip, network.efficiency)
        seconds[key] = seconds.get(key, 0.0) + times * each
    ranked = sorted(seconds.items(), key=lambda item: -item[1])[:most]
    return [{"scope": scope, "kind": kind, "seconds": value} for (scope, kind), value in ranked]
