"""A step with replayed routes: on every mesh that of one device, and another one if routes are off by one token."""

import dataclasses

import jax
import numpy as np
import pytest

from composer_jax.train.losses import PolicyLoss, PolicyLossConfig
from tests.models.routes import chosen_routes
from tests.models.small import relative_error
from tests.train.small_step import CONFIG, full_gradient, make_batch

NORMALISER = 7.0
PLAIN = make_batch(2, length=32)
RNG = np.random.default_rng(0)
PLAIN |= {
    "advantages": RNG.standard_normal(PLAIN["weights"].shape).astype(np.float32),
    "sampler_logprobs": np.full(PLAIN["weights"].shape, -4.0, np.float32),
}
REAL = PLAIN["segments"] > 0
LOSS = PolicyLoss(PolicyLossConfig(ratio_low=1e3, ratio_high=1e9, dual_clip=np.inf, replay_plausibility=0.9))
DISPATCHES = {
    "data2_expert4_ring": ({"data": 2, "expert": 4}, {"dispatch": "ring"}),
    "expert2_context2_tensor2": ({"expert": 2, "context": 2, "tensor": 2}, {"dispatch": "ring"}),
    "replica2_context4_host": ({"replica": 2, "context": 4}, {"dispatch": "dense", "reduction": "host"}),
}


@pytest.fixture(scope="module")
def own(weights):
    """The experts that the network chooses, -1 for padding."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        routes = chosen_routes(monkeypatch, CONFIG, weights, PLAIN)
    return np.where(REAL[..., None, None], routes, np.int16(-1))


@pytest.fixture(scope="module")
def one_device(new_learner):
    return new_learner(loss=LOSS)


def part(learner, weights, batch):
    """(gradient, metrics) of one batch."""
    gradient = full_gradient(learner, weights, batch, NORMALISER)
    sums = learner.gradient(*weights, batch, NORMALISER)["sums"]
    sums = {name: np.asarray(x).sum() for name, x in sums.items() if name != "counts"}
    return gradient, sums


def test_the_networks_own_routes_give_the_step_without_replay(one_device, weights, own):
    plain, plain_sums = part(one_device, weights, PLAIN)
    replayed, sums = part(one_device, weights, PLAIN | {"routes": own})
    for a, b in zip(jax.tree.leaves(replayed), jax.tree.leaves(plain), strict=True):
        assert relative_error(a, b) < 3e-6  # float32 rounding in two programs
    choices = REAL.sum() * CONFIG.n_moe_layers * CONFIG.experts_per_token
    assert {n: sums.pop(n) for n in ("replayed", "replay_foreign", "replay_filtered")} == {
        "replayed": choices,
        "replay_foreign": 0,
        "replay_filtered": 0,
    }
    assert sums == pytest.approx(plain_sums, rel=1e-6)


@pytest.mark.parametrize("shift", [-1, 1])
def test_routes_that_are_off_by_one_token_change_the_step(one_device, weights, own, shift):
    plain, plain_sums = part(one_device, weights, PLAIN)
    shifted, sums = part(one_device, weights, PLAIN | {"routes": np.roll(own, shift, axis=1)})
    assert abs(sums["loss"] - plain_sums["loss"]) > 1e-2 * abs(plain_sums["loss"])
    assert relative_error(shifted["head"], plain["head"]) > 1e-2
    assert sums["replay_foreign"] > 0.2 * sums["replayed"]


@pytest.mark.parametrize(("sizes", "how"), DISPATCHES.values(), ids=DISPATCHES.keys())
def test_a_step_with_foreign_routes_is_that_of_one_device(new_learner, one_device, weights, own, sizes, how):
    batch = PLAIN | {"routes": np.roll(own, 1, axis=1)}
    expected, expected_sums = part(one_device, weights, batch)
    learner = new_learner(sizes, loss=LOSS, **how)
    actual, sums = part(learner, weights, batch)
    assert 0 < sums["replay_filtered"] < sums["replay_foreign"] < sums["replayed"]
    assert sums == pytest.approx(expected_sums, rel=1e-5)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < 1e-5


def test_the_filter_of_the_loss_is_used(new_learner, one_device, weights, own):
    batch = PLAIN | {"routes": np.roll(own, 1, axis=1)}
    loose = PolicyLoss(dataclasses.replace(LOSS.config, replay_plausibility=0.0))
    unfiltered, filtered = (
        learner.evaluate(learner.init_state(*weights), [batch]) for learner in (new_learner(loss=loose), one_device)
    )
    assert unfiltered["replay_filtered"] == 0 < filtered["replay_filtered"]
    assert unfiltered["replay_foreign"] >= filtered["replay_filtered"]
