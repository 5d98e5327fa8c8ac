"""A small published model for tests: a Hugging Face folder with weights, a tokenizer and a chat template."""

import functools
from pathlib import Path

from composer_jax.checkpoint.huggingface import save_hf
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef
from tests.data.formats import TEMPLATES
from tests.data.model_folders import tokenizer_json, write_folder

NETWORK = ModelConfig(
    vocab_size=512,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    qk_rope_dim=8,
    v_head_dim=8,
    rope_halves=True,
    qk_norm=True,
    expert_ff_dim=16,
    n_experts=4,
    experts_per_token=2,
    router_scores="softmax",
    max_context=4096,
    compute_dtype="float32",
)
"""A network of the family qwen3_moe."""

TEXTS = [
    '{"type": "function", "function": {"name": "shell", "description": "Run a command", "parameters": ',
    '{"type": "object", "properties": {"path": {"type": "string", "description": "path relative to the workspace"}}',
] * 8
"""Text like the declarations of tools, so that the small tokenizer writes them in few tokens."""


@functools.cache
def weights():
    """(params, router_bias) of NETWORK, random."""
    return ModelDef(NETWORK).init(3)


def write_base(folder: Path, *, added: int = 0, chat: str = "qwen", template: str = "") -> Path:
    """Writes the folder of a published model.

    added: number of tokens that are added to its tokenizer.
    chat: its chat format, a name of tests.data.formats.TEMPLATES.
    template: another template for the tokens of that format.
    """
    save_hf(str(folder), ModelDef(NETWORK), *weights())
    tokens, published = TEMPLATES[chat]
    tokens = tokens | {f"<|extra_{i}|>": True for i in range(added)}
    return write_folder(folder, tokenizer_json(tokens, TEXTS, vocab_size=480), template or published)
