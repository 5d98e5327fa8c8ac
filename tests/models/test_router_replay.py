"""Router replay: which experts are used, with which gates and gradients, and that routes belong to their tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from composer_jax.models.model_def import ModelDef
from composer_jax.models.route_dtypes import NO_ROUTE, no_route, replay_dtype
from composer_jax.models.router import Router
from composer_jax.models.router_replay import RouterReplay, replay_experts
from tests.models import reference
from tests.models.routes import chosen_routes
from tests.models.small import GROUPED_QUERY, random_weights, relative_error, rows, small

RNG = np.random.default_rng(3)
N_EXPERTS, K = 8, 3
X_TD = RNG.standard_normal((60, 32)).astype(np.float32)
BIAS = (0.3 * RNG.standard_normal(N_EXPERTS)).astype(np.float32)


def random_ids(tokens: int) -> np.ndarray:
    """Any experts, each at most once per token; some tokens have fewer than K, and some none."""
    ids = np.stack([RNG.permutation(N_EXPERTS)[:K] for _ in range(tokens)])
    ids[RNG.random(ids.shape) < 0.2] = -1
    ids[::7] = -1
    return ids


def by_loop(own, scores, ids, plausibility):
    """The experts of one token in the order of their places, and the replayed ones that were dropped."""
    least = plausibility * min(scores[own])
    kept = [i for i in ids if i >= 0 and scores[i] >= least]
    others = iter([i for i in own if i not in kept])
    return [i if i in kept else next(others) for i in ids], [i for i in ids if i >= 0 and i not in kept]


@pytest.mark.parametrize("plausibility", [0.0, 0.5, 0.9, 1.0])
def test_the_experts_are_those_of_a_loop_over_tokens(plausibility):
    scores = (RNG.random((300, N_EXPERTS)) ** 2).astype(np.float32)
    own = np.argsort(-scores - BIAS, axis=1)[:, :K].astype(np.int32)
    ids, mask = random_ids(300), RNG.random(300) < 0.8
    actual = jax.jit(lambda ids: replay_experts(own, scores, RouterReplay(ids, plausibility)))(ids.astype(np.int16))
    expected = [by_loop(own[t], scores[t], ids[t], plausibility) for t in range(300)]
    np.testing.assert_array_equal(actual.ids_Tk, [chosen for chosen, _ in expected])
    stats = actual.count(jnp.asarray(mask))
    assert stats.replayed == (ids >= 0)[mask].sum()
    assert stats.foreign == sum(i >= 0 and i not in own[t] for t in np.flatnonzero(mask) for i in ids[t])
    assert stats.filtered == sum(len(expected[t][1]) for t in np.flatnonzero(mask))
    assert all(len(set(chosen)) == K for chosen in np.asarray(actual.ids_Tk).tolist())
    assert (stats.filtered > 0) == (plausibility > 0)


def test_numbers_of_no_expert_leave_the_choice_to_the_router_whatever_their_dtype():
    scores = np.linspace(0, 1, N_EXPERTS, dtype=np.float32)[None]
    own = np.array([[7, 6, 5]], np.int32)
    for ids in (np.array([[NO_ROUTE, 2, NO_ROUTE]], np.int16), np.array([[255, 2, 255]], np.uint8)):
        assert ids[0, 0] == no_route(ids.dtype)
        actual = replay_experts(own, scores, RouterReplay(ids, 0.0))
        np.testing.assert_array_equal(actual.ids_Tk, [[7, 2, 6]])
        assert actual.count(jnp.ones(1, bool)) == (1, 1, 0)
    assert [replay_dtype(n) for n in (8, 255, 256, 384)] == [np.uint8, np.uint8, np.int16, np.int16]


def test_a_repeated_expert_leaves_its_place_to_the_routers_choice():
    """The choices of a token differ (parallel/dispatch/contract.py), whatever routes come with it."""
    scores = np.array([[0.1, 0.9, 0.2, 0.8, 0.7, 0.3, 0.4, 0.5]] * 4, np.float32)
    own = np.array([[1, 3, 4]] * 4, np.int32)
    ids = np.array([[0, 0, 0], [5, -1, 5], [3, 3, 1], [4, 1, 3]], np.int16)
    actual = replay_experts(own, scores, RouterReplay(ids, 0.0))
    np.testing.assert_array_equal(actual.ids_Tk, [[0, 1, 3], [5, 1, 3], [3, 4, 1], [4, 1, 3]])
    stats = actual.count(jnp.ones(4, bool))
    assert (stats.replayed, stats.filtered) == (11, 4)


@pytest.mark.parametrize("changes", [{}, {"router_scores": "softmax", "normalise_gates": False}], ids=str)
def test_gates_are_the_routers_own_scores_of_the_replayed_experts(changes):
    config = small(**changes)
    router, ids = Router(config, rngs=nnx.Rngs(params=0)), np.argsort(RNG.random((60, N_EXPERTS)))[:, :K]
    router.bias.set_value(jnp.asarray(BIAS))
    logits = X_TD.astype(np.float64) @ np.asarray(router.weight.get_value(), np.float64)
    scores = 1 / (1 + np.exp(-logits))
    if changes:
        scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    gates = np.take_along_axis(scores, ids, axis=1)
    if config.normalise_gates:
        gates = gates / gates.sum(1, keepdims=True)
    routing = router(jnp.asarray(X_TD), RouterReplay(jnp.asarray(ids), 0.0))
    np.testing.assert_array_equal(routing.ids_Tk, ids)
    np.testing.assert_allclose(routing.gates_Tk, gates * config.routed_scaling_factor, rtol=2e-5)


def test_the_gradient_flows_through_the_scores_of_the_replayed_experts():
    config = small()
    graph, params, rest = nnx.split(Router(config, rngs=nnx.Rngs(params=0)), nnx.Param, ...)
    ids, x_TD, mix = jnp.asarray([[0, 5, 2]]), jnp.asarray(X_TD[:1]), np.array([1.0, -2.0, 0.5])

    def mixed(params):
        routing = nnx.merge(graph, params, rest)(x_TD, RouterReplay(ids, 0.0))
        return (routing.gates_Tk[0] * mix).sum()

    weight_DE = np.asarray(nnx.to_pure_dict(params)["weight"], np.float64)
    s = 1 / (1 + np.exp(-(X_TD[0].astype(np.float64) @ weight_DE)))[np.array([0, 5, 2])]
    # g_i = c s_i / S, so d(sum_i m_i g_i) / d s_j = c (m_j - sum_i m_i s_i / S) / S, and d s / d logit = s (1 - s).
    by_logit = config.routed_scaling_factor * (mix - (mix * s).sum() / s.sum()) / s.sum() * s * (1 - s)
    expected = np.zeros_like(weight_DE)
    expected[:, [0, 5, 2]] = np.outer(X_TD[0], by_logit)
    np.testing.assert_allclose(nnx.to_pure_dict(jax.grad(mixed)(params))["weight"], expected, rtol=1e-4, atol=1e-6)


NETWORKS = {
    "dense_layer_between": small(n_layers=4, n_dense_layers=0, dense_layers=(1,), n_mtp_modules=0),
    "ring_chunks_remat": small(n_mtp_modules=0, dispatch="ring", expert_chunk=7, remat=True),
    "groups": small(n_mtp_modules=0, n_expert_groups=4, topk_groups=2),
    "grouped_queries": small(n_mtp_modules=0, **GROUPED_QUERY),
}
BATCH = rows([[range(1, 12), range(20, 29)], [range(30, 46)]], 24)


@pytest.fixture(scope="module", params=NETWORKS.values(), ids=NETWORKS.keys())
def network(request):
    """(states of the network [B,S,D] for routes and plausibility; its own routes, weights and config)."""
    config = request.param
    weights = random_weights(config)

    @jax.jit
    def states(routes, plausibility=0.5):
        replay = None if routes is None else RouterReplay(routes, plausibility)
        decoder = ModelDef(config).bind(*weights)
        return decoder(BATCH["tokens"], BATCH["positions"], BATCH["segments"], replay).last_BSD

    with pytest.MonkeyPatch.context() as monkeypatch:
        own = chosen_routes(monkeypatch, config, weights, BATCH)
    return states, own, weights, config


def test_replaying_the_networks_own_routes_changes_nothing(network):
    states, own, *_ = network
    np.testing.assert_array_equal(states(own), states(None))
    np.testing.assert_array_equal(states(np.full_like(own, -1)), states(None))


def test_routes_that_are_off_by_one_token_or_layer_change_the_states(network):
    states, own, *_ = network
    expected, real = np.asarray(states(None)), BATCH["segments"] > 0
    for wrong in (np.roll(own, 1, axis=1), np.roll(own, -1, axis=1), np.roll(own, 1, axis=2)):
        error = np.abs(np.asarray(states(wrong, 0.0)) - expected).max(-1)
        assert np.median(error[real]) > 1e-2


def test_one_tokens_routes_reach_that_token_and_later_ones_of_its_document(network):
    states, own, *_ = network
    changed = own.copy()
    changed[0, 4] = [[e for e in range(N_EXPERTS) if e not in ids][:K] for ids in own[0, 4]]
    moved = np.abs(np.asarray(states(changed, 0.0)) - np.asarray(states(own, 0.0))).max(-1) > 1e-6
    assert moved[0, 4]
    assert not moved[0, :4].any() and not moved[0, 11:].any() and not moved[1].any()


def test_the_states_are_those_of_a_loop_over_tokens(network, monkeypatch):
    states, own, (params, bias), config = network
    if config.router_scores == "softmax" or config.n_expert_groups > 1:
        pytest.skip("the reference has neither")
    tokens = BATCH["tokens"][1, :16]
    wrong = np.roll(own, 1, axis=1)
    queue = iter(wrong[1, :16].transpose(1, 0, 2).reshape(-1, K).tolist())
    monkeypatch.setattr(reference, "chosen_experts", lambda scores, bias, config: next(queue))
    expected = reference.logits(params, bias, tokens, config)
    assert next(queue, None) is None
    logits = ModelDef(config).bind(params, bias).logits(states(wrong, 0.0))
    assert relative_error(logits[1, :16], expected) < 1e-5


def test_a_network_without_experts_or_routes_of_another_shape_are_refused(network):
    states, own, *_ = network
    with pytest.raises(AssertionError, match="ids_BSLk"):
        states(own[..., :2])
    with pytest.raises(AssertionError, match="ids_BSLk"):
        states(own[:, :-1])


def test_statistics_count_the_experts_that_were_used():
    config = small(n_mtp_modules=0)
    weights = random_weights(config)
    routes = RNG.permuted(np.tile(np.arange(N_EXPERTS), (2, 24, 2, 1)), axis=-1)[..., :K]
    decoder = ModelDef(config).bind(*weights)
    stats = decoder(*(BATCH[n] for n in ("tokens", "positions", "segments")), RouterReplay(routes, 0.0)).router_stats
    real = BATCH["segments"] > 0
    expected = [np.bincount(routes[real][:, layer].reshape(-1), minlength=N_EXPERTS) for layer in range(2)]
    np.testing.assert_array_equal(stats.counts_E, expected)
    np.testing.assert_array_equal(stats.replay.replayed, [real.sum() * K] * 2)
    assert (np.asarray(stats.replay.filtered) == 0).all()
