"""Published networks have the published sizes."""

import numpy as np
import pytest

from composer_jax.models.model_def import ModelDef
from tests.models.networks import NETWORKS

BILLIONS = {
    # total, active, as their reports say, and how many of embedding and head those leave out of what is active
    "kimi_k2": (1040, 32, 0),
    "kimi_k2_5": (1040, 32, 0),
    "deepseek_v3": (671, 37, 0),
    "moonlight_16b_a3b": (16, 3, 0),
    "qwen3_30b_a3b": (30.5, 3.3, 0),
    "qwen3_coder_30b_a3b": (30.5, 3.3, 0),
    "qwen3_coder_480b_a35b": (480, 35, 0),
    "glm_4_5": (355, 32, 2),
    "glm_4_5_air": (106, 12, 2),
    "gpt_oss_20b": (20.9, 3.6, 1),
    "gpt_oss_120b": (116.8, 5.1, 1),
    "smollm2_135m": (0.135, 0.135, 0),
    "llama_3_1_8b": (8.03, 8.03, 0),
    "qwen2_5_coder_7b": (7.61, 7.61, 0),
    "qwen3_8b": (8.2, 8.2, 0),
}
EXACT = {
    # parameters of the published safetensors files
    "smollm2_135m": 134_515_008,
    "llama_3_1_8b": 8_030_261_248,
    "qwen2_5_coder_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
}


def test_every_preset_is_checked():
    assert set(NETWORKS) == set(BILLIONS)


@pytest.mark.parametrize("name", NETWORKS)
def test_parameter_counts(name):
    total, active, left_out = BILLIONS[name]
    definition = ModelDef(NETWORKS[name])
    embedding = definition.config.vocab_size * definition.config.d_model
    assert definition.parameter_count() / 1e9 == pytest.approx(total, rel=0.015)
    assert (definition.active_parameter_count() - left_out * embedding) / 1e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("name", EXACT)
def test_networks_without_experts_have_every_published_parameter_and_use_it(name):
    definition = ModelDef(NETWORKS[name])
    assert definition.parameter_count() == definition.active_parameter_count() == EXACT[name]
    assert definition.shapes()[1] == {}


def test_counts_by_hand():
    """Kimi K2, matrix by matrix."""
    d, layers, experts, ff = 7168, 61, 384, 2048
    attention = d * 1536 + 1536 * 64 * 192 + d * 576 + 512 * 64 * 256 + 64 * 128 * d
    norms = layers * (2 * d + 1536 + 512) + d
    moe = (layers - 1) * (d * experts + (experts + 1) * 3 * d * ff)
    total = 2 * 163_840 * d + layers * attention + norms + 3 * d * 18_432 + moe
    assert ModelDef(NETWORKS["kimi_k2"]).parameter_count() == total
    assert ModelDef(NETWORKS["kimi_k2"]).active_parameter_count() == total - (layers - 1) * (experts - 8) * 3 * d * ff


def balanced_scaling_factor(n_experts: int, experts_per_token: int, *, samples: int = 20_000) -> float:
    """The routed_scaling_factor that gives the routed output the variance of one expert's output.

    E[1 / sqrt(sum_i g_i^2)] over the normalised top-k sigmoid gates g of standard normal router logits (Moonlight,
    arXiv 2502.16982), simulated with a standard error below 0.001.
    """
    rng = np.random.default_rng(0)
    inverse_norms = []
    for count in [1000] * (samples // 1000):
        logits = rng.standard_normal((count, n_experts))
        gates = 1 / (1 + np.exp(-np.partition(logits, -experts_per_token, axis=-1)[:, -experts_per_token:]))
        gates /= gates.sum(-1, keepdims=True)
        inverse_norms.append(1 / np.sqrt((gates**2).sum(-1)))
    return float(np.mean(inverse_norms))


@pytest.mark.parametrize("name", ["kimi_k2", "moonlight_16b_a3b"])
def test_routed_scaling_factors_follow_from_the_numbers_of_experts(name):
    preset = NETWORKS[name]
    derived = balanced_scaling_factor(preset.n_experts, preset.experts_per_token)
    assert derived == pytest.approx(preset.routed_scaling_factor, abs=0.0015)
