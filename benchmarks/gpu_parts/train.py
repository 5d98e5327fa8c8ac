"""Our training step with SmolLM2-135M's shape, 16 rows of 2,048 tokens."""

import dataclasses

from benchmarks.gpu_parts.output import Figures
from benchmarks.gpu_parts.training_speed import training_figures
from benchmarks.gpu_parts.worker import print_figures
from composer_jax.models.config import ModelConfig
from composer_jax.models.presets import PRESETS
from composer_jax.models.supported_dtype import supported_network


def train_shape(small: bool) -> tuple[ModelConfig, int, int]:
    """Returns the network, rows, and tokens of a row."""
    config = dataclasses.replace(PRESETS["smollm2_135m"], compute_dtype="bfloat16")
    if not small:
        return config, 16, 2048
    narrow = dict(n_layers=2, d_model=96, n_heads=3, n_kv_heads=1, qk_rope_dim=32, v_head_dim=32, dense_ff_dim=128)
    return dataclasses.replace(config, vocab_size=512, **narrow), 2, 64


def measure(small: bool, recompute: bool) -> Figures:
    """Returns the figures of training_speed.py."""
    config, rows, length = train_shape(small)
    return training_figures(supported_network(config), rows, length, small=small, recompute=recompute)


if __name__ == "__main__":
    print_figures(measure, "recompute")
