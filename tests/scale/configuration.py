"""configs/moonlight.py with a network that is small in every dimension."""

from configs.moonlight import get_config

MODEL = dict(
    vocab_size=512,
    d_model=128,
    n_layers=2,
    n_heads=2,
    kv_lora_rank=32,
    qk_nope_dim=32,
    qk_rope_dim=16,
    v_head_dim=32,
    dense_ff_dim=256,
    expert_ff_dim=64,
    n_experts=8,
    experts_per_token=2,
)
FIELDS = {f"model.{name}": value for name, value in MODEL.items()} | {
    "mesh.expert": 2,
    "pretrain.batch_size": 8,
    "pretrain.seq_len": 64,
    "sft.batch_size": 8,
    "sft.seq_len": 32,
    "rl.batches": ((64, 8),),
    "sampler.mesh.expert": 2,
    "sampler.slots": 16,
    "sampler.max_model_len": 32,
    "sampler.prefill_shapes": ((2, 16),),
}


def small_config(**changes):
    """changes: values by the path of the field, with __ for dots."""
    config = get_config()
    for path, value in (FIELDS | {path.replace("__", "."): value for path, value in changes.items()}).items():
        config.update_from_flattened_dict({path: value})
    return config
