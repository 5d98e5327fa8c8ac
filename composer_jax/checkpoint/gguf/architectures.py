"""config.json of a GGUF file: general.architecture and its keys -> the keys of transformers.

The keys of GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Standardized key-value pairs".
"""

import dataclasses
from typing import Any

from composer_jax.checkpoint.gguf.container import GGUFContainer
from composer_jax.checkpoint.gguf.rope_factors import ROPE_FACTORS, llama3_scaling
from composer_jax.errors import UserError

EMBEDDING, HEAD = "token_embd.weight", "output.weight"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One value of general.architecture."""

    model_type: str
    """The family of transformers."""
    class_name: str
    """Its class, for config.json's `architectures`."""
    permuted: bool
    """Whether the rows of q and k are stored in the order of interleaved rotary pairs (2i, 2i + 1) instead of
    transformers' (i, i + P/2)."""
    qkv_bias: bool | None
    """Whether q, k and v have biases; None: the file's tensors say so, and o has one, too."""
    qk_norm: bool
    """Whether the heads of q and k are normalised."""


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted=True, qkv_bias=None, qk_norm=False),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", permuted=False, qkv_bias=True, qk_norm=False),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", permuted=False, qkv_bias=False, qk_norm=True),
}

_SIZES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
_ONLY = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "embedding_scale": 0.0,
    "use_parallel_residual": False,
}
"""Keys that change the network, and the value that means the plain one; another is refused by name."""


def find_architecture(file: GGUFContainer) -> tuple[str, Architecture]:
    """Returns general.architecture and what it means. Raises a UserError if it is not supported."""
    name = file.text("general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(
            f"{file.path} has general.architecture={name!r}, which is not read from GGUF; "
            f"supported are {', '.join(ARCHITECTURES)}."
        )
    return name, ARCHITECTURES[name]


def config_json(file: GGUFContainer) -> dict[str, Any]:
    """Returns the config.json of the network in a file; torch_dtype is float32, in which tensors are read.

    Raises:
      UserError: another architecture, a missing key, or a feature of the network that is not read.
    """
    name, architecture = find_architecture(file)
    for key, plain in _ONLY.items():
        value = file.number(f"{name}.{key}", type(plain), plain)
        if value != plain:
            raise UserError(f"{file.path} has {name}.{key}={value!r}; only {plain!r} is supported.")
    if EMBEDDING not in file.shapes:
        raise UserError(f"{file.path} lacks the tensor {EMBEDDING}; does it hold a whole model?")
    sizes = {ours: file.number(f"{name}.{key}", int) for ours, key in _SIZES.items()}
    heads = sizes["num_attention_heads"]
    if not heads:
        raise UserError(f"{file.path} has {name}.attention.head_count=0.")
    width = file.number(f"{name}.attention.key_length", int, 0)
    width = width or file.number(f"{name}.rope.dimension_count", int, 0) or sizes["hidden_size"] // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        actual = file.number(f"{name}.{key}", int, width)
        if actual != width:
            raise UserError(f"{file.path} has {name}.{key}={actual} for heads of {width}; only {width} is supported.")
    theta = file.number(f"{name}.rope.freq_base", float, 10_000.0)  # llama.cpp's and transformers' default
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": file.shapes[EMBEDDING][0],
        **sizes,
        "num_key_value_heads": file.number(f"{name}.attention.head_count_kv", int, heads),
        "head_dim": width,
        "hidden_act": "silu",
        "rms_norm_eps": file.number(f"{name}.attention.layer_norm_rms_epsilon", float),
        "rope_theta": theta,
        "rope_scaling": _scaling(file, name, theta, width),
        "tie_word_embeddings": HEAD not in file.shapes,
        "torch_dtype": "float32",
    }
    if architecture.qkv_bias is None:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.shapes
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.shapes
    for token in ("bos", "eos", "padding"):
        if f"tokenizer.ggml.{token}_token_id" in file:
            key = "pad_token_id" if token == "padding" else f"{token}_token_id"
            config[key] = file.number(f"tokenizer.ggml.{token}_token_id", int)
    return config


def _scaling(file: GGUFContainer, name: str, theta: float, width: int) -> dict[str, Any] | None:
    """Returns rope_scaling of config.json. Raises a UserError for a scaling that is not read."""
    kind = file.text(f"{name}.rope.scaling.type", "none")
    if ROPE_FACTORS in file.shapes:
        if kind != "none":
            raise UserError(f"{file.path} scales positions by {kind!r} and by the tensor {ROPE_FACTORS}; one is read.")
        scaling = llama3_scaling(file.read(ROPE_FACTORS), theta, width)
        if scaling is None:
            raise UserError(f"{ROPE_FACTORS} in {file.path} does not hold the frequencies of Llama 3's scaling.")
        return scaling
    if kind == "none":
        return None
    if kind != "yarn":
        raise UserError(f"{file.path} has {name}.rope.scaling.type={kind!r}; supported are 'none' and 'yarn'.")
    for key, plain in (("attn_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_ext_factor", 1.0)):
        value = file.number(f"{name}.rope.scaling.{key}", float, plain)
        if value != plain:
            raise UserError(f"{file.path} has {name}.rope.scaling.{key}={value}; only {plain} is supported.")
    scaling = {
        "rope_type": "yarn",
        "factor": file.number(f"{name}.rope.scaling.factor", float),
        "original_max_position_embeddings": file.number(f"{name}.rope.scaling.original_context_length", int),
    }
    for key in ("beta_fast", "beta_slow"):
        if f"{name}.rope.scaling.yarn_{key}" in file:
            scaling[key] = file.number(f"{name}.rope.scaling.yarn_{key}", float)
    return scaling
