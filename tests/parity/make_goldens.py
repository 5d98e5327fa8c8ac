"""Writes the golden files of tests/parity/goldens. Needs the extra `parity`:

    python -m tests.parity.make_goldens

The same machine writes the same bytes every time; another may differ in the last bits of the logits.
"""

import json
import sys

import torch

from tests.parity.deepseek_v3 import PLAIN, compute, in_memory, make_model, on_disk, tokens_for
from tests.parity.goldens import GOLDENS, Golden, save

CONFIGS = {
    "direct_query_tied": {"tie_word_embeddings": True, "n_shared_experts": 2, "routed_scaling_factor": 2.446},
    "deepseek_grouped_fused": {
        "q_lora_rank": 18,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 2,
        "num_hidden_layers": 4,
        "routed_scaling_factor": 2.5,
    },
    "kimi_like": {
        "q_lora_rank": 18,
        "n_routed_experts": 12,
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
    },
}
LIMIT = 600_000
"""Bytes of all files together."""


def main() -> None:
    torch.set_num_threads(1)  # one order of summation
    total = 0
    for seed, name in enumerate(GOLDENS):
        model = make_model(PLAIN | CONFIGS[name], seed)
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
