"""rl.replay: which conversations of SFT a step draws, what they cost, and what the learner makes of them."""

import dataclasses

import jax
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.models.route_dtypes import NO_ROUTE
from composer_jax.rl.batch import Group, pack_rows
from composer_jax.rl.config import RLConfig
from composer_jax.rl.policy_update import PolicyUpdate
from composer_jax.rl.reference import ReferenceKLConfig
from composer_jax.rl.replay import NO_EPISODE, ReplayConfig, ReplayMix
from composer_jax.schema.run_config import run_config
from configs import tiny
from tests.models.small import WITHOUT_EXPERTS, small
from tests.rl.made_up import conversation, episode
from tests.rl.small_learner import small_learner
from tests.rl.test_policy_update import STATE, RecordingLearner

LONGEST = 24
NETWORK = small(**WITHOUT_EXPERTS, n_layers=1)


def trace(start: int, given: int, trained: int, after: int = 0):
    """A conversation of different tokens, of which `trained` are targets."""
    n = given + trained + after
    return np.arange(start, start + n), (np.arange(n) >= given) & (np.arange(n) < given + trained)


TRACES = [trace(20 * i, given=2 + i % 3, trained=1 + i % 5, after=i % 2) for i in range(10)]
LENGTHS = [2 + i % 3 + 1 + i % 5 for i in range(10)]
"""Up to the last target."""


def mix(fraction=0.5, weight=1.0, traces=TRACES, seed=0) -> ReplayMix:
    return ReplayMix(ReplayConfig(fraction, weight), traces, LONGEST, seed)


def first_tokens(rows) -> list[int]:
    return [int(row.row.tokens[0]) for row in rows]


@pytest.mark.parametrize("fraction", [0.01, 0.5, 1.0, 7.0])
@pytest.mark.parametrize("tokens", [1, 40, 333])
def test_a_step_costs_the_fraction_of_its_tokens_and_less_than_a_conversation_more(fraction, tokens):
    for step in range(5):
        drawn = sum(len(row.row.tokens) for row in mix(fraction).draw(step, tokens))
        assert fraction * tokens <= drawn < fraction * tokens + max(LENGTHS)
    assert mix(fraction).draw(0, 0) == []


def test_draws_depend_on_seed_and_step_only_and_repeat_nothing_before_all_were_drawn():
    draws = [first_tokens(mix().draw(step, 60)) for step in range(4)]
    assert len({tuple(draw) for draw in draws}) == 4
    one = mix()
    one.draw(9, 500)  # what was drawn before changes nothing
    assert [first_tokens(one.draw(step, 60)) for step in (3, 0)] == [draws[3], draws[0]]
    assert first_tokens(mix(seed=1).draw(0, 60)) != draws[0]
    many = first_tokens(mix().draw(0, 4 * sum(LENGTHS)))
    assert len(many) == 20 and sorted(many[:10]) == sorted(many[10:]) == [20 * i for i in range(10)]


def test_rows_are_whole_conversations_that_cross_entropy_alone_trains():
    for row in mix(weight=0.3).draw(0, 200):
        number = int(row.row.tokens[0]) // 20
        ids, trained = (array[: LENGTHS[number]] for array in TRACES[number])
        np.testing.assert_array_equal(row.row.tokens, ids)
        np.testing.assert_array_equal(row.ce_weights, np.where(trained, np.float32(0.3), 0))
        assert not (row.weights.any() or row.advantages.any() or row.kl_weights.any())
        assert row.has_signal and row.episode == NO_EPISODE and not row.hints


def test_what_no_row_holds_and_what_trains_nothing_is_left_out():
    first = (np.arange(500, 504), np.array([True, False, False, False]))  # nothing predicts a first token
    left_out = [trace(300, LONGEST, 1), trace(400, 3, 0), first]
    some = mix(traces=[*TRACES, *left_out, trace(600, LONGEST - 1, 1, after=9)])
    assert some.left_out == 3
    assert set(first_tokens(some.draw(0, 5000))) == {600, *(20 * i for i in range(10))}
    with pytest.raises(UserError, match="all 3 conversations of SFT train no token or are longer than .* 24 tokens"):
        mix(traces=left_out)


@pytest.mark.parametrize("values", [(-0.1, 1.0), (float("nan"), 1.0), (0.5, 0.0), (0.5, float("inf"))])
def test_bad_values_are_named(values):
    with pytest.raises(UserError, match=r"rl\.replay\.(fraction|weight)="):
        ReplayConfig(*values)


