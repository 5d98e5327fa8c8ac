"""Published trust regions, against the formulas of their papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.train.losses import PolicyLoss, PolicyLossConfig
from composer_jax.train.trust_region import PUBLISHED_REGIONS
from tests.train.table_decoder import TableDecoder, log_softmax

RATIOS = np.exp(np.linspace(-1.5, 1.5, 61))
W = 4


def weights(config: PolicyLossConfig, sign: float, ratios=RATIOS) -> np.ndarray:
    """What log p of tokens with these ratios is multiplied by, over their advantage, from the gradient of the loss."""
    n = len(ratios)
    states = jnp.asarray(np.random.default_rng(0).standard_normal((n, 2, W)), jnp.float32)
    logprobs = log_softmax(states)[:, 0, 0]
    second = np.tile(np.array([[0, 1]], np.float32), (n, 1))
    batch = {
        "tokens": np.zeros((n, 2), np.int32),
        "positions": second.astype(np.int32),
        "segments": np.ones((n, 2), np.int32),
        "weights": second,
        "advantages": sign * second,
        "sampler_logprobs": (second * (logprobs - np.log(ratios))[:, None]).astype(np.float32),
    }
    gradient = jax.grad(lambda s: PolicyLoss(config)(TableDecoder(s), batch, jnp.float32(1)).loss)(states)
    return -np.asarray(gradient)[:, 0, 0] / (1 - np.exp(logprobs)) / sign


def ppo(low, high):
    """d/dr of min(r A, clip(r, 1 - low, 1 + high) A) over A, times r, since dr = r d log p."""
    return lambda r, a: np.where((r > 1 + high) if a > 0 else (r < 1 - low), 0, r)


PAPERS = {
    "ppo": ppo(0.2, 0.2),
    "dapo": ppo(0.2, 0.28),
    "dual_clip": lambda r, a: np.where((a < 0) & (r > 3), 0, ppo(0.2, 0.2)(r, a)),
    "glm5": lambda r, _: r * ((1 - 0.2 < r) & (r < 1 + 0.28)),
    "icepop": lambda r, _: r * ((1 / 2 < r) & (r < 2)),
    "truncated": lambda r, _: np.minimum(r, 2),
    "cispo": lambda r, _: np.minimum(r, 1.28),
}


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", PUBLISHED_REGIONS)
def test_a_published_region_weighs_tokens_as_its_paper_says(name, sign):
    actual = weights(PolicyLossConfig(**PUBLISHED_REGIONS[name]), sign)
    np.testing.assert_allclose(actual, PAPERS[name](RATIOS, sign), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_k2_5s_mask_bounds_the_log_ratio(sign):
    low, high = -np.expm1(-0.52), np.expm1(0.33)
    actual = weights(PolicyLossConfig(trust_region="mask", ratio_low=low, ratio_high=high), sign)
    inside = (np.log(RATIOS) > -0.52) & (np.log(RATIOS) < 0.33)
    np.testing.assert_allclose(actual, RATIOS * inside, rtol=1e-4, atol=1e-6)
    assert 0 < inside.sum() < len(inside)


def clipped_objective(xp, ratio, sign, dual):
    """PPO's objective (arXiv 1707.06347, equation 7) with dual clip (arXiv 1912.09729, equation 5)."""
    objective = xp.minimum(ratio * sign, xp.clip(ratio, 0.8, 1.28) * sign)
    return objective if sign > 0 else xp.maximum(objective, dual * sign)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dual", [1e9, 3.0, 1.5])
def test_clip_has_the_gradient_of_the_published_objective(sign, dual):
    """Differentiated by JAX, and by finite differences of the log-probability."""
    actual = weights(PolicyLossConfig(dual_clip=dual), sign)
    derivative = jax.grad(lambda r: clipped_objective(jnp, r, sign, dual).sum())(jnp.asarray(RATIOS, jnp.float32))
    np.testing.assert_allclose(actual, derivative * RATIOS / sign, rtol=1e-4, atol=1e-6)
    h = 1e-5
    above, below = (clipped_objective(np, RATIOS * np.exp(step), sign, dual) for step in (h, -h))
    np.testing.assert_allclose(actual, (above - below) / (2 * h) / sign, rtol=1e-4, atol=1e-6)
    assert (0 in actual[RATIOS > 1.28]) == (sign > 0 or dual < RATIOS.max())


@pytest.mark.parametrize("ratio", [1e3, 1e80], ids=["1000", "overflow"])
def test_a_token_of_negative_advantage_has_no_weight_without_bound(ratio):
    assert weights(PolicyLossConfig(), -1.0, np.array([1.1, ratio])).tolist() == [pytest.approx(1.1, rel=1e-4), 0]
