"""Our training step with four layers of Qwen3-30B-A3B (128 experts, 8 per token), 8 rows of 4,096 tokens."""

import dataclasses

from benchmarks.gpu_parts.output import Figures
from benchmarks.gpu_parts.training_speed import training_figures
from benchmarks.gpu_parts.worker import print_figures
from composer_jax.models.presets import PRESETS
from composer_jax.models.supported_dtype import supported_network


def measure(small: bool, recompute: bool) -> Figures:
    """Returns the figures of training_speed.py.

    Weights are bfloat16 with a float32 master copy, as in configs/qwen3_30b_a3b.py.
    """
    config = dataclasses.replace(
        PRESETS["qwen3_30b_a3b"],
        n_layers=4,
        compute_dtype="bfloat16",
        param_dtype="bfloat16",
        head_chunk=4096,  # of the 32,768 positions, whose logits take 20 GB
    )
    rows, length = 8, 4096
    if small:
        narrow = dict(n_layers=1, d_model=64, n_heads=2, n_kv_heads=1, qk_rope_dim=32, v_head_dim=32, expert_ff_dim=32)
        config = dataclasses.replace(config, vocab_size=512, n_experts=4, experts_per_token=2, head_chunk=32, **narrow)
        rows, length = 2, 64
    return training_figures(supported_network(config), rows, length, small=small, recompute=recompute)


if __name__ == "__main__":
    print_figures(measure, "recompute")
