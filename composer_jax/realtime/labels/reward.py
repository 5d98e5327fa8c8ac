"""The rewards of a set of labels: weighted sums of signals, each relative to sessions of the same bucket in the set."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

from composer_jax.errors import UserError
from composer_jax.realtime.labels.conversation import request_kind
from composer_jax.realtime.labels.signal_types import ConversationText
from composer_jax.realtime.labels.store import Label
from composer_jax.realtime.labels.window import continued_turns
from composer_jax.serve.traffic.records import SessionTraffic

Centre = Callable[[Sequence[float]], float]
CostSignal = Literal["tokens", "calls", "seconds"]
SIZES = ((2_000, "small"), (16_000, "medium"))
"""Tokens of the first prompt up to which a session has a size; longer ones are "large"."""
BUCKET_USERS = 20
"""A bucket in which fewer users have a signal takes the centre of all buckets."""


@dataclasses.dataclass(frozen=True)
class RewardWeights:
    """The factor of each signal minus its mean in the bucket. The values are ours; none was published."""

    keep: float = 1.0
    """Of keep_corrected."""
    follow_up: float = 0.5
    """Of the follow-ups' judged content."""
    accept_share: float = 0.25
    """Of the share of shown hunks that the user accepted."""
    undo: float = 0.5
    """Taken off."""
    invalid_calls: float = 0.5
    """Taken off."""
    needless_question: float = 0.25
    """Taken off."""
    cost: float = 0.05
    """Taken off; of max(0, log(cost / its median in the bucket)). Use it when quality is flat."""
    cost_signal: CostSignal = "tokens"
    """seconds also measure the load of the servers, which the policy does not control."""
    limit: float = 2.0
    """The reward is clipped to [-limit, limit]."""
    own: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Other signals, ours or a user's -> weight of the signal minus its median in the bucket; they may be unbounded."""

    def __post_init__(self) -> None:
        if self.cost_signal not in get_args(CostSignal):
            raise UserError(
                f"cost_signal={self.cost_signal!r} is unknown; use one of {', '.join(get_args(CostSignal))}."
            )
        names = ("keep", "follow_up", "accept_share", "undo", "invalid_calls", "needless_question", "cost", "limit")
        for name in names:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise UserError(f"the weight {name}={value} is out of range; use a number from 0.")
        for name, weight in self.own.items():
            if not math.isfinite(weight):
                raise UserError(f"the weight own.{name}={weight} is not finite; use a finite number.")


@dataclasses.dataclass(frozen=True)
class Reward:
    """What a session is worth."""

    value: float
    """The sum of the terms, clipped."""
    terms: Mapping[str, float]
    """What each signal adds; 0 for one that was not observed."""


def bucket_of(traffic: SessionTraffic, text: ConversationText | None) -> str:
    """Returns the kind of a session's request and the size of its first prompt, such as "change/medium"."""
    turns = continued_turns(traffic)
    length = len(turns[0].suffix) if turns else 0
    size = next((name for limit, name in SIZES if length <= limit), "large")
    return f"{request_kind(turns, text)}/{size}"


def compute_rewards(labels: Sequence[Label], weights: RewardWeights | None = None) -> dict[str, Reward]:
    """Returns session -> reward, relative to these labels and no others.

    labels: of one horizon and labeller, such as those of a batch. A label has no reward of its own: with other labels
    beside it, or other weights, the rewards differ.

    Raises UserError for a weight of a signal that the labels do not have.
    """
    weights = weights or RewardWeights()
    if unknown := [name for name in weights.own if any(name not in label.signals for label in labels)]:
        raise UserError(f"the weight own.{unknown[0]} is of no signal; use one of {', '.join(labels[0].signals)}.")
    terms: dict[str, dict[str, float]] = {label.session: {} for label in labels}

    def values(name: str) -> list[float | None]:
        return [label.signals[name].value for label in labels]

    def add(name: str, weight: float, column: Sequence[float | None], centre: Centre = statistics.fmean) -> None:
        for label, value, middle in zip(labels, column, _bucket_centres(labels, column, centre), strict=True):
            terms[label.session][name] = 0.0 if value is None else weight * (value - middle)

    add("keep_corrected", weights.keep, values("keep_corrected"))
    add("follow_up", weights.follow_up, values("follow_up"))
    add("accept_share", weights.accept_share, values("accept_share"))
    add("undo", -weights.undo, values("undo"))
    add("invalid_calls", -weights.invalid_calls, values("invalid_calls"))
    add("needless_question", -weights.needless_question, values("needless_question"))
    costs = values(weights.cost_signal)
    medians = _bucket_centres(labels, costs, statistics.median)
    add("cost", -weights.cost, [_excess(cost, median) for cost, median in zip(costs, medians, strict=True)])
    for name, weight in weights.own.items():
        add(f"own.{name}", weight, values(name), statistics.median)
    return {session: Reward(_clip(math.fsum(one.values()), weights.limit), one) for session, one in terms.items()}


def _excess(cost: float | None, median: float) -> float | None:
    if cost is None:
        return None
    return max(0.0, math.log(cost / median)) if cost > 0 and median > 0 else 0.0


def _clip(value: float, limit: float) -> float:
    return max(-limit, min(limit, value))


def _bucket_centres(labels: Sequence[Label], column: Sequence[float | None], centre: Centre) -> list[float]:
    """Returns for each label the centre of the observed values in its bucket, in which each user counts once."""
    by_user: dict[str | None, dict[str, list[float]]] = {}
    for label, value in zip(labels, column, strict=True):
        if value is not None:
            for bucket in (label.bucket, None):
                by_user.setdefault(bucket, {}).setdefault(label.user, []).append(value)
    # fmean does not depend on the order of the labels: it sums exactly.
    centres = {
        bucket: centre([statistics.fmean(values) for values in users.values()])
        for bucket, users in by_user.items()
        if bucket is None or len(users) >= BUCKET_USERS
    }
    return [centres.get(label.bucket, centres.get(None, 0.0)) for label in labels]
