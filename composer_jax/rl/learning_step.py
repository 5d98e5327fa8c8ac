"""One RL step of learning: played groups -> rewards -> an update of the weights and its row of metrics."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.rl.batch import Group, has_given_advantages
from composer_jax.rl.config import RLConfig
from composer_jax.rl.episode_metrics import episode_metrics
from composer_jax.rl.played_group import PlayedGroup
from composer_jax.rl.policy_update import UpdateResult
from composer_jax.rl.rewards import RewardConfig, reward_parts
from composer_jax.train.learner import TrainState
from composer_jax.train.utilisation import Utilisation


@dataclasses.dataclass(frozen=True)
class Cursor:
    """Position of an RL run: three counts, which differ because a step may leave the weights unchanged."""

    task_step: int = 0
    """RL steps whose tasks have been used."""
    weight_version: int = 0
    """Version of the weights that the learner holds; every sampled token records that of the sampler."""
    optimizer_step: int = 0
    """Updates of the weights, which the learning rate follows."""

    def to_json(self) -> dict[str, int]:
        """A JSON-able dict from which `Cursor(**data)` makes an equal cursor."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class CompletedStep:
    """One RL step that is done."""

    cursor: Cursor
    """The position after it."""
    state: TrainState
    """The weights after it, which the next step takes over."""
    groups: Sequence[PlayedGroup]
    row: dict[str, float | None]
    """Columns of metrics/rl.jsonl."""
    is_updated: bool
    """Whether the weights changed."""

    @property
    def step(self) -> int:
        """1 is the first."""
        return self.cursor.task_step


def learner_arguments(config: RLConfig, cursor: Cursor, groups: Sequence[PlayedGroup]) -> tuple[list[Group], int, int]:
    """Returns the arguments of `GroupLearner.step` after the state, for the step that follows `cursor`."""
    graded = [graded_group(group.episodes, config.reward) for group in groups]
    return [group for group in graded if group], sum(len(group.episodes) for group in groups), cursor.task_step


def complete_step(
    config: RLConfig,
    cursor: Cursor,
    groups: Sequence[PlayedGroup],
    state: TrainState,
    result: UpdateResult,
    train_s: float,
    utilisation: Utilisation | None,
) -> CompletedStep:
    """Returns the step that follows `cursor`, with its row of metrics.

    state, result: what `GroupLearner.step` returned after train_s seconds. utilisation: gives the row its mfu; None
    where the peak of the devices is not known.
    """
    version = cursor.weight_version
    episodes = [episode for group in groups for episode in group.episodes]
    row = {
        **episode_metrics([group.episodes for group in groups], config.reward),
        **result.metrics,
        **learning_speed(result.lengths, train_s, utilisation),
        **staleness_metrics(groups, version),
        "sampled_tokens": sum(episode.transcript.total_sampled for episode in episodes),
    }
    after = Cursor(cursor.task_step + 1, version + result.is_updated, int(state.step))
    return CompletedStep(after, state, groups, row, result.is_updated)


def learning_speed(lengths: Sequence[int], train_s: float, utilisation: Utilisation | None) -> dict[str, float | None]:
    """Returns tokens_per_s and, with a utilisation, mfu of the learner in a step; None for a step without rows.

    Playing has no part in either, nor have the forward passes of a reference or teacher in the operations of mfu.

    lengths: tokens of each row that went through the learner, of which train_s are the seconds.
    """
    columns = ("tokens_per_s",) if utilisation is None else ("tokens_per_s", "mfu")
    if not lengths:
        return dict.fromkeys(columns)
    speed: dict[str, float | None] = {"tokens_per_s": sum(lengths) / train_s}
    return speed if utilisation is None else speed | {"mfu": utilisation.mfu(np.asarray(lengths), train_s)}


def graded_group(episodes: Sequence[Episode], config: RewardConfig) -> Group | None:
    """Returns the graded episodes of a group with their rewards; None if there are fewer than two.

    One is enough where advantages are given.
    """
    graded = [episode for episode in episodes if episode.reward is not None]
    if len(graded) < 2 and not has_given_advantages(graded):
        return None
    return Group(graded, [parts.reward for parts in reward_parts(graded, config)])


def staleness_metrics(groups: Sequence[PlayedGroup], version: int) -> dict[str, float]:
    """Returns how many weights versions the groups are behind `version`, which the step trains.

    A group ages in flight, from its oldest token to its last episode's end, and then in the queue; means over groups.
    """
    return {
        "staleness_in_flight": float(np.mean([g.resolved_version - g.oldest_version for g in groups])),
        "staleness_in_queue": float(np.mean([version - g.resolved_version for g in groups])),
        "staleness_max": float(max(version - g.oldest_version for g in groups)),
    }
