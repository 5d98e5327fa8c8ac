"""A small model whose dimensions all differ, its weights, and input rows."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef


def small(**changes) -> ModelConfig:
    """One dense layer, two expert layers, two MTP modules; float32, so that two ways of computing agree."""
    fields = dict(
        vocab_size=64,
        d_model=32,
        n_layers=3,
        n_dense_layers=1,
        n_heads=2,
        kv_lora_rank=16,
        qk_nope_dim=8,
        qk_rope_dim=4,
        v_head_dim=6,
        dense_ff_dim=24,
        expert_ff_dim=5,
        n_experts=8,
        experts_per_token=3,
        n_shared_experts=2,
        routed_scaling_factor=1.7,
        max_context=64,
        n_mtp_modules=2,
        embedding_taps=2,
        dispatch="dense",
        compute_dtype="float32",
        remat=False,
    )
    return ModelConfig(**(fields | changes))


GROUPED_QUERY = dict(
    kv_lora_rank=None,
    n_kv_heads=2,
    n_heads=4,
    qk_nope_dim=2,
    qk_rope_dim=4,
    rope_halves=True,
    qkv_bias=True,
    out_bias=True,
    attention_sinks=True,
    sliding_window=3,
    full_attention_every=2,
    router_scores="softmax",
    router_logit_bias=True,
    expert_bias=True,
    swiglu_limit=1.0,
)
"""Changes that enable every part of gpt-oss that DeepSeek lacks."""


WITHOUT_EXPERTS = dict(
    n_experts=0, experts_per_token=0, expert_ff_dim=0, n_shared_experts=0, routed_scaling_factor=1.0, n_dense_layers=0
)
"""Changes to a network of dense layers."""

LLAMA = WITHOUT_EXPERTS | dict(
    kv_lora_rank=None,
    n_kv_heads=2,
    n_heads=4,
    qk_nope_dim=0,
    qk_rope_dim=6,
    v_head_dim=6,
    rope_halves=True,
    embedding_taps=0,
    n_mtp_modules=0,
)
"""Changes to the layers of the families llama, qwen2 and qwen3."""


def random_weights(config: ModelConfig, seed: int = 0):
    """(params, router_bias) from NumPy: no scale is 1 and no bias 0, so that a missing one changes the output.

    The biases are large enough to change which experts are chosen.
    """
    rng = np.random.default_rng(seed)

    def fan_in(name, shape) -> int:
        if name in ("q", "k", "v", "k_up", "v_up"):  # [in, heads, out]
            return shape[-3]
        if name == "out":  # [heads, in, out]
            return shape[-3] * shape[-2]
        return shape[-1] if name == "table" else shape[-2]

    def draw(path, leaf):
        name = path[-1].key
        if name == "scale":
            return 1 + 0.2 * rng.standard_normal(leaf.shape)
        if name.endswith("bias") or name == "sinks":
            return 0.3 * rng.standard_normal(leaf.shape)
        return rng.standard_normal(leaf.shape) * 1.2 / np.sqrt(fan_in(name, leaf.shape))

    params, bias = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(draw(path, leaf), leaf.dtype), ModelDef(config).shapes()
    )
    return params, bias


def rows(documents: Sequence[Sequence[Sequence[int]]], length: int) -> dict[str, np.ndarray]:
    """tokens, positions, segments [B,length] int32 of rows that hold several documents each; the rest is padding."""
    out = {name: np.zeros((len(documents), length), np.int32) for name in ("tokens", "positions", "segments")}
    for b, row in enumerate(documents):
        start = 0
        for number, document in enumerate(row, start=1):
            here = slice(start, start + len(document))
            out["tokens"][b, here] = document
            out["positions"][b, here] = np.arange(len(document))
            out["segments"][b, here] = number
            start += len(document)
    return out


@functools.cache
def forward(config: ModelConfig):
    """Jitted (params, router_bias, rows) -> dict of logits [B,S,W], MTP logits [M,B,S,W] and, with experts, counts."""

    @jax.jit
    def run(params, router_bias, batch):
        decoder = ModelDef(config).bind(params, router_bias)
        fields = batch["tokens"], batch["positions"], batch["segments"]
        hidden = decoder(*fields)
        out = {"logits": decoder.logits(hidden.last_BSD)}
        if hidden.router_stats is not None:
            out["counts"] = hidden.router_stats.counts_E
        if config.n_mtp_modules:
            states, load, _ = decoder.mtp_hidden(hidden, *fields)
            out["mtp_logits"] = decoder.logits(states)
            if load is not None:
                out["mtp_counts"] = load.counts_E
        return out

    return run


def relative_error(actual, expected) -> float:
    """Largest absolute difference over the largest absolute value of `expected` (or 1e-8)."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-8))


def router_passes(config: ModelConfig, tokens: int) -> float:
    """Returns the operations of the five passes beyond the first that the float32 logits of a forward pass's routers
    count as in scale/costs.py, and that models/flops.py leaves out."""
    return 5 * 2.0 * config.n_moe_layers * config.d_model * config.n_experts * tokens
