"""Advantages that come with the episodes: sessions of users beside simulated groups in one step."""

import dataclasses
import types

import numpy as np
import pytest

from composer_jax.agent.transcript import Transcript
from composer_jax.rl.advantage_report import token_advantages
from composer_jax.rl.algorithm import GroupAdvantage, make_algorithm
from composer_jax.rl.batch import Group, has_enough_graded
from composer_jax.rl.config import AlgorithmConfig, RLConfig
from composer_jax.rl.curriculum import family_results
from composer_jax.rl.episode_metrics import episode_metrics
from composer_jax.rl.learning_step import Cursor, graded_group, learner_arguments
from composer_jax.rl.played_group import PlayedGroup, decode_group, encode_group, hash_tokens
from composer_jax.rl.policy_update import PolicyUpdate, weighted_rows
from composer_jax.rl.rewards import RewardConfig
from tests.rl.made_up import conversation, episode
from tests.rl.test_policy_update import RecordingLearner

CONFIG = RLConfig(
    group_size=4,
    tokens_per_episode=64.0,
    batches=((40, 2),),
    router_replay="off",
    algorithm=AlgorithmConfig(name="given"),
)
GIVEN = make_algorithm("given", {})


def session(*advantages, start=1000, reward=-0.7, **shape):
    """An episode of one user: its nodes have advantages of their own."""
    turns = {"turns": len(advantages)} if not shape else shape
    return episode(reward, conversation(start, **turns), family="traffic", advantages=tuple(advantages))


def trained_with(batches):
    """token id -> advantage, of all trained tokens."""
    found = {}
    for batch in batches:
        for tokens, weights, advantages in zip(batch["tokens"], batch["weights"], batch["advantages"], strict=True):
            found |= {int(t): float(a) for t, w, a in zip(tokens, weights, advantages, strict=True) if w}
    return found


def test_a_session_of_one_episode_and_a_simulated_group_share_a_step():
    simulated = [episode(r, conversation(100 * i, turns=1)) for i, r in enumerate([1.0, 0.0, 0.0, 1.0], 1)]
    groups = [PlayedGroup(0, [session(0.25, -1.5)], 0, 0), PlayedGroup(1, simulated, 0, 0)]
    update = PolicyUpdate(CONFIG, RecordingLearner())
    graded, episodes, step = learner_arguments(CONFIG, Cursor(), groups)
    _, result = update.step(types.SimpleNamespace(step=0), graded, episodes, step)
    assert result.is_updated and result.metrics["groups_used"] == 2 and result.metrics["groups_incomplete"] == 0
    expected = {1000 + i: 0.25 if i < 3 else -1.5 for i in range(6)}
    expected |= {100 * i + j: a for i, a in enumerate([0.5, -0.5, -0.5, 0.5], 1) for j in range(3)}
    assert trained_with(update.learner.batches) == expected
    assert update.learner.normalisers.policy == 5 * 64.0


def test_every_node_of_every_row_gets_its_own_number():
    """Two summaries make three rows; a node that no row trains has no number."""
    one = session(*range(1, 9), turns=2, summaries=2)
    untrained = one.transcript.nodes_of_kind("summary")[0]
    one.transcript.untrain(untrained)
    with pytest.raises(ValueError, match="8 advantages for 7 nodes"):
        GIVEN.weigh(Group([one], [0.0]), 0)
    one = dataclasses.replace(one, advantages=tuple(range(1, 8)))
    nodes = [node for node in one.transcript.nodes if node.sampled and node.trained]
    expected = {t: a for node, a in zip(nodes, one.advantages, strict=True) for t in node.sampled_tokens.tolist()}
    (rows,) = GIVEN.weigh(Group([one], [0.0]), 0)
    assert len(rows) == 3
    found = {
        int(t): float(a)
        for row in rows
        for t, a, trained in zip(row.row.tokens, row.advantages, row.row.trained, strict=True)
        if trained
    }
    assert found == expected
    (shown,) = token_advantages([one], CONFIG, 0)
    assert {node: set(values.tolist()) for node, values in shown.items()} == {
        node.id: {float(a)} for node, a in zip(nodes, one.advantages, strict=True)
    }


def test_one_given_episode_is_a_group_and_one_graded_episode_is_none():
    alone = session(0.5)
    assert has_enough_graded(graded_group([alone], CONFIG.reward), 8)
    assert graded_group([episode(1.0)], CONFIG.reward) is None
    assert graded_group([dataclasses.replace(alone, reward=None)], CONFIG.reward) is None
    assert weighted_rows([Group([session(0.0)], [0.0])], GIVEN) == [[]]
    group = Group([episode(1.0, conversation(1)), episode(0.0, conversation(50))], [1.0, 0.0])
    for ours, theirs in zip(GIVEN.weigh(group, 0), GroupAdvantage().weigh(group, 0), strict=True):
        np.testing.assert_array_equal(ours[0].advantages, theirs[0].advantages)
    with pytest.raises(ValueError, match="some episodes of task have given advantages"):
        GIVEN.weigh(Group([alone, episode(1.0)], [0.0, 1.0]), 0)


def test_given_episodes_come_back_from_a_file():
    one = session(0.1, -3.25)
    group = PlayedGroup(7, [one], 0, 3)
    back = decode_group(PlayedGroup, b"".join(encode_group(group)))
    assert back == group and back.episodes[0].advantages == (0.1, -3.25)
    without = dataclasses.replace(one, advantages=None)
    assert hash_tokens([group]) == hash_tokens([dataclasses.replace(group, episodes=[without])])


def test_sessions_are_no_part_of_the_curriculum_and_of_the_means_of_played_episodes():
    config = RewardConfig(weight=0.1, turn=1.0, penalties={"question_instead_of_edit": 0.2})
    played = [episode(1.0), episode(0.0)]
    groups = [[session(0.5, reward=-0.7)], played]
    assert family_results(groups) == family_results([played])
    row = episode_metrics(groups, config)
    assert {name: row[name] for name in ("sessions", "session_reward")} == {"sessions": 1, "session_reward": -0.7}
    assert {name: value for name, value in row.items() if "session" not in name} == episode_metrics([played], config)
    assert list(graded_group(groups[0], config).rewards) == [-0.7]
    assert episode_metrics(groups[:1], config)["reward"] is None


class AsksAboutPlayed:
    def __call__(self, episode):
        assert episode.advantages is None
        return {}


def test_detectors_of_mistakes_are_not_asked_about_sessions():
    groups = [Group([session(0.5)], [0.0]), Group([episode(1.0), episode(0.0, conversation(300))], [1.0, 0.0])]
    assert [len(rows) for rows in weighted_rows(groups, GIVEN, 0, AsksAboutPlayed())] == [1, 2]


def test_an_empty_session_trains_nothing():
    empty = episode(0.0, Transcript(), advantages=())
    assert GIVEN.weigh(Group([empty], [0.0]), 0) == [[]]
