"""The reference policy: what is charged for the KL to it, and which weights it may have."""

import dataclasses

import jax
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.observe.compilations import count_compilations
from composer_jax.parallel.mesh import make_mesh
from composer_jax.rl.algorithm import GroupAdvantage
from composer_jax.rl.batch import Group, WeightedRow, pack_rows
from composer_jax.rl.config import AlgorithmConfig, RLConfig
from composer_jax.rl.policy_update import PolicyUpdate, weighted_rows
from composer_jax.rl.reference import Reference, ReferenceKLConfig, sum_later_tokens, with_reference
from composer_jax.train.losses import LossTermNormalisers
from composer_jax.train.scoring import TokenScorer
from tests.models.small import LLAMA, random_weights, small
from tests.rl.made_up import conversation, episode
from tests.rl.small_learner import small_learner

CONFIG = small(**LLAMA, n_layers=1, vocab_size=128)
WEIGHTS = random_weights(CONFIG)
MESH = make_mesh(jax.devices()[:1])
SHAPES = ((24, 2), (48, 1))
REWARDS = [1.0, 0.0, 0.5]
GROUP = Group([episode(r, conversation(20 + 30 * i, summaries=i)) for i, r in enumerate(REWARDS)], REWARDS)


def rows() -> list[WeightedRow]:
    return [row for rows in weighted_rows([GROUP], GroupAdvantage()) for row in rows]


def test_a_token_pays_for_the_later_tokens_of_its_episode_in_all_segments():
    """Against a double loop over the tokens of each episode."""
    chosen, rng = rows(), np.random.default_rng(0)
    assert [row.episode for row in chosen] == [0, 1, 1], "the third has the mean reward"
    values = [rng.standard_normal(len(row.row.tokens)) for row in chosen]
    for number in (0, 1):
        whole = np.concatenate([v for v, row in zip(values, chosen, strict=True) if row.episode == number])
        expected = [sum(whole[t:]) for t in range(len(whole))]
        actual = [s for s, row in zip(sum_later_tokens(chosen, values), chosen, strict=True) if row.episode == number]
        np.testing.assert_allclose(np.concatenate(actual), expected, atol=1e-12)


class FixedScorer:
    """Scores every token with one number."""

    definition = ModelDef(CONFIG)

    def __call__(self, params, router_bias, batch):
        return np.full(batch["tokens"].shape, float(params["final_norm"]["scale"][0]), np.float32)


def constant(value: float):
    params = dict(WEIGHTS[0]) | {"final_norm": {"scale": np.full(CONFIG.d_model, value, np.float32)}}
    return params, WEIGHTS[1]


@pytest.mark.parametrize("form", ["token", "sequence"])
def test_the_forms_differ_in_what_a_token_pays_for(form):
    """The policy is e^0.5 times as likely as the reference to say each token."""
    packed = pack_rows(rows(), SHAPES)
    batches = with_reference(
        packed,
        ReferenceKLConfig(0.1, form),
        Reference(*constant(-2.0), FixedScorer(), lambda *_: None),
        constant(-1.5),
        LossTermNormalisers(6.0, 1.0, 3.0),
    )
    paid = [
        row.advantages - advantages
        for row, advantages in zip(packed.rows, packed.read([b["advantages"] for b in batches]), strict=True)
    ]
    kl_weights = packed.read([b["kl_weights"] for b in batches])
    for i, row in enumerate(packed.rows):
        trained = row.row.trained
        if form == "token":
            assert not paid[i].any()
            np.testing.assert_array_equal(kl_weights[i], np.where(trained, np.float32(0.1), 0))
        else:
            later = sum(r.row.trained.sum() for r in packed.rows[i + 1 :] if r.episode == row.episode)
            to_go = np.cumsum(trained[::-1])[::-1] + later
            np.testing.assert_allclose(paid[i], np.where(trained, 0.1 * 0.5 * 2 * to_go, 0), rtol=1e-4)
            assert not kl_weights[i].any()
        np.testing.assert_array_equal(packed.read([b["reference_logprobs"] for b in batches])[i], -2.0 * trained)


@pytest.fixture(scope="module")
def learner():
    return small_learner(CONFIG, 1e-2)


def update_with(learner, coefficient: float, form="token") -> PolicyUpdate:
    kl = ReferenceKLConfig(coefficient, form)
    return PolicyUpdate(
        RLConfig(
            group_size=3,
            batches=SHAPES[:1],
            tokens_per_episode=8.0,
            router_replay="off",
            algorithm=AlgorithmConfig(kl=kl),
        ),
        learner,
    )


@pytest.mark.parametrize("form", ["token", "sequence"])
def test_the_kl_to_the_start_is_zero_at_first_and_grows_and_its_coefficient_holds_it(learner, form):
    """And the reference stays what it was, and nothing compiles after the first step."""

    def k3_of_steps(coefficient):
        update, state, kl, compilations = update_with(learner, coefficient, form), learner.init_state(*WEIGHTS), [], []
        update.set_reference(*WEIGHTS)
        for _ in range(8):
            state, result = update.step(state, [GROUP], 3, 0)
            kl.append(result.metrics["kl_reference_k3"])
            compilations.append(count_compilations())
            if len(kl) == 1:
                assert result.metrics["kl_reference"] == pytest.approx(0, abs=1e-5)
        assert len(set(compilations)) == 1
        return kl

    free = k3_of_steps(0.001)
    assert free[0] == pytest.approx(0, abs=1e-5) and free[3] > free[1] > 1e-4
    if form == "token":
        assert k3_of_steps(3.0)[-1] < 0.5 * free[-1]


def test_without_a_coefficient_there_is_no_metric_of_a_kl(learner):
    _, result = update_with(learner, 0.0).step(learner.init_state(*WEIGHTS), [GROUP], 3, 0)
    assert not result.metrics.keys() & {"kl_reference", "kl_reference_k3"}


def test_a_reference_of_another_shape_is_refused():
    other = random_weights(dataclasses.replace(CONFIG, vocab_size=64))
    with pytest.raises(UserError, match=r"weight .*embedding.* of shape \(64, 32\)"):
        Reference(*other, TokenScorer(ModelDef(CONFIG), MESH), lambda *_: None)


def test_a_coefficient_without_a_reference_is_an_error(learner):
    with pytest.raises(ValueError, match="needs set_reference"):
        update_with(learner, 0.1).step(learner.init_state(*WEIGHTS), [GROUP], 3, 0)
