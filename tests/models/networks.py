"""More published networks than models/presets.py has, with the numbers of the config.json at the address above each."""

from typing import Any

from composer_jax.models.config import ModelConfig
from composer_jax.models.presets import PRESETS
from composer_jax.models.rope import Llama3Rope, Yarn

_HEADS_OF_128: dict[str, Any] = dict(kv_lora_rank=None, v_head_dim=128, rope_halves=True)

_DENSE_HEADS_OF_128: dict[str, Any] = dict(**_HEADS_OF_128, qk_rope_dim=128)

_QWEN3: dict[str, Any] = dict(
    **_HEADS_OF_128,
    vocab_size=151_936,
    n_dense_layers=0,
    qk_nope_dim=0,
    qk_rope_dim=128,
    qk_norm=True,
    router_scores="softmax",
    experts_per_token=8,
    n_shared_experts=0,
)

_GLM_4_5: dict[str, Any] = dict(
    **_HEADS_OF_128,
    vocab_size=151_552,
    n_heads=96,
    n_kv_heads=8,
    qk_nope_dim=64,
    qk_rope_dim=64,
    qkv_bias=True,
    experts_per_token=8,
    n_shared_experts=1,
    norm_eps=1e-5,
    rope_theta=1_000_000.0,
    max_context=131_072,
)

_GPT_OSS: dict[str, Any] = dict(
    vocab_size=201_088,
    d_model=2880,
    n_dense_layers=0,
    kv_lora_rank=None,
    n_heads=64,
    n_kv_heads=8,
    qk_nope_dim=0,
    qk_rope_dim=64,
    v_head_dim=64,
    rope_halves=True,
    qkv_bias=True,
    out_bias=True,
    attention_sinks=True,
    sliding_window=128,
    full_attention_every=2,
    dense_ff_dim=2880,
    expert_ff_dim=2880,
    experts_per_token=4,
    n_shared_experts=0,
    router_scores="softmax",
    router_logit_bias=True,
    expert_bias=True,
    swiglu_limit=7.0,
    norm_eps=1e-5,
    rope_theta=150_000.0,
    max_context=131_072,
    yarn=Yarn(32.0, mscale_all_dim=0.0, truncate=False),
)

NETWORKS = PRESETS | {
    # https://huggingface.co/Qwen/Qwen3-Coder-480B-A35B-Instruct
    "qwen3_coder_480b_a35b": ModelConfig(
        **_QWEN3,
        d_model=6144,
        n_layers=62,
        n_heads=96,
        n_kv_heads=8,
        dense_ff_dim=8192,
        expert_ff_dim=2560,
        n_experts=160,
        rope_theta=10_000_000.0,
        max_context=262_144,
    ),
    # https://huggingface.co/zai-org/GLM-4.5, without its MTP module
    "glm_4_5": ModelConfig(
        **_GLM_4_5,
        d_model=5120,
        n_layers=92,
        n_dense_layers=3,
        dense_ff_dim=12_288,
        expert_ff_dim=1536,
        n_experts=160,
        routed_scaling_factor=2.5,
        qk_norm=True,
    ),
    # https://huggingface.co/zai-org/GLM-4.5-Air, without its MTP module
    "glm_4_5_air": ModelConfig(
        **_GLM_4_5,
        d_model=4096,
        n_layers=46,
        n_dense_layers=1,
        dense_ff_dim=10_944,
        expert_ff_dim=1408,
        n_experts=128,
    ),
    # https://huggingface.co/openai/gpt-oss-20b and -120b
    "gpt_oss_20b": ModelConfig(**_GPT_OSS, n_layers=24, n_experts=32),
    "gpt_oss_120b": ModelConfig(**_GPT_OSS, n_layers=36, n_experts=128),
    # https://huggingface.co/meta-llama/Llama-3.1-8B
    "llama_3_1_8b": ModelConfig(
        **_DENSE_HEADS_OF_128,
        vocab_size=128_256,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        dense_ff_dim=14_336,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        llama3_rope=Llama3Rope(8.0),
        max_context=131_072,
    ),
    # https://huggingface.co/Qwen/Qwen2.5-Coder-7B-Instruct
    "qwen2_5_coder_7b": ModelConfig(
        **_DENSE_HEADS_OF_128,
        vocab_size=152_064,
        d_model=3584,
        n_layers=28,
        n_heads=28,
        n_kv_heads=4,
        qkv_bias=True,
        dense_ff_dim=18_944,
        rope_theta=1_000_000.0,
        max_context=32_768,
    ),
    # https://huggingface.co/Qwen/Qwen3-8B
    "qwen3_8b": ModelConfig(
        **_DENSE_HEADS_OF_128,
        vocab_size=151_936,
        d_model=4096,
        n_layers=36,
        n_heads=32,
        n_kv_heads=8,
        qk_norm=True,
        dense_ff_dim=12_288,
        rope_theta=1_000_000.0,
        max_context=40_960,
    ),
}
