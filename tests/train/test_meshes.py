"""One step on every mesh is the step of one device: loss, gradients, weights, router bias."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from composer_jax.models.rope import Llama3Rope
from composer_jax.train.losses import LanguageLoss, LanguageLossConfig, LossTermNormalisers, PolicyLoss
from tests.models.small import GROUPED_QUERY, LLAMA, WITHOUT_EXPERTS, random_weights, relative_error, small
from tests.train.small_step import CONFIG, full_gradient, make_batch

BATCH = make_batch(1)
NORMALISER = float(BATCH["weights"].sum())
EARLY_GATHER = dataclasses.replace(CONFIG, early_expert_gather=True)
MESHES = {
    "context2_expert2_tensor2": ({"expert": 2, "context": 2, "tensor": 2}, {"dispatch": "ring"}),
    "data4_context2_dense": ({"data": 4, "context": 2}, {"dispatch": "dense"}),
    "replica2_expert2_context2_host": (
        {"replica": 2, "expert": 2, "context": 2},
        {"dispatch": "ring", "reduction": "host"},
    ),
}
SLOW_MESHES = {
    "replica2_data2_expert2": ({"replica": 2, "data": 2, "expert": 2}, {"dispatch": "ring"}),
    "data2_expert2_context2": ({"data": 2, "expert": 2, "context": 2}, {"dispatch": "ring", "config": EARLY_GATHER}),
    **{f"{axis}8": ({axis: 8}, {"dispatch": "ring"}) for axis in ("data", "expert", "context")},
}
CASES = [pytest.param(*case, id=name) for name, case in MESHES.items()]
CASES += [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW_MESHES.items()]


def step_and_gradient(learner, weights):
    state = learner.init_state(*weights)
    gradient = full_gradient(learner, (state.params, state.router_bias), BATCH, NORMALISER)
    state, metrics = learner.step(state, [BATCH], NORMALISER)
    return gradient, jax.tree.map(np.asarray, state), metrics


@pytest.fixture(scope="module")
def expected(learner, weights):
    return step_and_gradient(learner, weights)


@pytest.mark.parametrize(("sizes", "how"), CASES)
def test_a_step_is_that_of_one_device(new_learner, weights, expected, sizes, how):
    gradient, state, metrics = step_and_gradient(new_learner(sizes, **how), weights)
    assert_close(gradient, expected[0])
    assert_close(state.optimizer, expected[1].optimizer)
    assert_close(state.params, expected[1].params, STEP)
    # Counts are whole numbers: the bias moves by exactly the same steps.
    chex.assert_trees_all_equal(state.router_bias, expected[1].router_bias)
    assert metrics.keys() == expected[2].keys()
    for name, value in metrics.items():
        assert value == pytest.approx(expected[2][name], rel=1e-5), name


@pytest.mark.slow  # those of LLAMA below have grouped queries, too
def test_a_step_with_grouped_queries_windows_and_biases_is_that_of_one_device(new_learner):
    sizes = {"expert": 2, "context": 2, "tensor": 2}
    config = small(n_layers=2, **GROUPED_QUERY)
    weights = random_weights(config)
    expected = step_and_gradient(new_learner(config=config), weights)
    gradient, state, _ = step_and_gradient(new_learner(sizes, dispatch="ring", config=config), weights)
    assert_close(gradient, expected[0])
    assert_close(state.params, expected[1].params, STEP)


NO_EXPERTS = {
    "llama": small(**LLAMA, n_layers=2, tie_embeddings=True, llama3_rope=Llama3Rope(8.0, 1.0, 4.0, 8)),
    "qwen3": small(**LLAMA | {"qk_norm": True}, n_layers=2),
    "latent_attention_and_modules": small(**WITHOUT_EXPERTS, n_layers=2, embedding_taps=1),
}
"""The last one has MTP modules."""


@pytest.mark.parametrize(
    ("name", "sizes", "how"),
    [
        ("llama", {"data": 2, "context": 2, "tensor": 2}, {}),
        ("qwen3", {"replica": 2, "expert": 2, "tensor": 2}, {"reduction": "host"}),  # `expert` shards the rows only
        pytest.param(
            "latent_attention_and_modules",
            {"data": 2, "expert": 2, "tensor": 2},
            {"dispatch": "dense"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_step_without_experts_is_that_of_one_device(new_learner, name, sizes, how):
    config = NO_EXPERTS[name]
    loss = LanguageLoss(LanguageLossConfig(mtp_weight=0.3 if config.n_mtp_modules else 0.0))
    weights = random_weights(config)
    expected = step_and_gradient(new_learner(config=config, loss=loss), weights)
    gradient, state, metrics = step_and_gradient(new_learner(sizes, config=config, loss=loss, **how), weights)
    assert_close(gradient, expected[0])
    assert_close(state.params, expected[1].params, STEP)
    assert state.router_bias == {}
    assert metrics.keys() == expected[2].keys()
    assert not metrics.keys() & {"counts", "dropped", "load_imbalance", "router_entropy"}
    for metric, value in metrics.items():
        assert value == pytest.approx(expected[2][metric], rel=1e-5), metric


def test_a_step_with_a_dense_layer_between_experts_is_that_of_one_device(new_learner):
    config = small(n_dense_layers=0, dense_layers=(1,), n_mtp_modules=0, embedding_taps=0, n_shared_experts=0)
    loss, weights = LanguageLoss(LanguageLossConfig(balance_weight=0.1)), random_weights(config)
    expected = step_and_gradient(new_learner(config=config, loss=loss), weights)
    learner = new_learner({"data": 2, "expert": 2, "tensor": 2}, dispatch="ring", config=config, loss=loss)
    gradient, state, metrics = step_and_gradient(learner, weights)
    assert_close(gradient, expected[0])
    assert_close(state.params, expected[1].params, STEP)
    chex.assert_trees_all_equal(state.router_bias, expected[1].router_bias)
    for metric, value in metrics.items():
        assert value == pytest.approx(expected[2][metric], rel=1e-5), metric


WHOLE_BLOCKS = small(
    n_layers=2,
    d_model=64,
    n_heads=4,
    qk_nope_dim=16,
    qk_rope_dim=16,
    v_head_dim=16,
    dense_ff_dim=64,
    expert_ff_dim=32,
    n_mtp_modules=0,
    embedding_taps=0,
)
"""Its columns on two devices fill blocks of 32, and so do the tokens of BATCH on four."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "sizes", "dispatch"),
    [
        ("nvfp4", {"expert": 4, "tensor": 2}, "ring"),
        ("mxfp8", {"data": 4, "expert": 2}, "dense"),
    ],
    ids=str,
)
def test_a_gradient_of_rounded_operands_is_that_of_one_device(new_learner, precision, sizes, dispatch):
    config = dataclasses.replace(WHOLE_BLOCKS, precision=precision)
    loss, weights = LanguageLoss(LanguageLossConfig()), random_weights(config)

    def gradient(sizes):
        learner = new_learner(sizes, config=config, dispatch=dispatch, loss=loss)
        state = learner.init_state(*weights)
        return full_gradient(learner, (state.params, state.router_bias), BATCH, NORMALISER)

    expected = gradient({})
    assert all(leaf.any() for leaf in jax.tree.leaves(expected))
    # The rounding itself moves every gradient by 3 % and more.
    assert_close(gradient(sizes), expected, 1e-3)


