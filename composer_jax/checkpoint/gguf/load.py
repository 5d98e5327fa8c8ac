"""Reads the weights of a GGUF file directly into sharded arrays, layer by layer."""

import dataclasses
from pathlib import Path

from jax.sharding import Mesh

from composer_jax.checkpoint.dtypes import require_float_dtype
from composer_jax.checkpoint.gguf.virtual_folder import GGUFFolder, open_gguf
from composer_jax.checkpoint.huggingface.config_json import model_config
from composer_jax.checkpoint.huggingface.load import Loaded, load_tensors
from composer_jax.models.model_def import ModelDef


def load_gguf(path: str | Path | GGUFFolder, mesh: Mesh | None = None, dtype: str | None = None) -> Loaded:
    """Loads the network of a GGUF file, dequantised, with its weights sharded over the mesh.

    Args:
      path: a local file, or the result of `open_gguf`.
      mesh: None puts everything on the first device of this process.
      dtype: of the weights and of the computation: float32, bfloat16 or float16. None is float32, which keeps every
        dequantised value; bfloat16 needs half the memory.

    Raises:
      UserError: as `open_gguf` and `load_hf`, before any weight is read.
    """
    folder = path if isinstance(path, GGUFFolder) else open_gguf(path)
    dtype = require_float_dtype(dtype or folder.config["torch_dtype"])
    config = dataclasses.replace(model_config(folder.config), param_dtype=dtype, compute_dtype=dtype)
    return load_tensors(folder.tensors, ModelDef(config), mesh, folder.path)
