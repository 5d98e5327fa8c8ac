"""Attention kinds: found by name or import path, and a third kind from outside the package trains and decodes."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.models.attention_kinds import ATTENTION_KINDS, attention_kind, attention_name
from composer_jax.models.cache import init_cache
from composer_jax.models.flops import forward_flops
from composer_jax.models.model_def import ModelDef
from composer_jax.scale.costs import CostAssumptions, estimate_cost
from tests.models.multi_query import MultiQueryAttention
from tests.models.networks import NETWORKS
from tests.models.small import forward, random_weights, relative_error, router_passes, rows, small

MULTI_QUERY = dict(
    attention="tests.models.multi_query:MultiQueryAttention", kv_lora_rank=None, qk_nope_dim=0, n_mtp_modules=0
)
TOKENS = 12


def test_every_preset_has_the_kind_that_its_widths_imply():
    for config in NETWORKS.values():
        assert attention_name(config) == ("gqa" if config.kv_lora_rank is None else "mla")
        assert attention_kind(config) is ATTENTION_KINDS[attention_name(config)]


def test_naming_the_kind_changes_no_weight():
    config = small(kv_lora_rank=None, n_kv_heads=2, n_layers=2, n_mtp_modules=0)
    named = dataclasses.replace(config, attention=attention_name(config))
    weights, same = (ModelDef(c).init(3) for c in (config, named))
    chex.assert_trees_all_equal(weights, same, strict=True)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention": "linear"}, ["model.attention='linear'", "mla, gqa", "package.module:Attribute"]),
        ({"attention": "tests.models.multi_query:Missing"}, ["model.attention=", "cannot be imported", "Missing"]),
        ({"attention": "gqa"}, ["n_kv_heads=None", "n_heads=2"]),
        ({"attention": "mla", "kv_lora_rank": None, "n_kv_heads": 2}, ["kv_lora_rank=None", "latent"]),
        ({"kv_lora_rank": None}, ["n_kv_heads=None", "n_heads=2", "kv_lora_rank"]),
        ({"kv_lora_rank": None, "n_kv_heads": 3}, ["n_kv_heads=3", "n_heads=2"]),
        ({"kv_lora_rank": None, "n_kv_heads": 2, "q_lora_rank": 4}, ["q_lora_rank=4", "latent"]),
        ({"n_kv_heads": 2}, ["n_kv_heads=2", "kv_lora_rank=None"]),
        ({"qk_norm": True}, ["qk_norm=True", "grouped-query"]),
        (MULTI_QUERY | {"qk_nope_dim": 2}, ["qk_nope_dim=2", "use 0"]),
    ],
    ids=str,
)
def test_an_unknown_kind_or_a_field_it_has_no_use_for_is_refused(fields, named):
    config = small(**fields)
    with pytest.raises(UserError) as error:
        ModelDef(config)
    for text in named:
        assert text in str(error.value)


def test_a_kind_from_outside_the_package_runs_forward_and_cached_decode():
    config = small(**MULTI_QUERY)
    assert attention_kind(config) is MultiQueryAttention
    params, bias = random_weights(config)
    assert set(params["moe_layers"]["attention"]) == {"q", "kv", "out"}
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, TOKENS)).astype(np.int32)
    full = forward(config)(params, bias, rows([[row.tolist()] for row in tokens], TOKENS))["logits"]

    @jax.jit
    def extend(cache, tokens, start):
        decoder = ModelDef(config).bind(params, bias)
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
        states, cache = decoder.extend(
            tokens, positions, jnp.ones(tokens.shape, bool), cache, np.arange(4).reshape(2, 2)
        )
        return decoder.logits(states), cache

    cache = init_cache(config, 4, TOKENS // 2)
    assert cache.entries_LZTX.shape == (config.n_layers, 4, TOKENS // 2, config.qk_rope_dim + config.v_head_dim)
    prefill, cache = extend(cache, tokens[:, :8], 0)
    logits = [prefill]
    for t in range(8, TOKENS):
        step, cache = extend(cache, tokens[:, t : t + 1], t)
        logits.append(step)
    assert relative_error(np.concatenate(logits, axis=1), full) < 1e-5


@pytest.mark.parametrize(
    "fields", [{}, {"kv_lora_rank": None, "n_kv_heads": 2}, MULTI_QUERY], ids=["mla", "gqa", "own"]
)
def test_the_form_of_the_config_reaches_every_kind(fields):
    config = small(**fields, attention_form="cudnn")
    with pytest.raises(UserError, match="attention_form='cudnn' cannot run here, because this process has no"):
        jax.eval_shape(forward(config), *ModelDef(config).shapes(), rows([[[1, 2, 3]]], 4))


def test_its_cost_is_that_of_the_traced_program():
    config = small(**MULTI_QUERY, embedding_taps=0, experts_per_token=8)  # all experts, as "dense" computes
    row = np.zeros((1, TOKENS), np.int32)

    def run(params, bias):
        decoder = ModelDef(config).bind(params, bias)
        return decoder.logits(decoder(row, row, row + 1).last_BSD)

    traced = estimate_cost(jax.make_jaxpr(run)(*ModelDef(config).shapes()), CostAssumptions({})).flops()
    # The program computes the whole square of scores; the formula counts the causal half.
    masked_pairs = TOKENS**2 - TOKENS * (TOKENS + 1) // 2
    per_pair = MultiQueryAttention.cost(config).per_pair
    seen = traced - 2 * config.n_layers * per_pair * masked_pairs
    assert seen - router_passes(config, TOKENS) == forward_flops(config, TOKENS)
