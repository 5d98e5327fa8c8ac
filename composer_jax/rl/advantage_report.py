"""What the sampled tokens of an episode are trained with, for people to read; training uses rows."""

from collections.abc import Mapping, Sequence

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.transcript import Transcript
from composer_jax.rl.algorithm import make_algorithm
from composer_jax.rl.batch import WeightedRow, has_enough_graded
from composer_jax.rl.config import RLConfig
from composer_jax.rl.learning_step import graded_group

NodeAdvantages = Mapping[int, np.ndarray]
"""Node id -> float32 [k], the factor of log p of each of its k sampled tokens in the objective before the trust region
and the normaliser; nodes that no row trains are missing."""


def token_advantages(episodes: Sequence[Episode], config: RLConfig, step: int) -> list[NodeAdvantages]:
    """Returns the advantages of each episode of a group; {} for an episode that is not trained.

    step: RL steps before the one that trains the group.
    """
    group = graded_group(episodes, config.reward)
    if group is None or not has_enough_graded(group, config.group_size):
        return [{} for _ in episodes]
    algorithm = make_algorithm(config.algorithm.name, config.algorithm.options)
    by_episode = algorithm.weigh(group, step)
    found = {
        id(episode): node_advantages(episode.transcript, rows)
        for episode, rows in zip(group.episodes, by_episode, strict=True)
    }
    return [found.get(id(episode), {}) for episode in episodes]


def node_advantages(transcript: Transcript, rows: Sequence[WeightedRow]) -> NodeAdvantages:
    """Returns the advantages of an episode.

    rows: those of `transcript.rows()`, in their order, or none of them.
    """
    spans = transcript.trained_spans() if rows else {}
    return {
        node: (rows[span.row].weights * rows[span.row].advantages)[span.start : span.stop]
        for node, span in spans.items()
    }
