"""The tensors of a GGUF file under the names, shapes and row order of transformers.

llama.cpp rotates the pairs (2i, 2i + 1) of a llama head, transformers the pairs (i, i + P/2). Its converter
therefore reorders the rows of q and k of that architecture, and reading them puts the rows back.
"""

import re

import numpy as np

from composer_jax.checkpoint.gguf.architectures import EMBEDDING, HEAD, Architecture
from composer_jax.checkpoint.gguf.container import GGUFContainer
from composer_jax.checkpoint.gguf.rope_factors import ROPE_FACTORS
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
_IGNORED = (ROPE_FACTORS,)  # part of config.json


class GGUFTensors:
    """Tensors by their Hugging Face names, each read and dequantised alone (TensorSource of huggingface/weights.py).

    Raises:
      UserError: the file has a tensor that its architecture does not have.
    """

    def __init__(self, file: GGUFContainer, architecture: Architecture, *, heads: int, kv_heads: int):
        self._file = file
        self._stored: dict[str, str] = {}
        self._permuted: dict[str, int] = {}
        """Number of heads, for tensors whose rows are put back in order."""
        for stored in file.shapes:
            if stored in _IGNORED:
                continue
            match = _IN_LAYER.fullmatch(stored)
            part = match and _OF_LAYER.get(match[2])
            if part is None and stored not in _WHOLE:
                raise UserError(
                    f"{file.path} has the tensor {stored}, which no {architecture.model_type} network has; "
                    "the file cannot be read."
                )
            name = _WHOLE[stored] if match is None else f"model.layers.{match[1]}.{part}.{match[3]}"
            self._stored[name] = stored
            if architecture.permuted and match and match[2] in ("attn_q", "attn_k"):
                self._permuted[name] = heads if match[2] == "attn_q" else kv_heads
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
