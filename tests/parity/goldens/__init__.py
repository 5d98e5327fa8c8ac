"""Golden files: small models with the logits transformers computes for them, so that nobody needs PyTorch to compare.

`python -m tests.parity.make_goldens` writes them; one .npz each, which holds

    config         config.json, as text
    weights/NAME   the tensors under transformers' names, float16 (exactly the values it computed with, in float32)
    tokens         [B,S] int32
    logits         [B,S,W] float32
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parent
GOLDENS = (
    "direct_query_tied",
    "deepseek_grouped_fused",
    "kimi_like",
    "qwen3_moe",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe_every_other_layer",
)


class Golden(NamedTuple):
    config: dict[str, Any]
    state: dict[str, np.ndarray]
    """float32"""
    tokens: np.ndarray
    logits: np.ndarray


def load(name: str) -> Golden:
    with np.load(FOLDER / f"{name}.npz") as file:
        state = {key.removeprefix("weights/"): file[key].astype(np.float32) for key in file if key[:8] == "weights/"}
        return Golden(json.loads(str(file["config"])), state, file["tokens"], file["logits"])


def save(name: str, golden: Golden) -> Path:
    """Writes the file; the same values give the same bytes."""
    weights = {f"weights/{key}": golden.state[key].astype(np.float16) for key in sorted(golden.state)}
    for key, array in weights.items():
        np.testing.assert_array_equal(array.astype(np.float32), golden.state[key[8:]], err_msg=f"{name}: {key}")
    path = FOLDER / f"{name}.npz"
    config = json.dumps(golden.config, sort_keys=True)
    np.savez_compressed(path, config=config, tokens=golden.tokens, logits=golden.logits, **weights)
    return path
