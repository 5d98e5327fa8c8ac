"""QK-clip against attention logits computed by NumPy, and on every kind of mesh against one device."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.train.learner import Learner
from composer_jax.train.loop import restore_state, save_state
from composer_jax.train.losses import LanguageLoss, LanguageLossConfig, PolicyLoss, PolicyLossConfig
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from composer_jax.train.qk_clip import clip_heads
from tests.models.small import GROUPED_QUERY, LLAMA, WITHOUT_EXPERTS, random_weights, relative_error, small
from tests.train.small_step import make_batch

BATCH = make_batch(1)
NORMALISER = float(BATCH["weights"].sum())
HALVES = [{name: values[half] for name, values in BATCH.items()} for half in (slice(0, 8), slice(8, 16))]
TAU = 1.5
"""Some heads of the random weights below exceed it, and some do not."""
STILL = OptimizerConfig(peak=1e-30, weight_decay=0.0, qk_clip=TAU)
"""Steps too small to change a float32 weight: what changes is the clip's."""
MUON = OptimizerConfig(name="muon", peak=0.02, eps=1e-3, momentum=0.5, qk_clip=TAU)
NETWORKS = {
    "mla": small(**WITHOUT_EXPERTS, n_heads=4, n_layers=2, n_mtp_modules=1),
    "mla_query_rank": small(
        **WITHOUT_EXPERTS, n_heads=4, n_layers=2, q_lora_rank=8, n_mtp_modules=0, embedding_taps=0, heads_at_once=2
    ),
    "gqa": small(**GROUPED_QUERY, dispatch="ring", n_layers=2, n_mtp_modules=0, remat=True),
    "mha": small(**LLAMA | {"n_kv_heads": 4}, n_layers=2, qkv_bias=True),
}
LOSS = LanguageLossConfig(mtp_weight=0.3)


@functools.cache
def make_learner(config, optimizer=STILL, sizes=(), loss=None, reduction="collective") -> Learner:
    mesh = make_mesh(jax.devices()[: math.prod(size for _, size in sizes)], **dict(sizes))
    loss = loss or LanguageLoss(LOSS if config.n_mtp_modules else LanguageLossConfig())
    return Learner(ModelDef(config), make_optimizer(optimizer, steps=10), loss, mesh, reduction=reduction)


def steps(config, batches=(BATCH,), count=1, **changes):
    learner = make_learner(config, **changes)
    state = learner.init_state(*random_weights(config))
    for _ in range(count):
        state, metrics = learner.step(state, batches, NORMALISER)
    return jax.tree.map(np.asarray, state), metrics


@functools.cache
def one_step(network):
    return steps(NETWORKS[network])


