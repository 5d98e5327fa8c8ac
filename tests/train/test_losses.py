"""The losses, in closed form: which output predicts which token, what is weighted, and what gets a gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.train.losses import (
    LanguageLoss,
    LanguageLossConfig,
    LossTermNormalisers,
    PolicyLoss,
    PolicyLossConfig,
    make_loss,
)
from composer_jax.train.trust_region import TRUST_REGIONS
from tests.models.small import LLAMA, random_weights, relative_error, rows, small
from tests.train.table_decoder import TableDecoder, log_softmax

RNG = np.random.default_rng(0)
B, S, W = 2, 7, 5
STATES = jnp.asarray(RNG.standard_normal((B, S, W)), jnp.float32)
TOKENS = RNG.integers(0, W, (B, S)).astype(np.int32)
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 0, 0]], np.int32)
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 0, 0]], np.int32)
WEIGHTS = np.where((SEGMENTS > 0) & (POSITIONS > 0), RNG.random((B, S)) + 0.5, 0).astype(np.float32)
ROWS = {"tokens": TOKENS, "positions": POSITIONS, "segments": SEGMENTS, "weights": WEIGHTS}


def chosen_logprobs(states) -> np.ndarray:
    """log p(tokens[t]) under the output at t-1; 0 at t = 0."""
    out = np.zeros((B, S))
    for b in range(B):
        for t in range(1, S):
            out[b, t] = log_softmax(states)[b, t - 1, TOKENS[b, t]]
    return out


def test_language_loss_is_the_weighted_cross_entropy():
    out = LanguageLoss()(TableDecoder(STATES), ROWS, jnp.float32(3))
    expected = -(WEIGHTS * chosen_logprobs(STATES)).sum()
    assert float(out.loss) == pytest.approx(expected / 3, rel=1e-5)
    assert float(out.sums["nll"]) == pytest.approx(expected, rel=1e-5)
    assert float(out.sums["tokens"]) == pytest.approx(WEIGHTS.sum(), rel=1e-6)


def test_language_loss_has_its_closed_form_gradient():
    actual = jax.grad(lambda s: LanguageLoss()(TableDecoder(s), ROWS, jnp.float32(3)).loss)(STATES)
    onehot = np.eye(W)[TOKENS]
    expected = np.zeros((B, S, W))
    expected[:, :-1] = WEIGHTS[:, 1:, None] * (np.exp(log_softmax(STATES))[:, :-1] - onehot[:, 1:]) / 3
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("positions", POSITIONS[:, :6], r"positions_BS is int32\[2, 6\], not \[B,S\] with B=2, S=7"),
        ("weights", WEIGHTS.astype(np.int32), r"weights_BS is int32\[2, 7\], not of dtype float32"),
    ],
)
def test_a_field_of_another_shape_or_dtype_is_refused(field, values, message):
    with pytest.raises(AssertionError, match=message):
        LanguageLoss()(TableDecoder(STATES), ROWS | {field: values}, jnp.float32(3))


# -- MTP ----------------------------------------------------------------------------------------------------------


def mtp_divergence(decoder, batch=ROWS):
    return LanguageLoss(LanguageLossConfig(mtp_weight=0.5))(decoder, batch, jnp.float32(1)).sums["mtp_kl"]


@pytest.mark.parametrize("modules", [1, 3])
def test_mtp_divergence_is_the_weighted_kl_to_the_main_head_k_later(modules):
    students = [jnp.asarray(RNG.standard_normal((B, S, W)), jnp.float32) for _ in range(modules)]
    out = LanguageLoss(LanguageLossConfig(mtp_weight=0.5))(TableDecoder(STATES, *students), ROWS, jnp.float32(3))
    p, expected, terms = log_softmax(STATES), 0.0, 0
    for k, q in enumerate(map(log_softmax, students), start=1):
        for b in range(B):
            for t in range(S - k - 1):
                if SEGMENTS[b, t] == SEGMENTS[b, t + k + 1]:
                    divergence = (np.exp(p[b, t + k]) * (p[b, t + k] - q[b, t])).sum()
                    expected += WEIGHTS[b, t + k + 1] * divergence / modules
                    terms += WEIGHTS[b, t + k + 1] > 0
    assert terms > 3 * modules
    assert float(out.sums["mtp_kl"]) == pytest.approx(expected, rel=1e-5)
    assert float(out.loss) == pytest.approx((float(out.sums["nll"]) + 0.5 * expected) / 3, rel=1e-5)


def test_the_mtp_target_can_be_the_token():
    student = jnp.asarray(RNG.standard_normal((B, S, W)), jnp.float32)
    config = LanguageLossConfig(mtp_weight=0.5, mtp_target="cross_entropy")
    out = LanguageLoss(config)(TableDecoder(STATES, student), ROWS, jnp.float32(3))
    q, expected = log_softmax(student), 0.0
    for b in range(B):
        for t in range(S - 2):
            if SEGMENTS[b, t] == SEGMENTS[b, t + 2]:
                expected -= WEIGHTS[b, t + 2] * q[b, t, ROWS["tokens"][b, t + 2]]
    assert float(out.sums["mtp_nll"]) == pytest.approx(expected, rel=1e-5) and "mtp_kl" not in out.sums
    assert float(out.loss) == pytest.approx((float(out.sums["nll"]) + 0.5 * expected) / 3, rel=1e-5)


def test_an_mtp_weight_without_mtp_modules_is_refused():
    with pytest.raises(UserError, match="mtp_weight=0.5 needs MTP modules, but n_mtp_modules=0"):
        mtp_divergence(TableDecoder(STATES))


def test_a_balance_weight_without_experts_is_refused():
    loss, definition = LanguageLoss(LanguageLossConfig(balance_weight=0.1)), ModelDef(small(**LLAMA))
    with pytest.raises(UserError, match=r"balance_weight=0\.1 needs experts, but n_experts=0"):
        jax.eval_shape(lambda *weights: loss(definition.bind(*weights), ROWS, jnp.float32(1)), *definition.shapes())


def test_mtp_divergence_is_zero_for_a_student_that_equals_its_teacher():
    student = jnp.roll(STATES, -1, axis=1)
    actual, gradient = jax.value_and_grad(lambda s: mtp_divergence(TableDecoder(STATES, s)))(student)
    assert abs(float(actual)) < 1e-6
    assert np.abs(gradient).max() < 1e-6


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "head_chunk": 7}], ids=["head", "tied, in chunks"])
def test_mtp_gradient_stops_at_the_trunk_and_the_head(changes):
    config = small(n_layers=2, n_mtp_modules=2, **changes)
    params, bias = random_weights(config)
    batch = rows([[range(1, 10), range(20, 30)]], 20)
    batch["weights"] = (batch["positions"] > 0).astype(np.float32)
    divergence = lambda params: mtp_divergence(ModelDef(config).bind(params, bias), batch)  # noqa: E731

    value, gradient = jax.jit(jax.value_and_grad(divergence))(params)
    assert value > 0
    for name in gradient.keys() - {"mtp"}:
        assert jax.tree.all(jax.tree.map(lambda g: not np.any(g), gradient[name])), name
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient["mtp"]))


# -- chunks of positions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [LanguageLoss(LanguageLossConfig(mtp_weight=0.3)), PolicyLoss(PolicyLossConfig(ratio_low=0.2, ratio_high=0.28))],
    ids=type,
)
def test_chunks_of_positions_change_nothing(loss):
    """40 positions: chunks that divide them and chunks that do not."""
    config = small(n_layers=2)
    params, bias = random_weights(config)
    batch = rows([[range(1, 10), range(20, 30)], [range(5, 20)]], 20)
    sampled = (batch["positions"] > 0).astype(np.float32)
    batch |= {"weights": sampled, "advantages": sampled * RNG.standard_normal(sampled.shape).astype(np.float32)}
    batch["sampler_logprobs"] = -4.2 * sampled

    def objective(params, head_chunk):
        decoder = ModelDef(dataclasses.replace(config, head_chunk=head_chunk)).bind(params, bias)
        out = loss(decoder, batch, jnp.float32(7))
        return out.loss, (out.sums, out.maxima)

    run = jax.jit(jax.value_and_grad(objective, has_aux=True), static_argnums=1)
    expected, expected_gradient = run(params, None)
    for chunk in (4, 39):
        actual, gradient = run(params, chunk)
        for f, w in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(f, w, rtol=1e-5)
        for f, w in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
            assert relative_error(f, w) < 1e-5


# -- policy gradient ----------------------------------------------------------------------------------------------

ADVANTAGES = np.where(WEIGHTS > 0, np.where(SEGMENTS == 1, 0.75, -0.5), 0).astype(np.float32)
SAMPLED = (WEIGHTS > 0) & (RNG.random((B, S)) < 0.8)
OFF_POLICY = np.where(SAMPLED, chosen_logprobs(STATES) + 0.3 * RNG.standard_normal((B, S)), 0).astype(np.float32)
POLICY_ROWS = ROWS | {
    "weights": SAMPLED.astype(np.float32),
    "advantages": np.where(SAMPLED, ADVANTAGES, 0).astype(np.float32),
    "sampler_logprobs": OFF_POLICY,
}
WIDE = PolicyLoss(PolicyLossConfig(ratio_low=1.0, ratio_high=1e9, dual_clip=np.inf))
Z = 4.0


def surrogate(states) -> float:
    """-1/Z sum r_t A_t: what importance-weighted REINFORCE estimates, whose gradient is the policy gradient."""
    ratio = np.exp(chosen_logprobs(states) - OFF_POLICY)
    return -(SAMPLED * ratio * ADVANTAGES).sum() / Z


def policy_gradient(loss: PolicyLoss, batch=POLICY_ROWS) -> np.ndarray:
    return np.asarray(jax.grad(lambda s: loss(TableDecoder(s), batch, jnp.float32(Z)).loss)(STATES))


def test_policy_gradient_is_that_of_importance_weighted_reinforce():
    def objective(states):
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(states[:, :-1]), TOKENS[:, 1:, None], axis=-1)[..., 0]
        ratio = jnp.exp(jnp.pad(logprobs, ((0, 0), (1, 0))) - OFF_POLICY)
        return -(SAMPLED * ratio * ADVANTAGES).sum() / Z

    expected = jax.grad(objective)(STATES)
    assert float(objective(STATES)) == pytest.approx(surrogate(STATES), rel=1e-5)
    assert np.abs(expected).max() > 0.01
    assert relative_error(policy_gradient(WIDE), expected) < 1e-5


def test_policy_gradient_agrees_with_finite_differences():
    actual, states, h = policy_gradient(WIDE), np.asarray(STATES, np.float64), 1e-5
    for index in [(0, 0, 1), (0, 2, 3), (0, 4, 0), (1, 1, 4), (1, 3, 2), (1, 6, 0)]:
        step = np.zeros_like(states)
        step[index] = h
        expected = (surrogate(states + step) - surrogate(states - step)) / (2 * h)
        assert actual[index] == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_equal_rewards_give_exactly_zero_gradient():
    batch = POLICY_ROWS | {"advantages": np.zeros((B, S), np.float32)}
    np.testing.assert_array_equal(policy_gradient(WIDE, batch), 0)


def test_only_sampled_tokens_have_a_gradient():
    """The gradient at an output is zero where the token it predicts was not sampled, even with an advantage there."""
    gradient = policy_gradient(WIDE, POLICY_ROWS | {"advantages": np.ones((B, S), np.float32)})
    np.testing.assert_array_equal(np.abs(gradient[:, :-1]).max(-1) > 0, SAMPLED[:, 1:])
    np.testing.assert_array_equal(gradient[:, -1], 0)


LOW, HIGH = 0.2, 0.28
"""Log-ratios of -0.223 and 0.247."""
LOG_RATIOS = (-0.3, -0.24, -0.21, 0.0, 0.24, 0.26, 0.5, 1.05, 1.15)
"""The bound of dual clip, 3, has a log-ratio of 1.099."""


def expected_weight(region: str, ratio: float, advantage: float) -> float:
    """From the papers' objectives, as functions of the ratio: d/dr of what is maximised, over the advantage."""
    low, high = 1 - LOW, 1 + HIGH
    if region == "clip":  # min(r A, clip(r) A), and of a negative A at least 3 A
        objective = min(ratio * advantage, min(max(ratio, low), high) * advantage)
        objective = objective if advantage > 0 else max(objective, 3 * advantage)
        return 0.0 if objective != ratio * advantage else ratio
    if region == "mask":
        return ratio if low < ratio < high else 0.0
    return min(max(ratio, low), high)


