"""A small model folder: random weights, our own tokenizer, and what tests change about them."""

import json
from pathlib import Path

import numpy as np

from composer_jax.checkpoint.huggingface import save_hf
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.models.model_def import ModelDef
from tests.models.small import forward, random_weights, rows, small

CONFIG = small(vocab_size=290, max_context=640, n_mtp_modules=0, embedding_taps=0, d_model=16, n_layers=2)
WEIGHTS = random_weights(CONFIG)
TEXT = "def add(a, b):\n    return a + b\n"


def write_model(folder: Path, *, tokenizer: bool = True, generation: dict | None = None) -> Path:
    """Writes the folder of a Hugging Face checkpoint."""
    save_hf(folder, ModelDef(CONFIG), *WEIGHTS)
    if tokenizer:
        Tokenizer.train([TEXT * 40], CONFIG.vocab_size).save(folder / "tokenizer.json")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def greedy_tokens(prompt: list[int], count: int, ends: tuple[int, ...]) -> list[int]:
    """The likeliest continuation by whole forward passes, without a cache."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        length = 64 * -(-len(tokens) // 64)
        logits = forward(CONFIG)(*WEIGHTS, rows([[tokens]], length))["logits"]
        tokens.append(int(np.argmax(logits[0, len(tokens) - 1])))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]
