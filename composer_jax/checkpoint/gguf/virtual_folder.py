"""A GGUF file as the folder of a Hugging Face model, with tensors of transformers' names, shapes and row order.

llama.cpp rotates the pairs (2i, 2i + 1) of a llama head, transformers the pairs (i, i + P/2). Its converter
therefore reorders the rows of q and k of that architecture, and reading them puts the rows back.
"""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.checkpoint.gguf.architectures import ARCHITECTURES, EMBEDDING, HEAD, ROPE_FACTORS, config_json
from composer_jax.checkpoint.gguf.container import GGUFContainer
from composer_jax.checkpoint.gguf.tokenizer import has_tokenizer, tokenizer_texts
from composer_jax.errors import UserError

_WHOLE = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight", "output_norm.weight": "model.norm.weight"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFFolder:
    """What a Hugging Face folder of the same model would hold. Made by `open_gguf`.

    path, name: of the file. config: its config.json. tensors: `shapes`, `sizes` (bytes in the file) and `read(name)`
    -> float32, under Hugging Face names. has_tokenizer: whether the file holds a tokenizer. With `name` and `text` it
    is a source of texts for `data.load_chat_format`.
    """

    def __init__(self, file: GGUFContainer):
        self._file = file
        self.path = self.name = file.path
        self.config: dict[str, Any] = config_json(file)
        self.tensors = GGUFTensors(file, self.config)
        self.has_tokenizer = has_tokenizer(file)

    @cached_property
    def texts(self) -> dict[str, str]:
        """The tokenizer's files, name -> content: tokenizer.json, tokenizer_config.json, generation_config.json.

        Raises:
          UserError: the file has no tokenizer, or one that is not read; the weights can still be loaded.
        """
        return tokenizer_texts(self._file)

    def text(self, file: str) -> str | None:
        """Returns the content of config.json or of a file of `texts`, or None; raises UserError as `texts`."""
        return json.dumps(self.config, indent=2) if file == "config.json" else self.texts.get(file)


def open_gguf(path: str | Path) -> GGUFFolder:
    """Opens a GGUF file as a virtual Hugging Face folder; reads its metadata, no tensor but the rotary factors.

    Raises:
      UserError: the library is missing; the file is missing, no GGUF, truncated, or holds something that is not read.
    """
    path = str(path)
    if "://" not in path:
        path = str(Path(path).expanduser().absolute())
    return GGUFFolder(GGUFContainer(path))


class GGUFTensors:
    """Tensors by their Hugging Face names, each read and dequantised alone (TensorSource of huggingface/weights.py).

    Raises:
      UserError: the file has a tensor that its architecture does not have.
    """

    def __init__(self, file: GGUFContainer, config: Mapping[str, Any]):
        """config: the config.json of the file."""
        permuted = ARCHITECTURES[config["model_type"]].permuted
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        self._file = file
        self._stored: dict[str, str] = {}
        self._permuted: dict[str, int] = {}
        """Number of heads, for tensors whose rows are put back in order."""
        for stored in file.shapes:
            if stored == ROPE_FACTORS:
                continue  # part of config.json
            match = _IN_LAYER.fullmatch(stored)
            part = match and _OF_LAYER.get(match[2])
            if part is None and stored not in _WHOLE:
                raise UserError(
                    f"{file.path} has the tensor {stored}, which no {config['model_type']} network has; "
                    "the file cannot be read."
                )
            name = _WHOLE[stored] if match is None else f"model.layers.{match[1]}.{part}.{match[3]}"
            self._stored[name] = stored
            if permuted and match and match[2] in heads:
                self._permuted[name] = heads[match[2]]
        self.shapes = {name: file.shapes[stored] for name, stored in self._stored.items()}
        """Shapes by name."""
        self.sizes = {name: file.sizes[stored] for name, stored in self._stored.items()}
        """Bytes in the file, by name."""

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as float32."""
        array = self._file.read(self._stored[name])
        heads = self._permuted.get(name)
        return array if heads is None else interleaved_to_halves(array, heads)


def interleaved_to_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows [heads * P, ...] with the rotary pairs (2i, 2i + 1) of every head moved to (i, i + P/2)."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
