"""A small network with weights, and Hugging Face folders of it, for the tests of this folder."""

import json
from pathlib import Path

import chex
import jax
import numpy as np

from composer_jax.checkpoint.folder import Folder
from composer_jax.checkpoint.huggingface import save_hf
from composer_jax.checkpoint.huggingface.safetensors_files import write_safetensors
from composer_jax.models.model_def import ModelDef
from tests.models.small import random_weights, small

# Expert width 32: groups of int4, and every mesh, divide it.
CONFIG = small(
    n_layers=4,
    d_model=16,
    expert_ff_dim=32,
    q_lora_rank=16,
    n_mtp_modules=0,
    embedding_taps=0,
    param_dtype="bfloat16",
)
DEFINITION = ModelDef(CONFIG)


WEIGHTS = jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), random_weights(CONFIG), DEFINITION.shapes())


def assert_same(actual, expected) -> None:
    """Asserts that two sequences of trees are equal, dtypes included."""
    chex.assert_trees_all_equal(tuple(actual), tuple(expected), strict=True)


def save_weights(folder: Path | str, **changes) -> Path | str:
    """Saves WEIGHTS as a Hugging Face folder; returns the folder."""
    save_hf(folder, DEFINITION, *WEIGHTS, **changes)
    return folder


def write_folder(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    """Writes a checkpoint folder from tensors in their stored form."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    entries = [(name, array.shape, array.dtype) for name, array in tensors.items()]
    write_safetensors(Folder(folder), "model.safetensors", entries, lambda name: np.ascontiguousarray(tensors[name]))
    return folder
