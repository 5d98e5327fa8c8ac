"""The reward of a session: a weighted sum of signals, some of them relative to sessions of the same bucket."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from composer_jax.errors import UserError
from composer_jax.realtime.labels.conversation import request_kind
from composer_jax.realtime.labels.signal_types import ConversationText, Signal
from composer_jax.realtime.labels.window import main_turns
from composer_jax.serve.traffic.records import SessionTraffic

CostSignal = Literal["tokens", "calls", "seconds"]
SIZES = ((2_000, "small"), (16_000, "medium"))
"""Tokens of the first prompt up to which a session has a size; longer ones are "large"."""
FEW = 20
"""A bucket with fewer observed sessions takes mean and median of all sessions."""


@dataclasses.dataclass(frozen=True)
class RewardWeights:
    """What each signal adds to the reward. The values are ours; none was published."""

    keep: float = 1.0
    """Of keep_corrected minus its mean in the bucket."""
    follow_up: float = 0.5
    accept_share: float = 0.25
    """Of accept_share minus its mean in the bucket."""
    undo: float = 0.5
    """Taken off."""
    invalid_calls: float = 0.5
    """Taken off."""
    needless_question: float = 0.25
    """Taken off."""
    cost: float = 0.05
    """Taken off, times log(cost / its median in the bucket) where that is positive. Use it when quality is flat."""
    cost_signal: CostSignal = "tokens"
    """seconds also measure the load of the servers, which is no act of the policy."""
    limit: float = 2.0
    """The reward is clipped to [-limit, limit]."""
    own: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Other signals, ours or a user's -> weight of the signal minus its mean in the bucket."""

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
                raise UserError(f"the weight own.{name}={weight} is no number; use a finite one.")

    def signals(self) -> tuple[str, ...]:
        """Returns the signals that the reward is made of, without those of weight 0."""
        weighted = {
            "keep_corrected": self.keep,
            "follow_up": self.follow_up,
            "accept_share": self.accept_share,
            "undo": self.undo,
            "invalid_calls": self.invalid_calls,
            "needless_question": self.needless_question,
            self.cost_signal: self.cost,
        }
        return tuple(name for name, weight in {**weighted, **self.own}.items() if weight)


def bucket_of(traffic: SessionTraffic, text: ConversationText | None) -> str:
    """Returns the kind of a session's request and the size of its first prompt, such as "change/medium"."""
    turns = main_turns(traffic)
    length = len(turns[0].suffix) if turns else 0
    size = next((name for limit, name in SIZES if length <= limit), "large")
    return f"{request_kind(turns, text)}/{size}"


class BucketStatistics:
    """Means and medians of the observed values of each signal in each bucket."""

    def __init__(self, sessions: Sequence[tuple[str, Mapping[str, Signal]]]) -> None:
        """sessions: (bucket, signals) of all sessions that are compared."""
        self._values: dict[tuple[str | None, str], list[float]] = {}
        for bucket, signals in sessions:
            for name, signal in signals.items():
                if signal.value is not None:
                    self._values.setdefault((bucket, name), []).append(signal.value)
                    self._values.setdefault((None, name), []).append(signal.value)
        # fsum is exact, so that a mean does not depend on the order of the sessions.
        self._means = {key: math.fsum(values) / len(values) for key, values in self._values.items()}
        self._medians = {key: statistics.median(values) for key, values in self._values.items()}

    def mean(self, bucket: str, name: str) -> float:
        """Returns the mean of a signal in a bucket, or of all sessions if the bucket has few; 0 without any."""
        return self._means.get(self._key(bucket, name), 0.0)

    def median(self, bucket: str, name: str) -> float:
        """Returns the median of a signal in a bucket, or of all sessions if the bucket has few; 0 without any."""
        return self._medians.get(self._key(bucket, name), 0.0)

    def _key(self, bucket: str, name: str) -> tuple[str | None, str]:
        return (bucket if len(self._values.get((bucket, name), ())) >= FEW else None, name)


def reward_terms(
    weights: RewardWeights, signals: Mapping[str, Signal], bucket: str, statistics: BucketStatistics
) -> dict[str, float]:
    """Returns signal -> what it adds to the reward; 0 for a signal that was not observed.

    Raises UserError for a weight of a signal that does not exist.
    """
    if unknown := [name for name in weights.own if name not in signals]:
        raise UserError(f"the weight own.{unknown[0]} is of no signal; use one of {', '.join(signals)}.")

    def term(name: str, weight: float, *, is_centred: bool = False) -> float:
        value = signals[name].value
        if value is None:
            return 0.0
        return weight * (value - (statistics.mean(bucket, name) if is_centred else 0.0))

    cost, median = signals[weights.cost_signal].value, statistics.median(bucket, weights.cost_signal)
    excess = max(0.0, math.log(cost / median)) if cost and median else 0.0
    return {
        "keep_corrected": term("keep_corrected", weights.keep, is_centred=True),
        "follow_up": term("follow_up", weights.follow_up),
        "accept_share": term("accept_share", weights.accept_share, is_centred=True),
        "undo": term("undo", -weights.undo),
        "invalid_calls": term("invalid_calls", -weights.invalid_calls),
        "needless_question": term("needless_question", -weights.needless_question),
        "cost": -weights.cost * excess,
        **{f"own.{name}": term(name, weight, is_centred=True) for name, weight in weights.own.items()},
    }


def clip_reward(terms: Mapping[str, float], limit: float) -> float:
    """Returns the sum of the terms, clipped to [-limit, limit]."""
    return max(-limit, min(limit, math.fsum(terms.values())))
