"""PolicyUpdate: which batches and normalisers the Learner gets."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from composer_jax.models.flops import document_lengths
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.rl.batch import Group, has_enough_graded
from composer_jax.rl.config import NormaliserConfig, RLConfig
from composer_jax.rl.policy_update import PER_TOKEN, PolicyUpdate, learning_metrics
from composer_jax.train.learner import TrainState
from composer_jax.train.losses import LossTermNormalisers
from tests.models.small import small
from tests.rl.made_up import conversation, episode

CONFIG = RLConfig(group_size=2, tokens_per_episode=64.0, batches=((24, 2),), router_replay="off")
GROUP = Group([episode(1.0, conversation(100)), episode(0.0, conversation(200))], [1.0, 0.0])
TOKENS = 12
"""Sampled tokens of GROUP."""


class RecordingLearner:
    """Notes what a step gets, and changes nothing."""

    definition = ModelDef(small())
    mesh = make_mesh(jax.devices()[:2], data=2)
    skipped = 0.0

    def step(self, state, batches, normalisers):
        self.batches, self.normalisers = batches, normalisers
        names = ("tokens", *PER_TOKEN, "log_ratio", "grad_norm", "learning_rate")
        return state, dict.fromkeys((*names, "load_imbalance", "router_entropy"), 1.0) | {"skipped": self.skipped}


def update(config: RLConfig = CONFIG, **algorithm) -> PolicyUpdate:
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, **algorithm))
    return PolicyUpdate(config, RecordingLearner())


STATE = types.SimpleNamespace(step=0)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (NormaliserConfig(), LossTermNormalisers(192.0, 1.0, 192.0)),
        (NormaliserConfig("tokens", "constant", "tokens"), LossTermNormalisers(TOKENS, 192.0, TOKENS)),
    ],
    ids=["default", "the others"],
)
def test_streams_are_divided_by_a_constant_or_by_their_tokens(kinds, expected):
    """Three episodes were played, of which one was lost; no token is imitated."""
    policy_update = update(normalisers=kinds)
    policy_update.step(STATE, [GROUP], 3, 0)
    assert policy_update.learner.normalisers == expected


def test_the_first_update_has_every_shape_and_later_ones_only_what_they_need():
    policy_update = update(dataclasses.replace(CONFIG, batches=((24, 2), (48, 1))))
    for shapes in ([(2, 24), (2, 24), (1, 48)], [(2, 24)]):
        policy_update.step(STATE, [GROUP], 2, 0)
        assert [batch["tokens"].shape for batch in policy_update.learner.batches] == shapes


class NeverStepped(RecordingLearner):
    def step(self, *_):
        raise AssertionError("a step without useful groups updates nothing")


def test_groups_of_equal_rewards_change_no_weight():
    state = TrainState({}, {}, {}, 7)
    policy_update = PolicyUpdate(CONFIG, NeverStepped())
    equal = Group(GROUP.episodes, [0.5, 0.5])
    _, result = update().step(STATE, [equal, GROUP, equal], 6, 0)
    assert result.is_updated and result.metrics["groups_used"] == 1
    groups = [Group([episode(0.0)] * 4, [0.0] * 4), Group([episode(1.0)] * 4, [1.0] * 4)]
    after, result = policy_update.step(state, groups, 8, step=0)
    assert after is state and not result.is_updated and not result.lengths
    assert result.metrics["groups_used"] == 0 and result.metrics["trained_tokens"] == 0
    assert result.metrics["grad_norm"] is None


def test_an_update_comes_with_the_checksums_of_its_weights_and_a_skipped_step_is_none():
    state, policy_update = types.SimpleNamespace(step=0, params="new"), update()
    assert policy_update.step(state, [GROUP], 3, 0)[1].checksums is None
    policy_update.learner_checksums = lambda params: (f"of {params}",)
    assert policy_update.step(state, [GROUP], 3, 0)[1].checksums == ("of new",)
    policy_update.learner.skipped = 1.0
    _, result = policy_update.step(state, [GROUP], 3, 0)
    assert not result.is_updated and result.metrics["skipped"] == 1 and result.checksums is None


@pytest.mark.parametrize("has_experts", [True, False])
def test_only_a_network_with_experts_has_metrics_of_their_load(has_experts):
    learned = dict.fromkeys(("tokens", *PER_TOKEN, "log_ratio", "grad_norm", "learning_rate", "skipped"), 0.5)
    learned |= {"load_imbalance": 1.5, "router_entropy": 0.7} if has_experts else {}
    updated, without_update = (learning_metrics(row, has_experts=has_experts) for row in (learned, None))
    assert updated.keys() == without_update.keys()
    assert updated.get("load_imbalance") == (1.5 if has_experts else None)
    assert updated.get("router_entropy") == (0.7 if has_experts else None)
    assert ("load_imbalance" in updated) is ("router_entropy" in updated) is has_experts


# -- groups of which the infrastructure lost episodes ------------------------------------------------------------


def group_of(*rewards: float) -> Group:
    return Group([episode(r, conversation(100 * i, turns=1)) for i, r in enumerate(rewards)], list(rewards))


@pytest.mark.parametrize(("size", "least"), [(4, 3), (5, 3)])
def test_a_group_is_left_out_with_at_most_half_of_its_episodes(size, least):
    rewards = [1.0, 0.0, 0.5, 0.25, 0.75]
    trained = [graded for graded in range(2, size + 1) if has_enough_graded(group_of(*rewards[:graded]), size)]
    assert trained == list(range(least, size + 1))


def test_a_step_trains_the_rest_of_a_group_and_leaves_out_half_of_one():
    """Rewards 1, 0, 0 and one episode lost; of the other group, two of four."""
    policy_update = update(dataclasses.replace(CONFIG, group_size=4))
    _, result = policy_update.step(STATE, [group_of(1.0, 0.0, 0.0), group_of(1.0, 0.0)], 8, 0)
    assert result.metrics["groups_incomplete"] == 1 and result.is_updated
    batches = policy_update.learner.batches
    assert sorted(result.lengths) == sorted(document_lengths(np.concatenate([b["segments"] for b in batches])))
    assert sum(batch["segments"].max(1).sum() for batch in batches) == 3
    assert max(batch["advantages"].max() for batch in batches) == pytest.approx(2 / 3)
    assert policy_update.learner.normalisers.policy == 8 * CONFIG.tokens_per_episode
