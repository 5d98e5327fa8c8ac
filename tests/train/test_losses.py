"""The losses, in closed form: which output predicts which token, what is weighted, and what gets a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.models.definition import Definition
from composer_jax.train.losses import LanguageLoss, PolicyLoss, mtp_divergence, shifted_logprobs
from tests.models.small import random_weights, relative_error, rows, small
from tests.train.table_decoder import TableDecoder, log_softmax

RNG = np.random.default_rng(0)
B, S, W = 2, 7, 5
STATES = jnp.asarray(RNG.standard_normal((B, S, W)), jnp.float32)
TOKENS = RNG.integers(0, W, (B, S))
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 0, 0]])
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 0, 0]])
WEIGHTS = np.where((SEGMENTS > 0) & (POSITIONS > 0), RNG.random((B, S)) + 0.5, 0).astype(np.float32)
ROWS = {"tokens": TOKENS, "positions": POSITIONS, "segments": SEGMENTS, "weights": WEIGHTS}


def chosen_logprobs(states) -> np.ndarray:
    """log p(tokens[t]) under the output at t-1; 0 at t = 0."""
    out = np.zeros((B, S))
    for b in range(B):
        for t in range(1, S):
            out[b, t] = log_softmax(states)[b, t - 1, TOKENS[b, t]]
    return out


def test_the_output_before_a_token_predicts_it():
    np.testing.assert_allclose(shifted_logprobs(STATES, TOKENS), chosen_logprobs(STATES), atol=1e-5)


def test_language_loss_is_the_weighted_cross_entropy():
    out = LanguageLoss()(TableDecoder(STATES), ROWS, jnp.float32(3))
    wanted = -(WEIGHTS * chosen_logprobs(STATES)).sum()
    assert float(out.loss) == pytest.approx(wanted / 3, rel=1e-5)
    assert float(out.sums["nll"]) == pytest.approx(wanted, rel=1e-5)
    assert float(out.sums["tokens"]) == pytest.approx(WEIGHTS.sum(), rel=1e-6)


def test_language_loss_has_its_closed_form_gradient():
    found = jax.grad(lambda s: LanguageLoss()(TableDecoder(s), ROWS, jnp.float32(3)).loss)(STATES)
    onehot = np.eye(W)[TOKENS]
    wanted = np.zeros((B, S, W))
    wanted[:, :-1] = WEIGHTS[:, 1:, None] * (np.exp(log_softmax(STATES))[:, :-1] - onehot[:, 1:]) / 3
    assert relative_error(found, wanted) < 1e-5


# -- MTP ----------------------------------------------------------------------------------------------------------


def test_mtp_divergence_is_the_weighted_kl_to_the_main_head_one_later():
    student = jnp.asarray(RNG.standard_normal((B, S, W)), jnp.float32)
    decoder = TableDecoder(STATES, student)
    found, _ = mtp_divergence(decoder, decoder(**{k: None for k in ("tokens", "positions", "segments")}), STATES, ROWS)
    p, q = log_softmax(STATES), log_softmax(student)
    wanted = 0.0
    for b in range(B):
        for t in range(S - 2):
            if SEGMENTS[b, t] == SEGMENTS[b, t + 2]:
                wanted += WEIGHTS[b, t + 2] * (np.exp(p[b, t + 1]) * (p[b, t + 1] - q[b, t])).sum()
    assert float(found) == pytest.approx(wanted, rel=1e-5)


def test_mtp_divergence_is_zero_for_a_student_that_equals_its_teacher():
    student = jnp.roll(STATES, -1, axis=1)
    decoder = TableDecoder(STATES, student)
    found, gradient = jax.value_and_grad(
        lambda s: mtp_divergence(TableDecoder(STATES, s), decoder(None, None, None), STATES, ROWS)[0]
    )(student)
    assert abs(float(found)) < 1e-6
    assert np.abs(gradient).max() < 1e-6


def test_mtp_gradient_stops_at_the_trunk():
    config = small(n_layers=2)
    params, bias = random_weights(config)
    batch = rows([[range(1, 10), range(20, 30)]], 20)
    batch["weights"] = (batch["positions"] > 0).astype(np.float32)

    def divergence(params):
        decoder = Definition(config).bind(params, bias)
        hidden = decoder(batch["tokens"], batch["positions"], batch["segments"])
        return mtp_divergence(decoder, hidden, decoder.logits(hidden.last_BSD), batch)[0]

    value, gradient = jax.jit(jax.value_and_grad(divergence))(params)
    assert value > 0
    for name in ("embedding", "dense_layers", "moe_layers", "final_norm"):
        assert jax.tree.all(jax.tree.map(lambda g: not np.any(g), gradient[name])), name
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient["mtp"]))


# -- policy gradient ----------------------------------------------------------------------------------------------

ADVANTAGES = np.where(WEIGHTS > 0, np.where(SEGMENTS == 1, 0.75, -0.5), 0).astype(np.float32)
SAMPLED = (WEIGHTS > 0) & (RNG.random((B, S)) < 0.8)
OFF_POLICY = np.where(SAMPLED, chosen_logprobs(STATES) + 0.3 * RNG.standard_normal((B, S)), 0).astype(np.float32)
POLICY_ROWS = ROWS | {
    "weights": SAMPLED.astype(np.float32),
    "advantages": np.where(SAMPLED, ADVANTAGES, 0).astype(np.float32),
    "sampler_logprobs": OFF_POLICY,
}
WIDE = PolicyLoss(ratio_low=1.0, ratio_high=1e9)
Z = 4.0


def surrogate(states) -> float:
    """-1/Z sum r_t A_t: what importance-weighted REINFORCE estimates, whose gradient is the policy gradient."""
    ratio = np.exp(chosen_logprobs(states) - OFF_POLICY)
    return -(SAMPLED * ratio * ADVANTAGES).sum() / Z


def policy_gradient(loss: PolicyLoss, batch=POLICY_ROWS) -> np.ndarray:
    return np.asarray(jax.grad(lambda s: loss(TableDecoder(s), batch, jnp.float32(Z)).loss)(STATES))


def test_policy_gradient_is_that_of_importance_weighted_reinforce():
    def objective(states):
        ratio = jnp.exp(shifted_logprobs(states, TOKENS) - OFF_POLICY)
        return -(SAMPLED * ratio * ADVANTAGES).sum() / Z

    wanted = jax.grad(objective)(STATES)
    assert float(objective(STATES)) == pytest.approx(surrogate(STATES), rel=1e-5)
    assert np.abs(wanted).max() > 0.01
    assert relative_error(policy_gradient(WIDE), wanted) < 1e-5


def test_policy_gradient_agrees_with_finite_differences():
    found, states, h = policy_gradient(WIDE), np.asarray(STATES, np.float64), 1e-5
    for index in [(0, 0, 1), (0, 2, 3), (0, 4, 0), (1, 1, 4), (1, 3, 2), (1, 6, 0)]:
        step = np.zeros_like(states)
        step[index] = h
        wanted = (surrogate(states + step) - surrogate(states - step)) / (2 * h)
        assert found[index] == pytest.approx(wanted, rel=1e-4, abs=1e-7)


def test_equal_rewards_give_exactly_zero_gradient():
    batch = POLICY_ROWS | {"advantages": np.zeros((B, S), np.float32)}
    np.testing.assert_array_equal(policy_gradient(WIDE, batch), 0)


def test_only_sampled_tokens_pull():
    """The gradient at an output is zero where the token it predicts was given, even with an advantage there."""
    gradient = policy_gradient(WIDE, POLICY_ROWS | {"advantages": np.ones((B, S), np.float32)})
    np.testing.assert_array_equal(np.abs(gradient[:, :-1]).max(-1) > 0, SAMPLED[:, 1:])
    np.testing.assert_array_equal(gradient[:, -1], 0)


@pytest.mark.parametrize(("log_ratio", "trusted"), [(-0.24, False), (-0.21, True), (0.24, True), (0.26, False)])
def test_tokens_outside_the_trust_region_have_no_gradient(log_ratio, trusted):
    """low 0.2 and high 0.28 are log ratios of -0.223 and 0.247."""
    loss = PolicyLoss(ratio_low=0.2, ratio_high=0.28)
    near = np.where(SAMPLED, chosen_logprobs(STATES), 0).astype(np.float32)
    b, t = np.argwhere(SAMPLED)[1]
    near[b, t] -= log_ratio
    batch = POLICY_ROWS | {"sampler_logprobs": near}
    gradient = policy_gradient(loss, batch)
    if trusted:
        wanted = -np.exp(log_ratio) * ADVANTAGES[b, t] / Z
        onehot = np.eye(W)[TOKENS[b, t]]
        np.testing.assert_allclose(
            gradient[b, t - 1], wanted * (onehot - np.exp(log_softmax(STATES))[b, t - 1]), rtol=1e-4
        )
    else:
        np.testing.assert_array_equal(gradient[b, t - 1], 0)
    sums = loss(TableDecoder(STATES), batch, jnp.float32(Z)).sums
    assert float(sums["masked"]) == (not trusted)


def test_what_the_policy_loss_reports():
    out = WIDE(TableDecoder(STATES), POLICY_ROWS, jnp.float32(Z))
    log_ratio = np.where(SAMPLED, chosen_logprobs(STATES) - OFF_POLICY, 0)
    entropy = -(np.exp(log_softmax(STATES)) * log_softmax(STATES)).sum(-1)
    assert float(out.sums["tokens"]) == SAMPLED.sum()
    assert float(out.sums["k1"]) == pytest.approx(-log_ratio.sum(), rel=1e-4)
    assert float(out.maxima["log_ratio"]) == pytest.approx(np.abs(log_ratio).max(), rel=1e-4)
    assert float(out.sums["entropy"]) == pytest.approx((entropy[:, :-1] * SAMPLED[:, 1:]).sum(), rel=1e-4)
