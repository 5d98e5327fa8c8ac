"""forward_flops equals the matrix products of the traced program."""

import dataclasses

import jax
import numpy as np
import pytest

from composer_jax.models.flops import document_lengths, forward_flops, row_flops, training_flops
from composer_jax.models.model_def import ModelDef
from composer_jax.scale.costs import CostAssumptions, estimate_cost
from tests.models.small import GROUPED_QUERY, LLAMA, WITHOUT_EXPERTS, router_passes, small

TOKENS = 16


# All experts are chosen, so that computing all of them is what the formula counts.
CASES = {
    "latent": small(embedding_taps=0, experts_per_token=8, n_mtp_modules=0),
    "query_rank": small(embedding_taps=0, experts_per_token=8, n_mtp_modules=0, q_lora_rank=12, n_dense_layers=0),
    "no_experts": small(**LLAMA),
    "experts_in_some_layers": small(
        embedding_taps=0, experts_per_token=8, n_mtp_modules=0, n_layers=4, n_dense_layers=0, dense_layers=(1, 3)
    ),
    "grouped": small(
        **GROUPED_QUERY | dict(expert_bias=False, sliding_window=None, full_attention_every=1),
        embedding_taps=0,
        experts_per_token=8,
        n_mtp_modules=0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_flops_is_the_sum_of_the_traced_products(name):
    config = CASES[name]
    row = np.zeros((1, TOKENS), np.int32)

    def forward(params, bias):
        decoder = ModelDef(config).bind(params, bias)
        return decoder.logits(decoder(row, row, row + 1).last_BSD)

    actual = estimate_cost(jax.make_jaxpr(forward)(*ModelDef(config).shapes()), CostAssumptions({})).flops()
    # What runs computes the whole square of scores; the formula counts the half that is seen.
    per_pair = 2 * config.n_layers * config.n_heads * (config.qk_nope_dim + config.qk_rope_dim + config.v_head_dim)
    unseen = TOKENS**2 - TOKENS * (TOKENS + 1) // 2
    assert actual - per_pair * unseen - router_passes(config, TOKENS) == forward_flops(config, TOKENS)


def test_a_window_counts_only_the_keys_inside_it():
    config = small(**GROUPED_QUERY, n_mtp_modules=0)
    full = small(**GROUPED_QUERY | dict(sliding_window=None, full_attention_every=1), n_mtp_modules=0)
    back = np.subtract.outer(np.arange(TOKENS), np.arange(TOKENS))
    seen = [int(((back >= 0) & (back < window)).sum()) for window in (TOKENS, config.sliding_window)]
    per_pair = 2 * config.n_heads * (config.qk_nope_dim + config.qk_rope_dim + config.v_head_dim)
    windowed = sum(config.has_window(layer) for layer in range(config.n_layers))
    assert windowed == 2
    missing = windowed * per_pair * (seen[0] - seen[1])
    assert forward_flops(full, TOKENS) - forward_flops(config, TOKENS) == missing


@pytest.mark.parametrize("changes", [{}, WITHOUT_EXPERTS], ids=["experts", "no_experts"])
def test_the_module_for_the_token_after_next_is_a_layer_a_projection_and_a_head(changes):
    one, none = (forward_flops(small(**changes, n_mtp_modules=n), TOKENS) for n in (1, 0))
    deeper = forward_flops(small(**changes, n_mtp_modules=0, n_layers=4), TOKENS)
    assert one - none == deeper - none + 2 * TOKENS * (2 * 32 * 32 + 32 * 64)


def test_a_frozen_trunk_has_no_backward_pass():
    """A backward pass takes two products for each of the forward pass, of what is trained."""
    whole, trunk = (forward_flops(small(n_mtp_modules=n), TOKENS) for n in (1, 0))
    config = small(n_mtp_modules=1)
    assert training_flops(config, TOKENS) == 3 * trunk
    assert training_flops(config, TOKENS, trains_mtp=True) == pytest.approx(3 * whole)
    frozen = training_flops(config, TOKENS, trains_mtp=True, trains_trunk=False)
    assert frozen == pytest.approx(trunk + 3 * (whole - trunk))


@pytest.mark.parametrize("config", [small(), small(**GROUPED_QUERY)], ids=["latent", "window"])
def test_packed_documents_cost_what_each_of_them_does(config):
    segments = np.array([[1, 1, 2, 2, 2, 0], [1] * 6, [0] * 6])
    assert document_lengths(segments).tolist() == [2, 3, 6]
    assert document_lengths(segments[2:]).tolist() == []
    alone = sum(training_flops(config, tokens, trains_mtp=True) for tokens in (2, 3, 6))
    assert training_flops(config, document_lengths(segments), trains_mtp=True) == pytest.approx(alone, rel=1e-12)


def row(*lengths: int) -> np.ndarray:
    """The segments of a row of 8192 tokens that holds documents of these lengths."""
    segments = np.repeat(np.arange(len(lengths)) + 1, lengths)
    return np.pad(segments, (0, 8192 - len(segments)))


def test_a_row_costs_its_blocks_of_attention_and_its_experts():
    """By hand: 36 blocks of a full row, 8 of eight documents; an expert has three products, padding has nothing."""
    full, short, half = row(8192), row(*[1024] * 8), row(4096)
    dense, experts = small(**LLAMA), small(n_mtp_modules=1, embedding_taps=0, experts_per_token=3)
    per_pair = dense.n_heads * (dense.qk_nope_dim + dense.qk_rope_dim + dense.v_head_dim)
    per_block = 2 * dense.n_layers * 1024**2 * per_pair
    assert [row_flops(dense, r) / per_block for r in (full, short, half, row())] == [36, 8, 10, 0]
    one = dataclasses.replace(experts, experts_per_token=1)
    layers = experts.n_moe_layers + 1
    two_more = 2 * 4096 * layers * 2 * 3 * experts.d_model * experts.expert_ff_dim
    assert row_flops(experts, half) - row_flops(one, half) == two_more
    assert row_flops(experts, row()) == 0


def test_layers_with_a_window_compute_fewer_blocks():
    config = small(**LLAMA | dict(sliding_window=1024, full_attention_every=2))
    per_pair = 2 * config.n_heads * (config.qk_nope_dim + config.qk_rope_dim + config.v_head_dim)
    windowed = sum(config.has_window(layer) for layer in range(config.n_layers))
    blocks = windowed * (8 + 7) + (config.n_layers - windowed) * 36
    assert row_flops(config, row(8192)) == blocks * 1024**2 * per_pair
