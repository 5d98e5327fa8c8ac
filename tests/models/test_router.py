"""The router: who is chosen, with which gates, and how the bias that balances the experts moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from composer_jax.models.model_def import ModelDef
from composer_jax.models.router import Router, Routing, expert_counts, select_experts, updated_bias
from tests.models import reference
from tests.models.small import random_weights, rows, small

RNG = np.random.default_rng(0)
X_TD = RNG.standard_normal((50, 32)).astype(np.float32)
BIAS = (0.3 * RNG.standard_normal(8)).astype(np.float32)


def route(config, bias) -> tuple[Routing, np.ndarray]:
    """What a router with this bias decides for X_TD, and its scores [T,E]."""
    router = Router(config, rngs=nnx.Rngs(params=0))
    router.bias.set_value(jnp.asarray(bias))
    scores = 1 / (1 + np.exp(-X_TD.astype(np.float64) @ np.asarray(router.weight.get_value(), np.float64)))
    return router(jnp.asarray(X_TD)), scores


@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (4, 2), (4, 4), (8, 3)], ids=str)
def test_the_chosen_experts_are_those_of_a_brute_force_search(groups):
    config = small(n_expert_groups=groups[0], topk_groups=groups[1])
    routing, scores = route(config, BIAS)
    actual = np.asarray(routing.ids_Tk)
    for token, ids in enumerate(actual):
        assert sorted(ids) == sorted(reference.chosen_experts(scores[token], BIAS, config))
    assert len({tuple(sorted(ids)) for ids in actual.tolist()}) > 1


def test_the_group_limit_and_the_bias_do_limit_what_is_chosen():
    free, _ = route(small(), np.zeros(8, np.float32))
    grouped, _ = route(small(n_expert_groups=4, topk_groups=2), np.zeros(8, np.float32))
    biased, _ = route(small(), BIAS)
    for other in (grouped, biased):
        assert (np.sort(other.ids_Tk, axis=1) != np.sort(free.ids_Tk, axis=1)).any()
    assert (np.asarray([len(set(ids // 2)) for ids in np.asarray(grouped.ids_Tk)]) <= 2).all()


def test_gates_are_made_from_unbiased_scores_and_sum_to_the_scaling_factor():
    config = small()
    routing, scores = route(config, BIAS)
    chosen = np.take_along_axis(scores, np.asarray(routing.ids_Tk), axis=1)
    expected = chosen / chosen.sum(1, keepdims=True) * config.routed_scaling_factor
    np.testing.assert_allclose(routing.gates_Tk, expected, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(routing.gates_Tk).sum(1), 1.7, rtol=1e-6)


def test_a_bias_that_chooses_the_same_experts_changes_nothing():
    plain, scores = route(small(), np.zeros(8, np.float32))
    # Raising every expert alike never changes the order.
    lifted, _ = route(small(), np.full(8, 0.5, np.float32))
    np.testing.assert_array_equal(lifted.ids_Tk, plain.ids_Tk)
    np.testing.assert_array_equal(lifted.gates_Tk, plain.gates_Tk)


def test_the_bias_gets_no_gradient_and_the_router_weight_does():
    config = small(n_mtp_modules=0, n_layers=2)
    params, bias = random_weights(config)
    batch = rows([[range(1, 12)]], 12)

    def loss(params, bias):
        decoder = ModelDef(config).bind(params, bias)
        return (decoder(batch["tokens"], batch["positions"], batch["segments"]).last_BSD[..., 0] ** 2).sum()

    by_params, by_bias = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, bias)
    for leaf in jax.tree.leaves(by_bias):
        np.testing.assert_array_equal(leaf, 0)
    assert np.abs(by_params["moe_layers"]["feed_forward"]["router"]["weight"]).max() > 1e-3


def test_select_experts_passes_no_gradient_through_the_choice():
    config = small(n_expert_groups=4, topk_groups=2)

    def chosen_scores(choice):
        return jnp.take_along_axis(choice, select_experts(choice, config), axis=1).sum()

    choice = jnp.asarray(RNG.standard_normal((5, 8)), jnp.float32)
    gradient = np.asarray(jax.grad(chosen_scores)(choice))
    assert set(np.unique(gradient)) == {0.0, 1.0}
    assert (gradient.sum(1) == 3).all()


def test_counts_are_of_real_tokens_only():
    ids = np.array([[0, 1], [1, 2], [3, 0], [1, 3]])
    actual = expert_counts(jnp.asarray(ids), jnp.asarray([True, True, False, True]), 5)
    np.testing.assert_array_equal(actual, [1, 3, 1, 1, 0])
    assert actual.dtype == jnp.float32


def test_the_bias_rises_where_load_is_low_and_keeps_its_mean():
    counts = np.array([[10, 0, 4, 2], [3, 3, 3, 3], [9, 1, 1, 1]], np.float32)
    bias = RNG.standard_normal((3, 4)).astype(np.float32)
    moved = np.asarray(updated_bias(jnp.asarray(bias), jnp.asarray(counts), 0.01)) - bias
    # Signs of mean load - load: (-, +, 0, +), balanced, (-, +, +, +); then each row is centred.
    np.testing.assert_allclose(moved[0], 0.01 * (np.array([-1, 1, 0, 1]) - 0.25), atol=1e-7)
    np.testing.assert_array_equal(moved[1], 0)
    np.testing.assert_allclose(moved[2], 0.01 * (np.array([-1, 1, 1, 1]) - 0.5), atol=1e-7)
    np.testing.assert_allclose(moved.sum(1), 0, atol=1e-7)


def test_the_bias_rule_balances_a_lopsided_router():
    scores = 1 / (1 + np.exp(-(RNG.standard_normal((400, 8)) + np.linspace(-1, 1, 8))))
    config = small(experts_per_token=2)

    def load(bias):
        chosen = select_experts(jnp.asarray(scores, jnp.float32) + bias, config)
        return expert_counts(chosen, jnp.ones(len(scores), bool), 8)

    bias = jnp.zeros(8)
    before = load(bias)
    for _ in range(100):
        bias = updated_bias(bias, load(bias), 0.01)
    assert before.max() / before.mean() > 1.8
    assert load(bias).max() / load(bias).mean() < 1.15


def test_a_layer_that_saw_no_token_keeps_its_bias():
    bias = jnp.asarray(BIAS)
    np.testing.assert_array_equal(updated_bias(bias, jnp.zeros(8), 0.1), bias)
