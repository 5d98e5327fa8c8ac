"""Samples an answer from a folder of published weights: `python -m examples.sample_weights DIR "your question"`.

DIR is a Hugging Face folder: config.json, safetensors files, tokenizer.json and a chat template. Without DIR, the
script writes a small one with random weights first, which answers with random tokens.
"""

import sys
import tempfile
from pathlib import Path

from composer_jax import ModelConfig, ModelDef, Tokenizer, load_hf, save_hf


def write_small_model(folder: Path) -> None:
    """A DeepSeek-shaped network of two layers with random weights, and its tokenizer."""
    tokenizer = Tokenizer.train(["def add(a, b):\n    return a + b\n"] * 20, 280)
    definition = ModelDef(
        ModelConfig(
            vocab_size=tokenizer.vocab_size,
            d_model=64,
            n_layers=2,
            n_dense_layers=1,
            n_heads=2,
            kv_lora_rank=32,
            qk_nope_dim=16,
            qk_rope_dim=8,
            v_head_dim=16,
            dense_ff_dim=128,
            expert_ff_dim=32,
            n_experts=4,
            experts_per_token=2,
            n_shared_experts=1,
            max_context=256,
            dispatch="dense",
        )
    )
    save_hf(folder, definition, *definition.init(seed=0))
    tokenizer.save(folder / "tokenizer.json")


def answer(folder: Path, question: str, max_tokens: int = 32, seed: int = 0) -> str:
    """The text that the model in `folder` samples after one user message; the seed fixes it."""
    model = load_hf(folder, dtype="float32")
    return model.chat(question, max_tokens=max_tokens, seed=seed)


def main(folder: str = "", question: str = "Write a function that adds two numbers.") -> None:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(folder or f"{temporary}/model")
        if not folder:
            write_small_model(path)
        print(answer(path, question))


if __name__ == "__main__":
    main(*sys.argv[1:])