def test_a_policy_step_with_all_streams_is_that_of_one_device(new_learner):
    config = small(**LLAMA, n_layers=2)
    weights, rng = random_weights(config), np.random.default_rng(0)
    sampled = BATCH["positions"] > 0

    def field(scale, shift=0.0):
        return np.where(sampled, shift + scale * rng.standard_normal(sampled.shape), 0).astype(np.float32)

    batch = BATCH | {"weights": sampled.astype(np.float32), "advantages": field(1.0), "ce_weights": field(0.0, 0.1)}
    batch |= {"kl_weights": field(0.0, 0.2)}
    batch |= {"sampler_logprobs": field(0.3, -4.2), "reference_logprobs": field(0.3, -4.2)}
    z = LossTermNormalisers(50.0, 20.0, 30.0)

    def gradient(mesh_sizes):
        learner = new_learner(mesh_sizes, config=config, loss=PolicyLoss())
        state = learner.init_state(*weights)
        part = learner.gradient(state.params, state.router_bias, batch, z)
        return jax.tree.map(np.asarray, part["gradient"]), part["sums"]

    (expected, expected_sums), (actual, sums) = gradient({}), gradient({"replica": 2, "context": 2, "tensor": 2})
    assert_close(actual, expected)
    for name, value in sums.items():
        assert float(value) == pytest.approx(float(expected_sums[name]), rel=1e-4), name


STEP = 1e-4
"""Of weights: AdamW makes a step of up to peak / eps = 50 times a small gradient, and so of its rounding."""


def assert_close(actual, expected, limit=1e-5):
    """Up to a share of the largest entry of every leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, f), w in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(f, w) < limit, jax.tree_util.keystr(path)
