"""Algorithm: a group of graded episodes -> advantages and loss weights of every token. Pure; the Learner does not
depend on it.

A config names one of ALGORITHMS or the import path of a class (rl.algorithm.name); its options are the constructor's
keyword arguments. The class has one of two forms. Instances of the simple form are functions of rewards:

    class FixedBaseline:
        def __call__(self, rewards):      # the rewards of the G episodes of one task
            return np.asarray(rewards, np.float32) - 0.5   # the advantage of each episode

Instances of the general form have a method `weigh` (Algorithm below), which returns numbers for every token.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.errors import UserError
from composer_jax.extensions import resolve
from composer_jax.rl.batch import Group, WeightedRow

RewardAlgorithm = Callable[[Sequence[float]], np.ndarray]
"""The simple form: rewards of the G episodes of one task -> float32 [G], the advantage of each episode."""


class Algorithm(Protocol):
    """The general form: what every token of a group is trained with."""

    def weigh(self, group: Group, step: int) -> Sequence[Sequence[WeightedRow]]:
        """Returns the training rows of each episode, in the order of its segments.

        step: RL steps before this one.
        """
        ...


STD_EPSILON = 1e-6
"""Added to the standard deviation of rewards, as in TRL and verl."""


def broadcast_advantages(group: Group, advantages_G: np.ndarray) -> list[list[WeightedRow]]:
    """Returns the rows of each episode, whose trained tokens all carry the episode's advantage."""
    return [
        [WeightedRow.of(row, float(advantage)) for row in episode.transcript.rows()]
        for episode, advantage in zip(group.episodes, advantages_G, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class FromRewards:
    """The general form of a function of rewards."""

    advantages: RewardAlgorithm

    def weigh(self, group: Group, step: int) -> list[list[WeightedRow]]:
        """The advantages of the rewards, on all trained tokens of each episode."""
        return broadcast_advantages(group, self.advantages(group.rewards))


@dataclasses.dataclass(frozen=True)
class GroupAdvantage:
    """Dr. GRPO's advantage (arXiv 2503.20783), as in Composer 2 (arXiv 2603.24477, section 4.1): A_i = R_i - mean_j
    R_j.

    No division by the standard deviation, which would amplify small differences in groups of similar rewards, and no
    length normaliser. The baseline is taken over episodes, before they fan out into rows; every row of an episode
    gets its A_i.
    """

    leave_one_out: bool = False
    """Baseline over the other episodes only (RLOO, arXiv 2402.14740): A_i * G/(G-1)."""
    divide_by_std: bool = False
    """Divide by the standard deviation of the rewards (GRPO, arXiv 2402.03300, section 4.1.2). For comparison only:
    however small the differences in a group are, its advantages become as large as those of any other."""

    def __call__(self, rewards: Sequence[float]) -> np.ndarray:
        """float32 [G]; exactly zero for a group of equal rewards or of one episode."""
        rewards_G = np.asarray(rewards, np.float64)
        if len(rewards_G) < 2 or np.all(rewards_G == rewards_G[0]):
            return np.zeros(len(rewards_G), np.float32)
        advantage = rewards_G - rewards_G.mean()
        if self.leave_one_out:
            advantage *= len(rewards) / (len(rewards) - 1)
        if self.divide_by_std:
            advantage /= rewards_G.std() + STD_EPSILON
        return advantage.astype(np.float32)

    def weigh(self, group: Group, step: int) -> list[list[WeightedRow]]:
        """The advantages of the rewards, on all trained tokens of each episode."""
        return broadcast_advantages(group, self(group.rewards))


@dataclasses.dataclass(frozen=True)
class GivenAdvantage:
    """Advantages that come with the episodes (Episode.advantages), such as those of users' sessions.

    One sample per prompt has no group to be compared with, so its baseline is taken over a whole batch of sessions,
    before the learner sees them (realtime/batches). A group without given advantages gets those of GroupAdvantage, so
    that simulated groups and sessions share a step.
    """

    def weigh(self, group: Group, step: int) -> list[list[WeightedRow]]:
        """The given advantage of each node on its trained tokens.

        Raises ValueError if some episodes of a group have advantages and others have none, or if their number is not
        that of the nodes that are trained; always a bug.
        """
        if group.is_given:
            return [given_rows(episode) for episode in group.episodes]
        if any(episode.advantages is not None for episode in group.episodes):
            raise ValueError(f"some episodes of {group.episodes[0].task_id} have given advantages and others do not")
        return GroupAdvantage().weigh(group, step)


def given_rows(episode: Episode) -> list[WeightedRow]:
    """Returns the rows of an episode with its own advantages on the tokens of its nodes."""
    rows, spans = episode.transcript.rows(), episode.transcript.trained_spans()
    given = episode.advantages or ()
    if len(given) != len(spans):
        raise ValueError(f"{episode.task_id} has {len(given)} advantages for {len(spans)} nodes that are trained")
    by_row = [np.zeros(len(row.tokens), np.float32) for row in rows]
    for node, advantage in zip(sorted(spans), given, strict=True):
        span = spans[node]
        by_row[span.row][span.start : span.stop] = advantage
    return [WeightedRow.of(row, advantages_n) for row, advantages_n in zip(rows, by_row, strict=True)]


DEFAULT = "group_mean"
ALGORITHMS: Mapping[str, Any] = {DEFAULT: GroupAdvantage, "given": GivenAdvantage}


def default_options() -> dict[str, Any]:
    """Returns the options of the default algorithm, so that the command line can set each of them."""
    return dataclasses.asdict(GroupAdvantage())


def make_algorithm(name: str, options: Mapping[str, Any]) -> Algorithm:
    """Returns the algorithm that the config names, constructed with its options, in the general form.

    The options of a config that leaves them at their default, those of group_mean, are not passed to another algorithm.
    Raises UserError for an unknown name, an import path that does not resolve, an option that the constructor lacks, or
    a class of neither form.
    """
    kind = resolve(name, ALGORITHMS, "config.rl.algorithm.name")
    if name != DEFAULT and dict(options) == default_options():
        options = {}
    try:
        algorithm: Any = kind(**options)
    except TypeError as error:
        raise UserError(f"config.rl.algorithm.options={dict(options)} do not fit {name!r}: {error}.") from error
    if hasattr(algorithm, "weigh"):
        return algorithm
    if not callable(algorithm):
        raise UserError(
            f"config.rl.algorithm.name={name!r} is not an algorithm; give its class __call__(rewards) or "
            "weigh(group, step)."
        )
    return FromRewards(cast(RewardAlgorithm, algorithm))
