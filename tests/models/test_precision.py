"""A network with rounded operands: off by default, the same in the sampler, on every mesh, for every other token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from composer_jax.errors import UserError
from composer_jax.models.attention_kinds import attention_kind
from composer_jax.models.moe import MixtureOfExperts
from composer_jax.models.projection import fake_quantize, project
from composer_jax.ops.activation import swiglu
from composer_jax.ops.cached_attention import KeyRange, LayerCache
from composer_jax.ops.fake_quantization import fake_int4
from composer_jax.ops.packed_attention import AttentionMask
from composer_jax.parallel.dispatch import Experts
from composer_jax.parallel.dispatch.compute import compute_all_experts, compute_chosen_experts
from composer_jax.parallel.dispatch.dense import expand_gates
from composer_jax.parallel.mesh import make_mesh
from tests.models.small import forward, random_weights, relative_error, rows, small

RNG = np.random.default_rng(0)
LATENT = dict(n_heads=2, kv_lora_rank=48, q_lora_rank=40, qk_nope_dim=24, qk_rope_dim=8, v_head_dim=20)
GROUPED = dict(kv_lora_rank=None, n_kv_heads=2, n_heads=4, qk_nope_dim=8, qk_rope_dim=8, v_head_dim=24)


def normal(*shape) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def test_off_is_the_plain_product():
    x, w = normal(2, 3, 4, 8), normal(4, 8, 5)
    off = project(x, w, "none", contracted=2, sharded="in")
    assert relative_error(off, np.einsum("bshv,hvd->bsd", np.asarray(x, np.float64), np.asarray(w, np.float64))) < 1e-6


@pytest.mark.parametrize(("precision", "contracted"), [("mxfp8", 1), ("nvfp4", 2)])
def test_a_projection_rounds_both_operands_along_the_contracted_axes(precision, contracted):
    x, w = normal(2, 3, 4, 20), normal(*(4, 20)[-contracted:], 5, 2)
    wide_x, wide_w = x.reshape(*x.shape[: 4 - contracted], -1), w.reshape(-1, 5, 2)
    rounded = jax.jit(lambda x, w: (fake_quantize(x, -1, precision), fake_quantize(w, 0, precision)))
    expected = jnp.tensordot(*rounded(wide_x, wide_w), 1)
    actual = jax.jit(lambda x, w: project(x, w, precision, contracted=contracted))(x, w)
    assert relative_error(actual, expected) < 1e-6
    assert relative_error(actual, jnp.tensordot(x, w, contracted)) > 1e-3


@pytest.mark.parametrize(("sharded", "width"), [("in", 24), ("out", 40)])
def test_blocks_on_two_devices_are_refused(sharded, width):
    with (
        jax.set_mesh(make_mesh(jax.devices()[:2], tensor=2)),
        pytest.raises(UserError, match=f"32.* {width} .*tensor=2"),
    ):
        project(normal(3, 24), normal(24, 40), "mxfp8", sharded=sharded)


def one_page(entries: jax.Array) -> LayerCache:
    """The cache of a layer in which each row has one page, which holds exactly these entries."""
    return LayerCache(entries[None], None, 0, jnp.arange(len(entries))[:, None], entries.shape[-1])


@pytest.mark.parametrize(("kind", "precision"), [(LATENT, "mxfp8"), (GROUPED, "nvfp4")], ids=["mla", "gqa"])
def test_attention_decodes_what_it_was_trained_on(kind, precision):
    config = small(d_model=64, precision=precision, **kind)
    attention = attention_kind(config)(config, rngs=nnx.Rngs(params=0))
    x, positions = normal(2, 7, 64), jnp.broadcast_to(jnp.arange(7), (2, 7))
    segments = jnp.ones((2, 7), jnp.int32)
    keys = KeyRange(jnp.zeros_like(positions), positions)

    @nnx.jit
    def both(attention, x):
        trained = attention(x, positions, AttentionMask(jnp.arange(7), segments, segments))
        return trained, attention.extend(x, positions, keys, one_page)

    trained, decoded = both(attention, x)
    plain = attention_kind(config)(dataclasses.replace(config, precision="none"), rngs=nnx.Rngs(params=0))
    # A number on the edge between two roundings can fall to either side of it: a few outputs may differ by more.
    error = np.abs(np.asarray(decoded - trained))
    assert np.median(error) < 1e-6 and error.max() < 0.02
    assert relative_error(trained, both(plain, x)[0]) > 0.01


def test_a_token_changes_no_token_before_it_and_no_other_row():
    config = small(d_model=64, precision="nvfp4", n_layers=2, n_mtp_modules=0, embedding_taps=0)
    weights = random_weights(config)
    first, second, other = (RNG.integers(1, 64, 12).tolist() for _ in range(3))
    run = lambda *documents: np.asarray(forward(config)(*weights, rows([[d] for d in documents], 16))["logits"])  # noqa: E731
    before, after = run(first, second), run([*first[:-1], 1 + first[-1] % 63], other)
    np.testing.assert_array_equal(before[0, :11], after[0, :11])
    assert (before[0, 11] != after[0, 11]).any()


@pytest.mark.parametrize(("precision", "width"), [("mxfp8", 20), ("nvfp4", 32)])
def test_both_forms_of_the_experts_round_the_same_numbers(precision, width):
    experts = Experts(normal(4, 64, width), normal(4, 64, width), normal(4, width, 64), None, precision)
    x, gates, dy = normal(40, 64), jnp.abs(normal(40, 2)), normal(40, 64)
    ids = jnp.asarray(np.stack([RNG.choice(4, 2, replace=False) for _ in range(40)]))

    @jax.jit
    def run(x, gates, experts):
        chosen = lambda *a: compute_chosen_experts(a[0], ids, *a[1:], swiglu)  # noqa: E731
        every = lambda x, gates, experts: compute_all_experts(x, expand_gates(ids, gates, 4), experts, swiglu)  # noqa: E731
        return [(y, back(dy)) for y, back in (jax.vjp(form, x, gates, experts) for form in (chosen, every))]

    (y, (dx, dgates, dexperts)), (all_y, (all_dx, all_dgates, all_dexperts)) = run(x, gates, experts)
    for actual, expected in ((y, all_y), (dx, all_dx), (dgates, all_dgates)):
        assert relative_error(actual, expected) < 1e-5
    # Their blocks along tokens hold other tokens.
    errors = jax.tree.map(relative_error, dexperts, all_dexperts)
    assert all(0 < error < 0.1 for error in jax.tree.leaves(errors))
    (plain, _), _ = run(x, gates, dataclasses.replace(experts, precision="none"))
    assert relative_error(y, plain) > 0.01


def test_int4_rounds_the_routed_experts_and_trains_them_straight_through():
    config = small(d_model=64, expert_qat="int4")
    layer = MixtureOfExperts(config, rngs=nnx.Rngs(params=0))
    rounded = MixtureOfExperts(dataclasses.replace(config, expert_qat="none"), rngs=nnx.Rngs(params=0))
    for name in ("gate", "up", "down"):
        weight = getattr(rounded, name)
        weight.set_value(fake_int4(weight.get_value(), 1))
    x, mask = normal(2, 5, 64), jnp.ones((2, 5), bool)

    @nnx.jit
    def gradient(layer, x):
        return nnx.value_and_grad(lambda layer: (layer(x, mask)[0] ** 2).sum())(layer)

    (y, actual), (expected_y, expected) = gradient(layer, x), gradient(rounded, x)
    assert relative_error(y, expected_y) < 1e-6
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < 1e-5
    plain = MixtureOfExperts(dataclasses.replace(config, expert_qat="none"), rngs=nnx.Rngs(params=0))
    assert relative_error(y, gradient(plain, x)[0]) > 0.001