def test_a_run_whose_config_has_no_conversations_is_refused_in_one_sentence():
    config = tiny.get_config("smoke")
    config.rl.replay.fraction = 0.5
    assert run_config(config).replays_sft
    config.stages, config.sft.sources = ("rl",), {}
    with pytest.raises(UserError, match=r"rl.replay.fraction=0.5 .* name a file of conversations as --config.sft.data"):
        run_config(config)
    config.stages = ("pretrain",)
    assert not run_config(config).replays_sft


# -- in a step ---------------------------------------------------------------------------------------------------

CONFIG = RLConfig(
    group_size=2, batches=((LONGEST, 4),), router_replay="off", replay=ReplayConfig(0.5, 0.25), tokens_per_episode=8.0
)
GROUP = Group([episode(1.0, conversation(100)), episode(0.0, conversation(130))], [1.0, 0.0])
TOKENS = 2 * 14
"""Of the rows of GROUP."""


def new_update(learner, config=CONFIG, mixed=True) -> PolicyUpdate:
    update = PolicyUpdate(config if mixed else dataclasses.replace(config, replay=ReplayConfig()), learner)
    if mixed:
        update.set_replay(ReplayMix(config.replay, TRACES, LONGEST, seed=0))
    return update


def test_a_step_trains_what_it_says_it_costs():
    update = new_update(RecordingLearner())
    _, result = update.step(STATE, [GROUP], 2, 3)
    drawn = result.metrics["sft_replay_tokens"]
    assert 0.5 * TOKENS <= drawn < 0.5 * TOKENS + max(LENGTHS)
    assert sum(result.lengths) == TOKENS + drawn == sum((b["segments"] > 0).sum() for b in update.learner.batches)
    batch = {name: np.concatenate([b[name] for b in update.learner.batches]) for name in ("weights", "ce_weights")}
    assert set(np.unique(batch["ce_weights"])) == {0.0, 0.25} and not batch["weights"][batch["ce_weights"] > 0].any()
    assert update.learner.normalisers.cross_entropy == np.count_nonzero(batch["ce_weights"]) > 0
    assert result.metrics["groups_used"] == 1
    plain = new_update(RecordingLearner(), mixed=False)
    _, without = plain.step(STATE, [GROUP], 2, 3)
    assert "sft_replay_tokens" not in without.metrics and sum(without.lengths) == TOKENS
    assert plain.learner.normalisers.policy == update.learner.normalisers.policy


def test_a_step_without_episodes_to_train_replays_nothing():
    equal = Group(GROUP.episodes, [0.5, 0.5])
    _, result = new_update(RecordingLearner()).step(STATE, [equal], 2, 0)
    assert not result.is_updated and result.metrics["sft_replay_tokens"] == 0


def test_an_update_that_was_given_no_conversations_is_a_bug():
    with pytest.raises(ValueError, match="needs set_replay"):
        PolicyUpdate(CONFIG, RecordingLearner()).step(STATE, [GROUP], 2, 0)


def test_rows_that_no_engine_sampled_need_no_routes():
    packed = pack_rows(mix().draw(0, 40), ((LONGEST, 4),), route_shape=(1, 2))
    assert all((np.asarray(batch["routes"]) == NO_ROUTE).all() for batch in packed.batches)


def weights_after(steps, states=None):
    """The parameters after these steps, each by an update of its own as after a restart if `states` is None."""
    learner = small_learner(NETWORK, peak=1e-2)
    state = learner.init_state(*ModelDef(NETWORK).init(0, learner.mesh))
    update, losses = new_update(learner), []
    for step in steps:
        update = new_update(learner) if states is None else update
        state, result = update.step(state, [GROUP], 2, step)
        losses.append(result.metrics["cross_entropy"])
    return jax.tree.leaves(state.params), losses


def test_a_restarted_run_has_the_same_bits_and_conversations_are_learned():
    (once, losses), (restarted, _) = weights_after(range(12), "kept"), weights_after(range(12))
    for a, b in zip(once, restarted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.2
    other, _ = weights_after(range(1, 13))
    assert any((a != b).any() for a, b in zip(once, other, strict=True)), "other steps draw other conversations"


@pytest.mark.parametrize("form", ["token", "sequence"])
def test_conversations_do_not_pay_for_the_kl(form):
    kl = dataclasses.replace(CONFIG.algorithm, kl=ReferenceKLConfig(0.1, form))
    config, metrics = dataclasses.replace(CONFIG, algorithm=kl), []
    for mixed in (True, False):
        learner = small_learner(NETWORK)
        update = new_update(learner, config, mixed)
        update.set_reference(*ModelDef(NETWORK).init(1, learner.mesh))
        _, result = update.step(learner.init_state(*ModelDef(NETWORK).init(0, learner.mesh)), [GROUP], 2, 0)
        metrics.append([result.metrics[name] for name in ("kl_reference_k3", "trained_tokens", "entropy", "ratio_max")])
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4) and metrics[0][0] > 0.01
