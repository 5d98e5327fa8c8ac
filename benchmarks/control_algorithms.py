"""RL algorithms of controls (benchmarks/controls.py): each takes away one thing that RL might owe its gain to."""

from collections.abc import Sequence

import numpy as np

from composer_jax.rl.algorithm import GroupAdvantage, broadcast_advantages
from composer_jax.rl.batch import Group, WeightedRow
from composer_jax.seeds import seeded_random


class RandomAdvantages:
    """The advantages of the default algorithm, dealt to the episodes of a group at random.

    Their sizes are those of RL, and they say nothing about the episodes. The order depends on the task only.
    """

    def weigh(self, group: Group, step: int) -> list[list[WeightedRow]]:
        """See rl/algorithm.py: Algorithm."""
        advantages_G = GroupAdvantage()(group.rewards)
        order = list(range(len(advantages_G)))
        seeded_random("random advantages", group.episodes[0].task_id).shuffle(order)
        return broadcast_advantages(group, advantages_G[order])


class NoAdvantages:
    """Advantages of 0: only what does not come from rewards is trained, such as the term of rl.feedback."""

    def __call__(self, rewards: Sequence[float]) -> np.ndarray:
        """See rl/algorithm.py: RewardAlgorithm."""
        return np.zeros(len(rewards), np.float32)


class OtherSummaries:
    """The default algorithm, except that the summaries of an episode get the advantage of another one of its group.

    That is the credit which a summary would get if another episode had gone on from it: how good the task's episodes
    are in the mean, and nothing about the summary itself. The next episode of the group is the other one.
    """

    def weigh(self, group: Group, step: int) -> list[list[WeightedRow]]:
        """See rl/algorithm.py: Algorithm."""
        advantages_G = GroupAdvantage()(group.rewards)
        by_episode = broadcast_advantages(group, advantages_G)
        for episode, rows, other in zip(group.episodes, by_episode, np.roll(advantages_G, -1), strict=True):
            spans = episode.transcript.trained_spans()
            for node in episode.transcript.nodes_of_kind("summary"):
                if (span := spans.get(node.id)) is not None:
                    rows[span.row].advantages[span.start : span.stop] = other
        return by_episode


class LengthNormalised:
    """The default algorithm with each episode's loss divided by its length, as in GRPO (arXiv 2402.03300, equation 3).

    Every advantage is multiplied by the mean number of sampled tokens of the group's episodes and divided by that of
    its own, so that a group weighs about as much as it does without.
    """

    def weigh(self, group: Group, step: int) -> list[list[WeightedRow]]:
        """See rl/algorithm.py: Algorithm."""
        lengths_G = np.array([episode.transcript.total_sampled for episode in group.episodes], np.float32)
        advantages_G = GroupAdvantage()(group.rewards)
        return broadcast_advantages(group, advantages_G * lengths_G.mean() / np.maximum(lengths_G, 1))


class RejectionSampling:
    """Cross-entropy of solved episodes, nothing of the others: rejection-sampling fine-tuning."""

    def weigh(self, group: Group, step: int) -> list[list[WeightedRow]]:
        """See rl/algorithm.py: Algorithm."""
        solved = [episode.reward is not None and episode.reward >= 1 for episode in group.episodes]
        return [
            [WeightedRow.of(row, 0.0, weight=0.0, ce_weight=float(is_solved)) for row in episode.transcript.rows()]
            for episode, is_solved in zip(group.episodes, solved, strict=True)
        ]


class AcceptedSessions(RejectionSampling):
    """Cross-entropy of the sessions of a batch (realtime/batches) that are worth more than the batch's mean, nothing of
    the others. Simulated groups beside them: cross-entropy of their solved episodes.
    """

    def weigh(self, group: Group, step: int) -> list[list[WeightedRow]]:
        """See rl/algorithm.py: Algorithm."""
        if not group.is_given:
            return super().weigh(group, step)
        (episode,) = group.episodes
        accepted = float(episode.reward is not None and episode.reward > 0)
        return [[WeightedRow.of(row, 0.0, weight=0.0, ce_weight=accepted) for row in episode.transcript.rows()]]
