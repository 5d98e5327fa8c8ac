"""The expert layer as a whole: against a loop over tokens, and what it counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from composer_jax.models import moe
from composer_jax.models.moe import MixtureOfExperts
from composer_jax.models.router_replay import RouterReplay
from composer_jax.ops.group_rounds import rounds
from composer_jax.ops.grouped_matmul import blocked
from composer_jax.parallel.dispatch import Dispatch, compute
from tests.models import reference
from tests.models.small import relative_error, small

BIAS = 0.3 * np.random.default_rng(1).standard_normal(8)


@nnx.jit
def apply(layer, x_BSD, mask_BS):
    return layer(x_BSD, mask_BS)


def layer_and_weights(config):
    layer = MixtureOfExperts(config, rngs=nnx.Rngs(params=0))
    layer.router.bias.set_value(jnp.asarray(BIAS, jnp.float32))
    return layer, reference.to_numpy(nnx.to_pure_dict(nnx.state(layer, nnx.Param)))


@pytest.mark.parametrize("changes", [{}, {"n_shared_experts": 0, "dispatch": "ring"}], ids=str)
def test_output_is_that_of_a_loop_over_tokens(changes):
    config = small(**changes)
    layer, weights = layer_and_weights(config)
    x = np.random.default_rng(0).standard_normal((2, 9, config.d_model))
    actual, _ = apply(layer, jnp.asarray(x, jnp.float32), jnp.ones((2, 9), bool))
    expected = reference.moe(weights, BIAS, x.reshape(18, -1), config).reshape(x.shape)
    assert relative_error(actual, expected) < 1e-5


def test_counts_leave_padding_out_and_add_up():
    config = small()
    layer, weights = layer_and_weights(config)
    x = np.random.default_rng(0).standard_normal((2, 9, config.d_model))
    real = np.arange(9) < np.array([[6], [9]])
    _, load = apply(layer, jnp.asarray(x, jnp.float32), jnp.asarray(real))
    expected = np.zeros(8)
    for token in x[real]:
        scores = 1 / (1 + np.exp(-(token @ weights["router"]["weight"])))
        expected[reference.chosen_experts(scores, BIAS, config)] += 1
    np.testing.assert_array_equal(load.counts_E, expected)
    assert load.counts_E.sum() == real.sum() * config.experts_per_token


def test_padding_of_tokens_and_of_chunks_is_sent_to_no_expert(monkeypatch):
    def drop_all(x_TD, ids_Tk, *_, **__):
        return x_TD, (ids_Tk >= 0).sum(dtype=jnp.float32)

    monkeypatch.setattr(moe, "find_dispatch", lambda _: Dispatch(drop_all, may_drop=True))
    config = small(expert_chunk=7)
    layer, _ = layer_and_weights(config)
    real = np.arange(9) < np.array([[6], [9]])
    _, load = nnx.jit(lambda *inputs: layer(*inputs))(jnp.ones((2, 9, config.d_model)), jnp.asarray(real))
    assert load.dropped == real.sum() * config.experts_per_token


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_gpus_only_round_holds_all_rows_whatever_routes_padding_and_tokens_replay(chunk, monkeypatch):
    """Where the choices of a token differ, an expert has no more rows than there are tokens."""
    config = small(dispatch="ring", expert_chunk=chunk)
    layer, _ = layer_and_weights(config)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 9, config.d_model)), jnp.float32)
    real = np.arange(9) < np.array([[3], [9]])
    replay = RouterReplay(jnp.where(real[..., None], jnp.array([1, 1, -1]), 0), 0.0)  # what nobody recorded is zeros

    def output(form):
        monkeypatch.setattr(compute, "grouped_matmul", form)
        return nnx.jit(lambda layer, x: layer(x, jnp.asarray(real), replay)[0])(layer, x)

    expected = output(lambda *operands, **_: blocked(*operands))
    assert relative_error(output(rounds), expected) < 1e-5


def test_gradients_reach_the_chosen_experts_only():
    config = small()
    layer, weights = layer_and_weights(config)
    x = np.random.default_rng(0).standard_normal((1, 1, config.d_model))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def loss(params):
        return (nnx.merge(graph, params, rest)(jnp.asarray(x, jnp.float32), jnp.ones((1, 1), bool))[0] ** 2).sum()

    gradient = nnx.to_pure_dict(jax.jit(jax.grad(loss))(params))
    scores = 1 / (1 + np.exp(-(x[0, 0] @ weights["router"]["weight"])))
    chosen = reference.chosen_experts(scores, BIAS, config)
    for name in ("gate", "up", "down"):
        touched = np.flatnonzero(np.abs(np.asarray(gradient[name])).max((1, 2)))
        assert sorted(touched) == sorted(chosen)


def test_the_sequence_balance_and_the_entropy_are_those_of_their_equations():
    config = small()
    layer, weights = layer_and_weights(config)
    x = np.random.default_rng(0).standard_normal((2, 9, config.d_model))
    real = np.arange(9) < np.array([[6], [9]])
    _, load = apply(layer, jnp.asarray(x, jnp.float32), jnp.asarray(real))
    expected = entropy = 0.0
    for row, mask in zip(x, real, strict=True):
        chosen, shares = np.zeros(8), np.zeros(8)
        for token in row[mask]:
            scores = 1 / (1 + np.exp(-(token @ weights["router"]["weight"])))
            chosen[reference.chosen_experts(scores, BIAS, config)] += 1
            share = scores / scores.sum()
            shares += share
            entropy -= (share * np.log(share)).sum()
        t = mask.sum()
        expected += t * (chosen * 8 / (config.experts_per_token * t) * shares / t).sum()
    assert float(load.sequence_balance) == pytest.approx(expected, rel=1e-5)
    assert 15 < expected < 30  # near one per token
    assert float(load.entropy / load.counts_E.sum()) == pytest.approx(entropy / real.sum(), rel=1e-5)
    assert 0.5 * np.log(8) < entropy / real.sum() < np.log(8)
