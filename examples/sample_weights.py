"""Samples an answer from a folder of published weights: `python -m examples.sample_weights DIR "your question"`.

DIR is a Hugging Face folder: config.json, safetensors files, tokenizer.json and a chat template. Without DIR, the
script writes a small one with random weights first, which answers with random tokens.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import jax

from composer_jax import ModelConfig, ModelDef, Tokenizer, load_hf, save_hf
from composer_jax.data.chat_format import Message
from composer_jax.data.load_chat_format import load_chat_format
from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.engine import Sampler
from composer_jax.sampler.policy import SamplingParams


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


async def answer(folder: Path, question: str, max_tokens: int = 32, seed: int = 0) -> str:
    """The text that the model in `folder` samples after one user message; the seed fixes it."""
    mesh = make_mesh(jax.devices()[:1])
    definition, params, router_bias = load_hf(folder, mesh, "float32")
    chat = load_chat_format(folder)
    config = SamplerConfig(slots=1, capacity=min(256, definition.config.max_context), prefill_shapes=((1, 64),))
    sampler = Sampler(definition, mesh, config, end_tokens=(chat.end,))
    sampler.update(params, router_bias, version=0)
    prompt = [*chat.render([Message("user", question)]), *chat.generation_prompt]
    async with sampler.serving():
        session = await sampler.open(seed)
        sample = await session.sample(prompt, SamplingParams(max_tokens=max_tokens))
        session.close()
    return chat.text(sample.tokens)


def main(folder: str = "", question: str = "Write a function that adds two numbers.") -> None:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(folder or f"{temporary}/model")
        if not folder:
            write_small_model(path)
        print(asyncio.run(answer(path, question)))


if __name__ == "__main__":
    main(*sys.argv[1:])
