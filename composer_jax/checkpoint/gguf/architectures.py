"""config.json of a GGUF file: general.architecture and its keys -> the keys of transformers.

The keys of GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Standardized key-value pairs".
"""

import dataclasses
import math
from typing import Any

import numpy as np

from composer_jax.checkpoint.gguf.container import GGUFContainer
from composer_jax.errors import UserError

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_TOLERANCE = 1e-4  # of ROPE_FACTORS, relative; the tensor is float32, and the numbers that explain it are whole


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One value of general.architecture, which is also the model_type of transformers."""

    class_name: str
    """Its class, for config.json's `architectures`."""
    permuted: bool
    """Whether the rows of q and k are stored in the order of interleaved rotary pairs (2i, 2i + 1) instead of
    transformers' (i, i + P/2)."""
    qkv_bias: bool | None
    """Whether q, k and v have biases; None: the file's tensors say so, and o has one, too."""


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", permuted=True, qkv_bias=None),
    "qwen2": Architecture("Qwen2ForCausalLM", permuted=False, qkv_bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM", permuted=False, qkv_bias=False),
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


def config_json(file: GGUFContainer) -> dict[str, Any]:
    """Returns the config.json of the network in a file; torch_dtype is float32, in which tensors are read.

    Raises:
      UserError: another architecture, a missing key, or a feature of the network that is not read.
    """
    name = file.value("general.architecture", str)
    if name not in ARCHITECTURES:
        raise UserError(
            f"{file.path} has general.architecture={name!r}, which is not read from GGUF; "
            f"supported are {', '.join(ARCHITECTURES)}."
        )
    architecture = ARCHITECTURES[name]
    for key, plain in _ONLY.items():
        value = file.value(f"{name}.{key}", type(plain), plain)
        if value != plain:
            raise UserError(f"{file.path} has {name}.{key}={value!r}; only {plain!r} is supported.")
    if EMBEDDING not in file.shapes:
        raise UserError(f"{file.path} lacks the tensor {EMBEDDING}; does it hold a whole model?")
    sizes = {ours: file.value(f"{name}.{key}", int) for ours, key in _SIZES.items()}
    heads = sizes["num_attention_heads"]
    if not heads:
        raise UserError(f"{file.path} has {name}.attention.head_count=0.")
    width = file.value(f"{name}.attention.key_length", int, 0)
    width = width or file.value(f"{name}.rope.dimension_count", int, 0) or sizes["hidden_size"] // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        actual = file.value(f"{name}.{key}", int, width)
        if actual != width:
            raise UserError(f"{file.path} has {name}.{key}={actual} for heads of {width}; only {width} is supported.")
    theta = file.value(f"{name}.rope.freq_base", float, 10_000.0)  # llama.cpp's and transformers' default
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": name,
        "vocab_size": file.shapes[EMBEDDING][0],
        **sizes,
        "num_key_value_heads": file.value(f"{name}.attention.head_count_kv", int, heads),
        "head_dim": width,
        "hidden_act": "silu",
        "rms_norm_eps": file.value(f"{name}.attention.layer_norm_rms_epsilon", float),
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
            config[key] = file.value(f"tokenizer.ggml.{token}_token_id", int)
    return config


def _scaling(file: GGUFContainer, name: str, theta: float, width: int) -> dict[str, Any] | None:
    """Returns rope_scaling of config.json. Raises a UserError for a scaling that is not read."""
    kind = file.value(f"{name}.rope.scaling.type", str, "none")
    if ROPE_FACTORS in file.shapes:
        if kind != "none":
            raise UserError(f"{file.path} scales positions by {kind!r} and by the tensor {ROPE_FACTORS}; one is read.")
        scaling = _llama3_scaling(file.read(ROPE_FACTORS), theta, width)
        if scaling is None:
            raise UserError(f"{ROPE_FACTORS} in {file.path} does not hold the frequencies of Llama 3's scaling.")
        return scaling
    if kind == "none":
        return None
    if kind != "yarn":
        raise UserError(f"{file.path} has {name}.rope.scaling.type={kind!r}; supported are 'none' and 'yarn'.")
    for key, plain in (("attn_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_ext_factor", 1.0)):
        value = file.value(f"{name}.rope.scaling.{key}", float, plain)
        if value != plain:
            raise UserError(f"{file.path} has {name}.rope.scaling.{key}={value}; only {plain} is supported.")
    scaling = {
        "rope_type": "yarn",
        "factor": file.value(f"{name}.rope.scaling.factor", float),
        "original_max_position_embeddings": file.value(f"{name}.rope.scaling.original_context_length", int),
    }
    for key in ("beta_fast", "beta_slow"):
        if f"{name}.rope.scaling.yarn_{key}" in file:
            scaling[key] = file.value(f"{name}.rope.scaling.yarn_{key}", float)
    return scaling


def _llama3_scaling(divisors: np.ndarray, theta: float, width: int) -> dict[str, Any] | None:
    """Returns Llama 3's rope_scaling of config.json, of which GGUF files store the result; None if none explains it.

    transformers describes it by four numbers; the frequency f of a pair, which has the wavelength w = 2 pi / f, becomes

        f                      if w < original / high
        f / factor             if w > original / low
        ((1 - s) / factor + s) f, s = (original / w - low) / (high - low), between

    llama.cpp stores the divisors of f, one per pair (Llama 3.1's rope scaling: arXiv 2407.21783, section 3.4.3, and
    `_compute_llama3_parameters` of transformers). Only two ratios of `original`, `low` and `high` matter, so that
    low_freq_factor is 1, as published.

    Args:
      divisors: [P/2] divisor of the frequency of each rotary pair.
      theta: base of the frequencies.
      width: P, rotated numbers of a head.
    """
    if divisors.shape != (width // 2,) or not np.isfinite(divisors).all() or (divisors < 1).any():
        return None
    divisors = divisors.astype(np.float64)
    factor = float(np.round(divisors.max(), 4))
    wavelengths = 2 * math.pi * theta ** (np.arange(0, width, 2) / width)
    between = (divisors > 1 + _TOLERANCE) & (divisors < factor * (1 - _TOLERANCE))
    if factor == 1 or between.sum() < 2:
        return None
    # s is linear in 1/w: s = slope / w + offset, with slope = original / (high - 1) and offset = -1 / (high - 1).
    s = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    slope, offset = np.polyfit(1 / wavelengths[between], s, 1)
    if offset >= 0:
        return None
    high = float(np.round(1 - 1 / offset, 2))
    original = round(slope * (high - 1))
    if original < 1 or high <= 1:
        return None
    s = np.clip((original / wavelengths - 1) / (high - 1), 0, 1)
    if not np.allclose(divisors, 1 / ((1 - s) / factor + s), rtol=_TOLERANCE):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
