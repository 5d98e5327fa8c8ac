"""A ModelConfig of small sizes, hardly two of them equal."""

from composer_jax.models.config import ModelConfig


def small(**changes) -> ModelConfig:
    fields = dict(
        vocab_size=23,
        d_model=10,
        n_layers=3,
        n_dense_layers=1,
        n_heads=3,
        kv_lora_rank=7,
        qk_nope_dim=5,
        qk_rope_dim=4,
        v_head_dim=6,
        dense_ff_dim=11,
        expert_ff_dim=8,
        n_experts=4,
        experts_per_token=2,
        n_shared_experts=2,
    )
    return ModelConfig(**(fields | changes))
