"""The tensors of a checkpoint in memory <-> Params, by the layouts that reading and writing folders follow."""

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np

from composer_jax.checkpoint.huggingface.tensor_layout import copy_into, leaf_shapes
from composer_jax.checkpoint.huggingface.weights import (
    export_layouts,
    flatten_leaves,
    group_by_leaf,
    match_layouts,
    unflatten_leaves,
)
from composer_jax.models.config import ModelConfig


def from_tensors(state: Mapping[str, np.ndarray], config: ModelConfig):
    """(params, router_bias) as NumPy arrays in the dtypes of the network."""
    source = SimpleNamespace(shapes={name: a.shape for name, a in state.items()}, read=state.__getitem__)
    leaves = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in leaf_shapes(config).items()}
    for leaf, tensors in group_by_leaf(match_layouts(source, config)).items():
        for name, tensor in tensors:
            copy_into(leaves[leaf][tensor.index], tensor.slice_leaf(state[name], leaf))
    return unflatten_leaves(leaves)


def to_tensors(params, router_bias, config: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint in the published form, in their dtypes, bit for bit."""
    table = export_layouts(config)
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_leaves(params, router_bias, config, table).items()}
    return {name: tensor.join_leaves(leaves) for name, tensor in table.items()}
