"""Published networks that configs and benchmarks plan, with the numbers of the config.json at the address above each.

A run with a base reads the config.json itself. No code depends on a name.
"""

from typing import Any

from composer_jax.models.config import ModelConfig
from composer_jax.models.rope import Yarn

_MLA: dict[str, Any] = dict(kv_lora_rank=512, qk_nope_dim=128, qk_rope_dim=64, v_head_dim=128)

_KIMI_K2: dict[str, Any] = dict(
    vocab_size=163_840,
    d_model=7168,
    n_layers=61,
    n_dense_layers=1,
    n_heads=64,
    **_MLA,
    q_lora_rank=1536,
    dense_ff_dim=18_432,
    expert_ff_dim=2048,
    n_experts=384,
    experts_per_token=8,
    n_shared_experts=1,
    routed_scaling_factor=2.827,
    norm_eps=1e-5,
    rope_theta=50_000.0,
)

_QWEN3_30B: dict[str, Any] = dict(
    kv_lora_rank=None,
    v_head_dim=128,
    rope_halves=True,
    vocab_size=151_936,
    n_dense_layers=0,
    qk_nope_dim=0,
    qk_rope_dim=128,
    qk_norm=True,
    router_scores="softmax",
    experts_per_token=8,
    n_shared_experts=0,
    d_model=2048,
    n_layers=48,
    n_heads=32,
    n_kv_heads=4,
    expert_ff_dim=768,
    n_experts=128,
)

PRESETS: dict[str, ModelConfig] = {
    # https://huggingface.co/moonshotai/Kimi-K2-Instruct
    "kimi_k2": ModelConfig(**_KIMI_K2, max_context=131_072, yarn=Yarn(32.0, beta_fast=1.0)),
    # https://huggingface.co/moonshotai/Kimi-K2.5, the text tower
    "kimi_k2_5": ModelConfig(**_KIMI_K2, max_context=262_144, yarn=Yarn(64.0)),
    # https://huggingface.co/deepseek-ai/DeepSeek-V3, without the MTP module that its checkpoint also holds
    "deepseek_v3": ModelConfig(
        vocab_size=129_280,
        d_model=7168,
        n_layers=61,
        n_dense_layers=3,
        n_heads=128,
        **_MLA,
        q_lora_rank=1536,
        dense_ff_dim=18_432,
        expert_ff_dim=2048,
        n_experts=256,
        experts_per_token=8,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        n_expert_groups=8,
        topk_groups=4,
        rope_theta=10_000.0,
        max_context=163_840,
        yarn=Yarn(40.0),
    ),
    # https://huggingface.co/moonshotai/Moonlight-16B-A3B
    "moonlight_16b_a3b": ModelConfig(
        vocab_size=163_840,
        d_model=2048,
        n_layers=27,
        n_dense_layers=1,
        n_heads=16,
        **_MLA,
        dense_ff_dim=11_264,
        expert_ff_dim=1408,
        n_experts=64,
        experts_per_token=6,
        n_shared_experts=2,
        routed_scaling_factor=2.446,
        norm_eps=1e-5,
        rope_theta=50_000.0,
        max_context=8192,
    ),
    # https://huggingface.co/Qwen/Qwen3-30B-A3B
    "qwen3_30b_a3b": ModelConfig(**_QWEN3_30B, dense_ff_dim=6144, rope_theta=1_000_000.0, max_context=40_960),
    # https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct
    "qwen3_coder_30b_a3b": ModelConfig(**_QWEN3_30B, dense_ff_dim=5472, rope_theta=10_000_000.0, max_context=262_144),
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M
    "smollm2_135m": ModelConfig(
        vocab_size=49_152,
        d_model=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        qk_rope_dim=64,
        v_head_dim=64,
        rope_halves=True,
        dense_ff_dim=1536,
        norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_embeddings=True,
        max_context=8192,
    ),
}
