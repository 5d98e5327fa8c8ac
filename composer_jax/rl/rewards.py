"""Rewards: the grade of an episode minus a cost of its length and penalties of its behaviour.

Costs order episodes of the same grade and never outweigh a grade: they are bounded by the distance to the next lower
grade of the group.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from composer_jax.agent.effort import EffortConfig
from composer_jax.agent.episode import Episode
from composer_jax.errors import UserError
from composer_jax.rl.penalties import BEHAVIORS, behaviors


def length_cost(x: float, *, k: float, q: float) -> float:
    """C_{k,q}(x) = ((1 + kx)^(1-q) - 1) / (k (1-q)), concave and increasing, C'(0) = 1 (Composer 2, section 4.2).

    q = 0 is linear, q = 1 is ln(1 + kx)/k, q > 1 saturates at 1/(k (q-1)).
    """
    if q == 1:
        return math.log1p(k * x) / k
    return ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))


FREE_OF_BOUND = 0.5
"""Costs up to this fraction of the distance to the next lower grade are paid in full (ours)."""
LARGEST = 0.75
"""Costs approach this fraction of the distance; the rest always separates the two grades (ours)."""


def bounded_cost(cost: float, gap: float) -> float:
    """Returns what an episode pays for costs >= 0 whose grade is `gap` > 0 above the next lower one.

    Equal to `cost` up to half of the gap. From there it bends down with slope 1 at the bend, rises on, and stays below
    three quarters of the gap.
    """
    excess, room = cost - FREE_OF_BOUND * gap, (LARGEST - FREE_OF_BOUND) * gap
    return cost if excess <= 0 else FREE_OF_BOUND * gap + room / (1 + room / excess)


LENGTHS: Mapping[str, Callable[[Episode], int]] = {
    "thinking_token": lambda episode: episode.usage.thinking_tokens,
    "call_token": lambda episode: episode.usage.call_tokens,
    "output_token": lambda episode: episode.usage.output_tokens,
    "final_token": lambda episode: episode.usage.final_tokens,
    "call": lambda episode: episode.usage.total_calls,
    "turn": lambda episode: episode.turns,
    "summary_token": lambda episode: episode.summary_tokens,
}
"""Weight in RewardConfig -> what of an episode it weights; token counts are those of ids that were sampled or seen."""


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """R = grade - bounded_cost(weight * C_{k,q}(x) + penalties); an effort level multiplies the weight.

    x is the weighted length of a solved episode: the six counts of Composer 2 (section 4.2: thinking, calls, tool
    outputs, final message, number of calls, number of turns) and the tokens of summaries, each times its weight below.
    Weights, k and q are not published; these are ours.
    """

    weight: float = 0.0
    """Factor on the length cost of a solved episode; 0 charges nothing."""
    thinking_token: float = 0.0
    """Contribution of one token of thinking, or of text beside a call, to the length x (EpisodeUsage)."""
    call_token: float = 0.0
    """Contribution of one token of tool calls to the length x."""
    output_token: float = 0.0
    """Contribution of one token of the tools' answers to the length x."""
    final_token: float = 0.0
    """Contribution of one token of the final message to the length x."""
    call: float = 0.0
    """Contribution of one tool call to the length x; calls side by side in one message save turns and not calls."""
    summary_token: float = 0.01
    """Contribution of one summary token, thinking before the summary included, to the length x."""
    turn: float = 0.0
    """Contribution of one turn to the length x."""
    k: float = 1.0
    """Curvature k of the length cost C_{k,q}."""
    q: float = 0.5
    """Exponent q of the length cost C_{k,q}."""
    effort: EffortConfig = dataclasses.field(default_factory=EffortConfig)
    """Levels of effort, each with a prompt and a factor on the price of length; none by default."""
    penalties: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(BEHAVIORS, 0.0))
    """Behaviour (rl/penalties.py: BEHAVIORS, or one of `behaviors`) -> its price, which an episode pays whose behaviour
    is 1. 0 charges nothing; .05 to .2 is a start (ours, not published)."""
    behaviors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name -> import path of a function of an Episode that returns a behaviour of your own, from 0 to 1."""

    def __post_init__(self) -> None:
        for name in ("weight", *LENGTHS, "q"):
            if getattr(self, name) < 0:
                raise UserError(f"rl.reward.{name}={getattr(self, name)} is negative; use 0 to charge nothing for it.")
        if self.k <= 0:
            raise UserError(f"rl.reward.k={self.k}; it must be positive, and q=0 makes the length cost linear.")
        for name in self.behaviors:
            if name in BEHAVIORS:
                raise UserError(f"rl.reward.behaviors.{name} has the name of a behaviour of ours; give it another one.")
        for name, price in self.penalties.items():
            if name not in {**BEHAVIORS, **self.behaviors}:
                raise UserError(
                    f"rl.reward.penalties.{name} is not a behaviour; use {', '.join(BEHAVIORS)}, or name a function of "
                    f"your own in rl.reward.behaviors.{name}."
                )
            if not price >= 0:
                raise UserError(f"rl.reward.penalties.{name}={price} is negative; use 0 to charge nothing.")


@dataclasses.dataclass(frozen=True)
class RewardParts:
    """The parts of one episode's training reward; each is logged."""

    grade: float
    """The result of grading, 0 to 1."""
    gap: float
    """How far the grade is above the next lower one of the group, where 0 is always one; infinite for grade 0."""
    length_cost: float
    """Cost of a solved episode's length; 0 for an unsolved one."""
    penalties: Mapping[str, float]
    """Behaviour with a price -> its penalty (rl/penalties.py)."""

    @property
    def penalty(self) -> float:
        """The sum of the penalties."""
        return sum(self.penalties.values())

    @property
    def is_bounded(self) -> bool:
        """Whether the costs are so large that they are not paid in full."""
        return self.length_cost + self.penalty > FREE_OF_BOUND * self.gap

    @property
    def reward(self) -> float:
        """The training reward: the grade minus the costs, which are bounded."""
        return self.grade - bounded_cost(self.length_cost + self.penalty, self.gap)


