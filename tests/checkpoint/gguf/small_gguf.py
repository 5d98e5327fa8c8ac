"""Writes small GGUF files for the tests of this folder, with the writer of the gguf library."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD, HIDDEN = 32, 2, 4, 2, 8, 64
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ["Ġ Ġ", "ĠĠ ĠĠ", "i n", "Ġ x", "t h", "th e", "Ġ the", "1 2", "12 3", "123 4", "Ġ 1", "' s", "r e", "Ċ Ċ"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def vocabulary() -> list[str]:
    """Returns the tokens: control tokens, the bytes, a user-defined token, and what the merges make of the bytes."""
    tokens = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "<think>"]
    return tokens + [merge.replace(" ", "") for merge in MERGES]


TOKENS = vocabulary()


def metadata(arch: str = "llama") -> dict[str, Any]:
    """Returns the metadata of a small network with a tokenizer. Whole numbers are written as uint32."""
    kinds = [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL))
    kinds[TOKENS.index("<think>")] = 4
    return {
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": WIDTH,
        f"{arch}.block_count": LAYERS,
        f"{arch}.feed_forward_length": HIDDEN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 1000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def hf_tensors(arch: str = "llama", *, tied: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random float32 tensors under Hugging Face names, whose order of rows is that of transformers."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / np.float32(shape[-1] ** 0.5)  # noqa: E731
    tensors = {"model.embed_tokens.weight": draw(len(TOKENS), WIDTH), "model.norm.weight": 1 + draw(WIDTH)}
    if not tied:
        tensors["lm_head.weight"] = draw(len(TOKENS), WIDTH)
    for layer in range(LAYERS):
        add = lambda name, array, layer=layer: tensors.update({f"model.layers.{layer}.{name}": array})  # noqa: E731
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{norm}.weight", 1 + draw(WIDTH))
        for letter, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            add(f"self_attn.{letter}_proj.weight", draw(heads * HEAD, WIDTH))
            if arch == "qwen2":
                add(f"self_attn.{letter}_proj.bias", draw(heads * HEAD))
            if arch == "qwen3" and letter != "v":
                add(f"self_attn.{letter}_norm.weight", 1 + draw(HEAD))
        add("self_attn.o_proj.weight", draw(WIDTH, HEADS * HEAD))
        add("mlp.gate_proj.weight", draw(HIDDEN, WIDTH))
        add("mlp.up_proj.weight", draw(HIDDEN, WIDTH))
        add("mlp.down_proj.weight", draw(WIDTH, HIDDEN))
    return tensors


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(tensors: Mapping[str, np.ndarray], arch: str = "llama") -> dict[str, np.ndarray]:
    """Returns the tensors as llama.cpp's converter names and orders them."""
    converted = {}
    for name, array in tensors.items():
        for theirs, stored in _NAMES.items():
            name = name.replace(theirs, stored)
        if arch == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = HEADS if "attn_q" in name else KV_HEADS
            array = array.reshape(heads, 2, HEAD // 2, -1).swapaxes(1, 2).reshape(array.shape)
        converted[name] = array
    return converted


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
    arch: str = "llama",
    quantized: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Writes a file; `quantized` names the type of tensors that are not float32. Returns the path."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            assert isinstance(value, Sequence)
            writer.add_array(key, value)
    for name, array in tensors.items():
        kind = (quantized or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_small(path: Path, arch: str = "llama", *, tied: bool = True, without: Sequence[str] = (), **changes) -> Path:
    """Writes a small model in float32; `changes` are metadata with __ for a dot, `without` what to leave out."""
    values = metadata(arch) | {key.replace("__", "."): value for key, value in changes.items()}
    tensors = gguf_tensors(hf_tensors(arch, tied=tied), arch)
    keep = lambda table: {name: value for name, value in table.items() if name not in without}  # noqa: E731
    return write_gguf(path, keep(tensors), keep(values), arch)
