"""The advantages that the report shows are those of the rows that the learner trains."""

import dataclasses

import numpy as np
import pytest

from composer_jax.agent.transcript import Transcript
from composer_jax.rl.advantage_report import token_advantages
from composer_jax.rl.algorithm import GroupAdvantage, make_algorithm
from composer_jax.rl.config import AlgorithmConfig, RLConfig
from composer_jax.rl.learning_step import graded_group
from composer_jax.rl.policy_update import weighted_rows
from tests.rl.made_up import conversation, episode

CONFIG = RLConfig(group_size=3)


def group(*rewards):
    # All sampled tokens of the group differ, and every episode has two summaries.
    return [episode(r, conversation(1000 * (i + 1), summaries=2)) for i, r in enumerate(rewards)]


def shown(episodes, config=CONFIG):
    """token id -> its advantage, of all episodes."""
    found = {}
    for one, by_node in zip(episodes, token_advantages(episodes, config, 0), strict=True):
        for node in one.transcript.nodes:
            if node.id in by_node:
                found |= dict(zip(node.sampled_tokens.tolist(), by_node[node.id].tolist(), strict=True))
    return found


class EarlierRowsCountHalf:
    """The default algorithm, except that an advantage is halved for each later row of its episode."""

    def weigh(self, group, step):
        by_episode = GroupAdvantage().weigh(group, step)
        for rows in by_episode:
            for later, row in enumerate(reversed(rows)):
                row.advantages[:] *= 0.5**later
        return by_episode


HALVED = AlgorithmConfig(name=f"{__name__}:EarlierRowsCountHalf")


@pytest.mark.parametrize(("algorithm", "factor"), [(AlgorithmConfig(), 1.0), (HALVED, 0.25)], ids=["equal", "halved"])
def test_every_sampled_token_has_the_advantage_of_its_row(algorithm, factor):
    config, episodes = dataclasses.replace(CONFIG, algorithm=algorithm), group(1.0, 0.0, 0.5)
    learned = make_algorithm(algorithm.name, algorithm.options)
    graded = graded_group(episodes, config.reward)
    assert graded is not None
    want = {
        token: weight * advantage
        for row in weighted_rows([graded], learned)[0]
        for token, trained, weight, advantage in zip(
            row.row.tokens.tolist(), row.row.trained, row.weights.tolist(), row.advantages.tolist(), strict=True
        )
        if trained
    }
    found = shown(episodes, config)
    # The third episode has the mean reward, so that no row trains it, and its tokens are shown with 0.
    assert {token: value for token, value in found.items() if value} == want
    assert [token for token, value in found.items() if not value] == [t for t in sorted(found) if t >= 3000]
    first, last = found[1000], found[1000 + 2 * (2 * 3 + 2)]
    assert (first, last) == (0.5 * factor, 0.5)


def test_branches_that_share_a_sampled_node_train_it_once():
    def tree():
        transcript = Transcript()
        transcript.append("prompt", [1, 2])
        shared = transcript.append("assistant", [5], [10, 11], [-0.1, -0.2], [0, 0])
        for first in (20, 30):
            transcript.branch(shared)
            transcript.append("tool", [6, 7])
            transcript.append("assistant", [5], [first, first + 1], [-0.1, -0.2], [0, 0])
        return transcript

    config = dataclasses.replace(CONFIG, group_size=2, algorithm=HALVED)
    by_node, _ = token_advantages([episode(1.0, tree()), episode(0.0, tree())], config, 0)
    # Of two rows the first one, which trains the shared tokens, is halved once.
    assert {node: values.tolist() for node, values in by_node.items()} == {1: [0.25] * 2, 3: [0.25] * 2, 5: [0.5] * 2}


def test_what_is_not_trained_has_no_advantage():
    lost = [*group(1.0), *(episode(None, Transcript()) for _ in range(2))]
    assert shown(lost) == {}
    by_episode = token_advantages([*group(1.0, 0.0, 0.0), episode(None, Transcript())], CONFIG, 0)
    assert by_episode[3] == {} and all(by_episode[:3])
    np.testing.assert_allclose([value for v in by_episode[0].values() for value in v], 2 / 3, rtol=1e-6)