def dense_logits(config, weights, x, layer: int) -> np.ndarray:
    """All q k^T of one layer's heads for inputs x [S,D] at positions 0, 1, ..., float64 [H,S,S], by NumPy."""
    w = jax.tree.map(lambda a: np.asarray(a[layer], np.float64), weights)
    x, p = np.asarray(x, np.float64), config.qk_rope_dim

    def norm(h, scale):
        return h / np.sqrt((h * h).mean(-1, keepdims=True) + config.latent_norm_eps) * scale

    def rotate(h):
        angle = np.arange(len(x))[:, None, None] / config.rope_theta ** (np.arange(0, p, 2) / p)
        one, two = (h[..., : p // 2], h[..., p // 2 :]) if config.rope_halves else (h[..., ::2], h[..., 1::2])
        turned = one * np.cos(angle) - two * np.sin(angle), two * np.cos(angle) + one * np.sin(angle)
        if config.rope_halves:
            return np.concatenate(turned, -1)
        return np.stack(turned, -1).reshape(h.shape)

    if config.kv_lora_rank is None:
        q, k = (np.einsum("sd,dhx->shx", x, w[name]) for name in "qk")
        if config.qkv_bias:
            q, k = q + w["q_bias"], k + w["k_bias"]
        q, k = (np.concatenate([rotate(h[..., :p]), h[..., p:]], -1) for h in (q, k))
        k = np.repeat(k, config.n_heads // config.n_kv_heads, axis=1)
    else:
        latent, k_rope = np.split(x @ w["kv_down"], [config.kv_lora_rank], -1)
        k_nope = np.einsum("sr,rhk->shk", norm(latent, w["kv_norm"]["scale"]), w["k_up"])
        k = np.concatenate([k_nope, np.repeat(rotate(k_rope[:, None]), config.n_heads, 1)], -1)
        queries = x if config.q_lora_rank is None else norm(x @ w["q_down"], w["q_norm"]["scale"])
        q_nope, q_rope = np.split(np.einsum("sd,dhx->shx", queries, w["q"]), [config.qk_nope_dim], -1)
        q = np.concatenate([q_nope, rotate(q_rope)], -1)
    return config.logit_scale * np.einsum("shx,thx->hst", q, k)


def measured(config, params, router_bias, batch):
    """Hidden.max_logits of a forward pass on one device."""
    run = jax.jit(
        lambda p, b: (
            ModelDef(config, measures_logits=True)
            .bind(p, b)(batch["tokens"], batch["positions"], batch["segments"])
            .max_logits
        )
    )
    return jax.tree.map(np.asarray, run(params, router_bias))


@pytest.mark.parametrize("network", ["mla", "mla_query_rank", "gqa", "mha"])
def test_max_logits_are_those_of_dense_attention(network):
    """Of the first layer, whose inputs are normalised embeddings. The batch has one document and padding."""
    config = dataclasses.replace(NETWORKS[network], embedding_taps=0)
    params, bias = random_weights(config)
    tokens = np.random.default_rng(2).integers(0, 64, (1, 12)).astype(np.int32)
    segments = (np.arange(12) < 9).astype(np.int32)[None]
    batch = {"tokens": tokens, "positions": np.arange(12, dtype=np.int32)[None] * segments, "segments": segments}
    first = "dense_layers" if params.get("dense_layers") else "moe_layers"
    layers = params[first]
    table = np.asarray(params["embedding"]["table"], np.float64)[tokens[0, :9]]
    x = table / np.sqrt((table**2).mean(-1, keepdims=True) + config.norm_eps)
    x = x * np.asarray(layers["attention_norm"]["scale"][0], np.float64)
    logits = dense_logits(config, layers["attention"], x, 0)
    distance = np.arange(9)[:, None] - np.arange(9)
    visible = (distance >= 0) & (distance < (config.sliding_window if config.has_window(0) else 9))
    expected = np.where(visible, logits, -np.inf).max((1, 2))
    np.testing.assert_allclose(measured(config, params, bias, batch)[first][0], expected, rtol=1e-5)


@pytest.mark.parametrize("network", ["mla", "mla_query_rank", "gqa", "mha"])
def test_the_clip_scales_the_logits_of_large_heads_to_tau_and_changes_no_bit_of_others(network):
    config = NETWORKS[network]
    params, bias = random_weights(config)
    name = "dense_layers" if params.get("dense_layers") else "moe_layers"
    layers = params[name]["attention"]
    x = np.random.default_rng(3).standard_normal((10, config.d_model))
    before = dense_logits(config, layers, x, 0)
    largest = before.max((1, 2))
    tau = float(np.median(largest))  # two of the four heads are beyond it
    max_LH = jnp.full((len(layers["q"]), 4), -1.0).at[0].set(jnp.asarray(largest, jnp.float32))
    clipped = clip_heads(params, {name: max_LH}, tau, config)
    after = dense_logits(config, clipped[name]["attention"], x, 0)
    gamma = np.minimum(1, tau / largest)
    assert (gamma < 1).sum() == 2
    np.testing.assert_allclose(after, gamma[:, None, None] * before, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after.max((1, 2)), np.minimum(largest, tau), rtol=1e-5)
    np.testing.assert_array_equal(after[gamma == 1], before[gamma == 1])
    # Other layers, whose logits are below zero, and all other weights are what they were.
    moved = {"q", "q_bias"} | ({"k_up"} if config.kv_lora_rank else set())
    moved |= {"k", "k_bias"} if config.n_kv_heads == config.n_heads else set()
    for leaf, weight in layers.items():
        new = clipped[name]["attention"][leaf]
        chex.assert_trees_all_equal(jax.tree.map(lambda a: a[1:], new), jax.tree.map(lambda a: a[1:], weight))
        if leaf not in moved:
            chex.assert_trees_all_equal(new, weight)
    chex.assert_trees_all_equal(clipped | {name: params[name]}, params)


@pytest.mark.parametrize("network", ["mla", "gqa", "mha"])
def test_the_same_batch_reaches_tau_after_the_step(network):
    """In the first layer, whose inputs do not depend on other layers' attention."""
    config = NETWORKS[network]
    params, bias = random_weights(config)
    state, metrics = one_step(network)
    before, after = (measured(config, *weights, BATCH) for weights in ((params, bias), (state.params, bias)))
    name = next(iter(before))
    assert (before[name][0] > TAU).any()
    np.testing.assert_allclose(after[name][0], np.minimum(before[name][0], TAU), rtol=1e-5)
    trunk = max(max_LH.max() for max_LH in before.values())
    if not config.n_mtp_modules:
        assert metrics["max_attention_logit"] == pytest.approx(trunk, rel=1e-6)
    for stack, max_LH in before.items():
        moved = np.asarray(state.params[stack]["attention"]["q"] != params[stack]["attention"]["q"]).any((1, 3))
        np.testing.assert_array_equal(moved, max_LH > TAU)
    if config.n_mtp_modules:
        assert metrics["max_attention_logit"] >= trunk * (1 - 1e-6)
        assert (state.params["mtp"]["block"]["attention"]["q"] != params["mtp"]["block"]["attention"]["q"]).any()


@functools.cache
def two_steps(network, sizes=(), reduction="collective"):
    return steps(NETWORKS[network], count=2, optimizer=MUON, sizes=sizes, reduction=reduction)


@pytest.mark.parametrize(
    ("network", "sizes", "reduction"),
    [
        pytest.param("mla", {"data": 2, "expert": 2, "tensor": 2}, "collective", marks=pytest.mark.slow),
        pytest.param("gqa", {"data": 2, "context": 2, "tensor": 2}, "collective", marks=pytest.mark.slow),
        ("mha", {"data": 2, "context": 2, "tensor": 2}, "collective"),
        ("mha", {"replica": 2}, "host"),
    ],
    ids=str,
)
def test_two_steps_are_those_of_one_device(network, sizes, reduction):
    (actual, metrics), (expected, plain) = two_steps(network, tuple(sizes.items()), reduction), two_steps(network)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(x, y) < 1e-5, jax.tree_util.keystr(path)
    assert metrics["max_attention_logit"] == pytest.approx(plain["max_attention_logit"], rel=1e-5)


def test_accumulated_batches_count_by_their_largest_logit():
    (whole, metrics), (halves, of_halves) = one_step("mha"), steps(NETWORKS["mha"], HALVES)
    assert of_halves["max_attention_logit"] == metrics["max_attention_logit"]
    chex.assert_trees_all_equal(halves.params, whole.params)
    one, _ = steps(NETWORKS["mha"], HALVES[:1])
    assert not np.array_equal(
        one.params["dense_layers"]["attention"]["q"], whole.params["dense_layers"]["attention"]["q"]
    )


def test_a_limit_that_no_head_reaches_changes_nothing():
    """But the last bits where XLA fuses the two programs differently."""
    config, plain = NETWORKS["mha"], dataclasses.replace(MUON, qk_clip=None)
    with_limit, metrics = steps(config, optimizer=dataclasses.replace(plain, qk_clip=1e9))
    without, off = steps(config, optimizer=plain)
    assert max(jax.tree.leaves(jax.tree.map(relative_error, with_limit.params, without.params))) < 1e-6
    assert metrics.keys() - off.keys() == {"max_attention_logit"}


def test_a_step_that_is_skipped_clips_nothing():
    config = NETWORKS["mha"]
    nan = BATCH | {"weights": np.full_like(BATCH["weights"], np.nan)}
    state, metrics = steps(config, [nan])
    assert metrics["skipped"] == 1
    assert metrics["max_attention_logit"] > TAU
    chex.assert_trees_all_equal(state.params, random_weights(config)[0])


@pytest.mark.parametrize("master", [True, False], ids=["master", "no_master"])
def test_bfloat16_weights_are_those_of_the_clipped_master(master):
    config = dataclasses.replace(NETWORKS["mha"], param_dtype="bfloat16")
    optimizer = dataclasses.replace(STILL, master_dtype="float32" if master else "")
    params, bias = random_weights(config)
    state, _ = steps(config, optimizer=optimizer)
    before, after = (measured(config, p, bias, BATCH)["dense_layers"][0] for p in (params, state.params))
    assert (before > 1.1 * TAU).any()
    np.testing.assert_allclose(after, np.minimum(before, TAU), rtol=0.02)
    if master:
        rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16), state.optimizer.weights)
        chex.assert_trees_all_equal(rounded, state.params)


def test_a_loss_of_the_modules_alone_clips_no_trunk():
    config = NETWORKS["mla"]
    loss = LanguageLoss(LanguageLossConfig(mtp_weight=1.0, trained="mtp"))
    state, metrics = steps(config, loss=loss, optimizer=dataclasses.replace(STILL, qk_clip=0.5))
    before = random_weights(config)[0]
    chex.assert_trees_all_equal(state.params | {"mtp": before["mtp"]}, before)
    assert metrics["max_attention_logit"] > 0.5


def test_the_policy_loss_clips():
    batch = BATCH | {name: BATCH["weights"] - 0.5 for name in ("advantages", "sampler_logprobs")}
    _, metrics = steps(NETWORKS["mha"], [batch], loss=PolicyLoss(PolicyLossConfig(ratio_low=2.0)))
    assert metrics["max_attention_logit"] == one_step("mha")[1]["max_attention_logit"]


def test_a_resumed_run_continues_bit_for_bit(tmp_path):
    learner = make_learner(NETWORKS["mha"], MUON)
    state = learner.init_state(*random_weights(NETWORKS["mha"]))
    state, _ = learner.step(state, [BATCH], NORMALISER)
    with CheckpointStore(str(tmp_path)) as store:
        save_state(store, state)
        restored = restore_state(store, learner.abstract_state())
    assert restored is not None
    resumed, straight = (learner.step(s, [BATCH], NORMALISER) for s in (restored[0], state))
    chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, s) for s, _ in (resumed, straight)))
    assert resumed[1] == straight[1]


def test_what_cannot_be_clipped_is_refused():
    with pytest.raises(UserError, match="qk_norm=True"):
        make_learner(small(**LLAMA | {"qk_norm": True}))
    kind = "tests.models.multi_query:MultiQueryAttention"
    with pytest.raises(UserError, match="MultiQueryAttention"):
        make_learner(small(attention=kind, kv_lora_rank=None, qk_nope_dim=0, n_mtp_modules=0))
    with pytest.raises(UserError, match=r"optimizer\.qk_clip=0"):
        OptimizerConfig(qk_clip=0.0)

    def without_logits(decoder, batch, normaliser):
        return LanguageLoss()(decoder, batch, normaliser)._replace(maxima={})

    with pytest.raises(UserError, match="logit_maxima"):
        steps(NETWORKS["mha"], loss=without_logits)
