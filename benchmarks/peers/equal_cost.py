"""A dense Llama network that costs as much per token as one of ours, for google-tunix's sampler.

google-tunix has no latent attention, and its experts on the CPU compute every token with every expert. So it gets its
cheapest network, a dense one, with the same width, layers, heads, vocabulary and tied or separate head:
    head_dim      the mean of the widths of our queries and values, for equal attention to each token of the context
    num_kv_heads  the divisor of the heads for which the cache of a token is nearest to ours
    hidden_dim    the width of the feed-forward layers with which the matrix products per token are equal
"""

import dataclasses
from typing import Any, NamedTuple

from composer_jax.models.config import ModelConfig
from composer_jax.models.flops import forward_flops


class Cost(NamedTuple):
    """Operations of one forward pass, each multiplication of a matrix product counted as two."""

    per_token: float
    """Of the products with weights, for each token."""
    per_pair: float
    """Of attention, for each pair of a token and one before it, over all layers."""


def cost_of(config: ModelConfig) -> Cost:
    """Returns the cost of one of our networks without its multi-token-prediction modules, which do not sample."""
    config = dataclasses.replace(config, n_mtp_modules=0)
    one, two = forward_flops(config, 1), forward_flops(config, 2)  # of 1 and of 3 pairs
    return Cost(per_token=one - (two - 2 * one), per_pair=two - 2 * one)


def cost_of_llama(llama: dict[str, Any]) -> Cost:
    """Returns the cost of the network of `llama_of_equal_cost`."""
    d, layers, width = llama["embed_dim"], llama["num_layers"], llama["head_dim"]
    attention = 2 * d * width * (llama["num_heads"] + llama["num_kv_heads"])
    products = layers * (attention + 3 * d * llama["hidden_dim"]) + d * llama["vocab_size"]
    return Cost(per_token=2 * products, per_pair=2 * layers * 2 * llama["num_heads"] * width)


def llama_of_equal_cost(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of google-tunix's `llama3.model.ModelConfig` for a network with the cost of ours."""
    heads = config.n_heads
    key_width = config.qk_nope_dim + config.qk_rope_dim
    width = (key_width + config.v_head_dim) // 4 * 2  # even, for rotary positions
    if config.kv_lora_rank is not None:
        cached = config.kv_lora_rank + config.qk_rope_dim
    else:
        assert config.n_kv_heads is not None
        cached = config.n_kv_heads * (key_width + config.v_head_dim)
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    llama = dict(
        num_layers=config.n_layers,
        vocab_size=config.vocab_size,
        embed_dim=config.d_model,
        hidden_dim=0,
        num_heads=heads,
        head_dim=width,
        num_kv_heads=min(divisors, key=lambda n: abs(2 * n * width - cached)),
        rope_theta=int(config.rope_theta),
        norm_eps=config.norm_eps,
        weight_tying=config.tie_embeddings,
    )
    missing = cost_of(config).per_token - cost_of_llama(llama).per_token
    width = missing / (2 * config.n_layers * 3 * config.d_model)
    llama["hidden_dim"] = int(width) // 16 * 16  # a width that vector units like
    return llama
