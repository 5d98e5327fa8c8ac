"""Writes the GGUF file of a Hugging Face folder with a dense Llama network in float32, for llama.cpp.

The file has no tokenizer (`tokenizer.ggml.model` is "none"): llama.cpp gets and returns token ids.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Parts of tensor names: those of Hugging Face and those of llama.cpp."""


def convert_tensor(name: str, array: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    """Returns a tensor's name and values in a GGUF file.

    llama.cpp rotates pairs of neighbouring rows of queries and keys, transformers the rows of a head's two halves.
    """
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for projection, n_heads in heads.items():
        if f".{projection}." in name:
            rows, columns = array.shape
            array = array.reshape(n_heads, 2, rows // n_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    for theirs, stored in NAMES.items():
        name = name.replace(theirs, stored)
    return name, array


def write_gguf(folder: Path, file: Path) -> None:
    """Writes a GGUF file with the network and the weights of a Hugging Face folder.

    Raises:
      ValueError: the network is not a Llama network with plain rotary positions, or a tensor is not float32.
    """
    import gguf
    from safetensors.numpy import load_file  # pyright: ignore[reportMissingImports]  # optional

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise ValueError(f"{folder} has a network that is not a plain Llama network; only such files are written.")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_tokenizer_model("none")
    for path in sorted(folder.glob("*.safetensors")):
        for name, array in load_file(path).items():
            if array.dtype != np.float32:
                raise ValueError(f"{path} has {name} in {array.dtype}; only float32 is written.")
            writer.add_tensor(*convert_tensor(name, array, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
