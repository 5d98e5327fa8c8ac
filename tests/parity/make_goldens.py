"""Writes the golden files of tests/parity/goldens. Needs the extra `parity`:

    python -m tests.parity.make_goldens

The same machine writes the same bytes every time; another may differ in the last bits of the logits.
"""

import json
import sys
from typing import Any

import torch

from tests.parity.goldens import GOLDENS, Golden, save
from tests.parity.theirs import PLAIN, compute, in_memory, make_model, on_disk, tokens_for, yarn

SMALL = dict(
    vocab_size=41,
    hidden_size=24,
    intermediate_size=30,
    moe_intermediate_size=14,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts_per_tok=2,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1_000.0},
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
"""Of the families that are not DeepSeek-V3's."""

TINY = SMALL | dict(
    vocab_size=29, hidden_size=16, intermediate_size=20, moe_intermediate_size=6, head_dim=6, max_position_embeddings=32
)


def _dense(model_type: str, **changes: Any) -> dict[str, Any]:
    """The sizes above, without experts."""
    return {k: v for k, v in TINY.items() if k not in ("moe_intermediate_size", "num_experts_per_tok")} | {
        "model_type": model_type,
        **changes,
    }


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)

CONFIGS = {
    "direct_query_tied": PLAIN | {"tie_word_embeddings": True, "n_shared_experts": 2, "routed_scaling_factor": 2.446},
    "deepseek_grouped_fused": PLAIN
    | {
        "q_lora_rank": 18,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 2,
        "num_hidden_layers": 4,
        "routed_scaling_factor": 2.5,
    },
    "kimi_like": PLAIN
    | {
        "q_lora_rank": 18,
        "n_routed_experts": 12,
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
    },
    "qwen3_moe": SMALL | {"model_type": "qwen3_moe", "num_experts": 6, "norm_topk_prob": True},
    "glm4_moe": SMALL
    | {
        "model_type": "glm4_moe",
        "n_routed_experts": 6,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000.0, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": SMALL
    | {
        "model_type": "gpt_oss",
        "num_local_experts": 6,
        "intermediate_size": 14,
        "sliding_window": 5,
        "rope_parameters": yarn(100.0, 8.0, 8, truncate=False),
    },
    "llama": _dense("llama", rope_parameters={"rope_type": "llama3", "rope_theta": 100.0, **LLAMA3}),
    "qwen2": _dense("qwen2", tie_word_embeddings=True),
    "qwen3": _dense("qwen3"),
    "qwen3_moe_every_other_layer": TINY
    | {"model_type": "qwen3_moe", "num_experts": 4, "num_hidden_layers": 4, "decoder_sparse_step": 2},
}
LIMIT = 800_000
"""Bytes of all files together."""


def main() -> None:
    torch.set_num_threads(1)  # one order of summation
    total = 0
    for seed, name in enumerate(GOLDENS):
        model = make_model(CONFIGS[name], seed)
        tokens = tokens_for(model, seed)
        # One file has the experts stacked, as transformers holds them; the others have one tensor each.
        state = in_memory(model) if "fused" in name else on_disk(model)
        config = json.loads(model.config.to_json_string())
        path = save(name, Golden(config, state, tokens, compute(model, tokens).logits))
        total += path.stat().st_size
        print(f"{path}: {path.stat().st_size:,} bytes")
    if total > LIMIT:
        sys.exit(f"{total:,} bytes of golden files are more than {LIMIT:,}; make the models smaller")


if __name__ == "__main__":
    main()