def weighted_length(episode: Episode, config: RewardConfig) -> float:
    """Returns x of C_{k,q}(x): the lengths of an episode, each times its weight."""
    return sum(getattr(config, name) * count(episode) for name, count in LENGTHS.items())


def reward_parts(group: Sequence[Episode], config: RewardConfig) -> list[RewardParts]:
    """Returns the parts of the training rewards of the graded episodes of a group, in their order.

    Of two episodes the one with the higher grade has the higher reward, whatever their lengths and behaviours. Only
    solved episodes pay for their length, so a short failure is not better than a long one. Every episode pays its
    penalties. An episode with given advantages pays nothing. Raises ValueError if an episode has no grade, because the
    infrastructure failed.
    """
    grades = {0.0}
    for episode in group:
        if episode.reward is None:
            raise ValueError(f"episode of {episode.task_id} was never graded")
        grades.add(episode.reward)
    parts = []
    for episode in group:
        grade = episode.reward or 0.0
        gap = grade - max((other for other in grades if other < grade), default=-math.inf)
        parts.append(RewardParts(grade, gap, _length_cost(episode, config), _penalties(episode, config)))
    return parts


def _length_cost(episode: Episode, config: RewardConfig) -> float:
    if not config.weight or not episode.reward or episode.advantages is not None:
        return 0.0
    weight = config.weight * config.effort.length_factor(episode.effort)
    return weight * length_cost(weighted_length(episode, config), k=config.k, q=config.q)


def _penalties(episode: Episode, config: RewardConfig) -> dict[str, float]:
    prices = {name: price for name, price in config.penalties.items() if price}
    if not prices or episode.advantages is not None:
        return dict.fromkeys(prices, 0.0)
    measured = behaviors(episode, config.behaviors)
    return {name: price * measured[name] for name, price in prices.items()}