@pytest.mark.parametrize("region", TRUST_REGIONS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("log_ratio", LOG_RATIOS)
def test_a_token_counts_as_its_trust_region_says(region, sign, log_ratio):
    loss = PolicyLoss(PolicyLossConfig(trust_region=region, ratio_low=LOW, ratio_high=HIGH))
    near = np.where(SAMPLED, chosen_logprobs(STATES), 0).astype(np.float32)
    b, t = np.argwhere(SAMPLED)[1]
    near[b, t] -= log_ratio
    advantages = sign * np.abs(POLICY_ROWS["advantages"])
    batch = POLICY_ROWS | {"sampler_logprobs": near, "advantages": advantages}
    weight = expected_weight(region, float(np.exp(log_ratio)), float(advantages[b, t]))
    onehot = np.eye(W)[TOKENS[b, t]]
    expected = -weight * advantages[b, t] / Z * (onehot - np.exp(log_softmax(STATES))[b, t - 1])
    np.testing.assert_allclose(policy_gradient(loss, batch)[b, t - 1], expected, rtol=1e-4, atol=1e-8)
    sums = loss(TableDecoder(STATES), batch, jnp.float32(Z)).sums
    assert float(sums["out_of_region"]) == (weight != pytest.approx(np.exp(log_ratio), rel=1e-5))
    assert float(sums["dual_clipped"]) == (region != "clamp" and sign < 0 and np.exp(log_ratio) > 3)


def test_a_ratio_that_overflows_leaves_the_gradient_finite():
    """A sampler that is far off gives an infinite ratio; where it counts at all, it is bounded."""
    far = POLICY_ROWS | {"sampler_logprobs": np.where(SAMPLED, -200.0, 0).astype(np.float32)}
    for region in TRUST_REGIONS:
        assert np.isfinite(policy_gradient(PolicyLoss(PolicyLossConfig(trust_region=region)), far)).all()


def test_metrics_of_the_policy_loss():
    out = WIDE(TableDecoder(STATES), POLICY_ROWS, jnp.float32(Z))
    log_ratio = np.where(SAMPLED, chosen_logprobs(STATES) - OFF_POLICY, 0)
    entropy = -(np.exp(log_softmax(STATES)) * log_softmax(STATES)).sum(-1)
    assert float(out.sums["tokens"]) == SAMPLED.sum()
    assert float(out.sums["sampler_kl"]) == pytest.approx(-log_ratio.sum(), rel=1e-4)
    assert float(out.maxima["log_ratio"]) == pytest.approx(np.abs(log_ratio).max(), rel=1e-4)
    assert float(out.sums["entropy"]) == pytest.approx((entropy[:, :-1] * SAMPLED[:, 1:]).sum(), rel=1e-4)


# -- the KL to a reference ----------------------------------------------------------------------------------------

REFERENCE = np.where(SAMPLED, chosen_logprobs(STATES) + 0.5 * RNG.standard_normal((B, S)), 0).astype(np.float32)
KL_ROWS = POLICY_ROWS | {"kl_weights": np.where(SAMPLED, 0.3, 0).astype(np.float32), "reference_logprobs": REFERENCE}


@pytest.mark.parametrize(
    "z", [LossTermNormalisers(Z, 1.0, Z), LossTermNormalisers(Z, 1.0, 10.0)], ids=["one Z", "own Z"]
)
def test_the_kl_is_a_part_of_the_advantage(z):
    """The gradient is that of advantages A - beta Z_pg / Z_kl (log p - log p_ref), computed by hand."""
    k1 = chosen_logprobs(STATES) - REFERENCE
    by_hand = np.where(SAMPLED, ADVANTAGES - 0.3 * Z / z.kl * k1, 0).astype(np.float32)
    actual = jax.grad(lambda s: WIDE(TableDecoder(s), KL_ROWS, z).loss)(STATES)
    assert relative_error(actual, policy_gradient(WIDE, POLICY_ROWS | {"advantages": by_hand})) < 1e-5
    assert relative_error(actual, policy_gradient(WIDE)) > 0.03


def test_the_kl_of_tokens_without_an_advantage_is_charged():
    only = KL_ROWS | {"weights": np.zeros((B, S), np.float32)}
    gradient = np.asarray(jax.grad(lambda s: WIDE(TableDecoder(s), only, jnp.float32(Z)).loss)(STATES))
    np.testing.assert_array_equal(np.abs(gradient[:, :-1]).max(-1) > 0, SAMPLED[:, 1:])


def test_metrics_of_the_kl_are_its_two_estimators():
    sums = WIDE(TableDecoder(STATES), KL_ROWS, jnp.float32(Z)).sums
    k1 = np.where(SAMPLED, chosen_logprobs(STATES) - REFERENCE, 0)
    assert float(sums["reference_k1"]) == pytest.approx(k1.sum(), rel=1e-4)
    assert float(sums["reference_k3"]) == pytest.approx((np.exp(-k1) - 1 + k1).sum(), rel=1e-4)
    assert not WIDE(TableDecoder(STATES), POLICY_ROWS, jnp.float32(Z)).sums.keys() & {"reference_k1", "reference_k3"}


def test_weights_without_a_reference_charge_nothing():
    batch = {name: values for name, values in KL_ROWS.items() if name != "reference_logprobs"}
    np.testing.assert_array_equal(policy_gradient(WIDE, batch), policy_gradient(WIDE))


# -- the cross-entropy stream -------------------------------------------------------------------------------------

CE_ROWS = POLICY_ROWS | {"ce_weights": np.where(SAMPLED, RNG.random((B, S)), 0).astype(np.float32)}


def test_each_stream_is_divided_by_its_own_normaliser():
    """Their gradients are those of the two losses that have one stream only."""
    no_advantage = {"advantages": np.zeros((B, S), np.float32)}
    language = ROWS | {"weights": CE_ROWS["ce_weights"]}
    cross_entropy = jax.grad(lambda s: LanguageLoss()(TableDecoder(s), language, jnp.float32(1)).loss)(STATES)
    z = LossTermNormalisers(2.0, 5.0, 7.0)

    def gradient(batch):
        return np.asarray(jax.grad(lambda s: WIDE(TableDecoder(s), batch, z).loss)(STATES))

    assert relative_error(gradient(CE_ROWS | no_advantage), cross_entropy / 5) < 1e-5
    assert relative_error(gradient(POLICY_ROWS), policy_gradient(WIDE) * Z / 2) < 1e-5
    assert relative_error(gradient(CE_ROWS), policy_gradient(WIDE) * Z / 2 + cross_entropy / 5) < 1e-5


def test_one_normaliser_divides_all_streams():
    same = WIDE(TableDecoder(STATES), CE_ROWS, LossTermNormalisers(Z, Z, Z)).loss
    assert float(WIDE(TableDecoder(STATES), CE_ROWS, jnp.float32(Z)).loss) == float(same)


def test_metrics_of_the_cross_entropy():
    sums = WIDE(TableDecoder(STATES), CE_ROWS, jnp.float32(Z)).sums
    expected = -(CE_ROWS["ce_weights"] * chosen_logprobs(STATES)).sum()
    assert float(sums["cross_entropy"]) == pytest.approx(expected, rel=1e-5)
    assert float(sums["ce_weight"]) == pytest.approx(CE_ROWS["ce_weights"].sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (LanguageLossConfig, {"mtp_weight": -0.1}, "loss.mtp_weight=-0.1 is negative"),
        (LanguageLossConfig, {"mtp_target": "kl"}, "loss.mtp_target='kl' is unknown; use 'distillation' or"),
        (LanguageLossConfig, {"trained": "head"}, "loss.trained='head' is unknown; use 'all' or 'mtp'"),
        (LanguageLossConfig, {"trained": "mtp"}, "loss.trained='mtp' needs mtp_weight above 0, but mtp_weight=0.0"),
        (LanguageLossConfig, {"balance_weight": -1.0}, "loss.balance_weight=-1.0 is negative"),
        (LanguageLossConfig, {"name": "speech"}, "loss.name='speech' is unknown; use one of language, "),
        (PolicyLossConfig, {"trust_region": "ppo"}, "loss.trust_region='ppo'"),
        (PolicyLossConfig, {"ratio_low": 0.0}, "loss.ratio_low=0.0 trusts no token"),
        (PolicyLossConfig, {"dual_clip": 1.2}, "dual_clip=1.2 lies inside .* ends at 1 [+] loss.ratio_high=1.28; use"),
        (PolicyLossConfig, {"ratio_high": 4.0}, "dual_clip=3.0 lies inside .* ends at 1 [+] loss.ratio_high=5.0; use"),
        (PolicyLossConfig, {"name": "ppo"}, "loss.name='ppo' is unknown"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_by_its_name(config, fields, message):
    with pytest.raises(UserError, match=message):
        config(**fields)


def test_a_config_names_its_loss():
    assert make_loss(LanguageLossConfig(mtp_weight=0.2)) == LanguageLoss(LanguageLossConfig(mtp_weight=0.2))
    assert make_loss(PolicyLossConfig(ratio_high=0.5)) == PolicyLoss(PolicyLossConfig(ratio_high=0.5))
    config = PolicyLossConfig(name=f"{__name__}:users_loss", ratio_low=0.7)
    assert make_loss(config) == ("a loss", 0.7)


def users_loss(config):
    return "a loss", config.ratio_low
