"""Tensors of a checkpoint <-> Params in host memory, and what both ways of reading have in common.

Where tensors come from is a `Source`: arrays in memory, or files that are read one tensor at a time.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from composer_jax.checkpoint.huggingface.families import find_family
from composer_jax.checkpoint.huggingface.tensor_layout import (
    TensorLayout,
    absent_leaves,
    copy_into,
    duplicate_tensors,
    leaf_shapes,
    tensor_layouts,
)
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import Params

_SHOWN = 4  # names listed in one error


class Source(Protocol):
    """Named tensors whose shapes are known before any of them is read."""

    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray:
        """The tensor in a float dtype of two bytes or more."""


class InMemory:
    """Tensors that are there already. Raises a UserError for dtypes that carry no values by themselves."""

    def __init__(self, state: Mapping[str, np.ndarray]):
        for name, array in state.items():
            if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
                raise UserError(f"{name} is {array.dtype}; arrays in memory must be floats of two bytes or more.")
        self.shapes = {name: array.shape for name, array in state.items()}
        self.read = state.__getitem__


def match_layouts(source: Source, config: ModelConfig) -> dict[str, TensorLayout]:
    """The layout of the tensors of `source`, all of which fit; nothing is read but copies, which must equal what they
    are of.

    Raises:
      UserError: names the tensors that are missing, unexpected, of another shape or no copies.
    """
    shapes = {name: shape for name, shape in source.shapes.items() if not _carries_nothing(name, shape)}
    repeated = duplicate_tensors(config)
    if config.tie_embeddings:
        repeated["lm_head.weight"] = "model.embed_tokens.weight"
    repeated = {name: of for name, of in repeated.items() if shapes.pop(name, None) is not None}
    fused = any(name.endswith("mlp.experts.gate_up_proj") for name in shapes)
    table = tensor_layouts(config, fused_experts=fused)
    require_shapes("The checkpoint", shapes, {name: tensor.shape for name, tensor in table.items()})
    for name, of in repeated.items():
        if not np.array_equal(source.read(name), source.read(of)):
            way_out = (
                "set tie_word_embeddings to false"
                if name == "lm_head.weight"
                else "leave the modules out (mtp=False, --nomtp)"
            )
            raise UserError(f"{name} differs from {of}, of which it has to be a copy here; {way_out}.")
    return table


def group_by_leaf(table: Mapping[str, TensorLayout]) -> dict[str, list[tuple[str, TensorLayout]]]:
    """Dotted path of each leaf -> the tensors that hold a part of it."""
    found: dict[str, list[tuple[str, TensorLayout]]] = {}
    for name, tensor in table.items():
        for leaf in tensor.leaves:
            found.setdefault(leaf, []).append((name, tensor))
    return found


def from_tensors(state: Mapping[str, np.ndarray], config: ModelConfig) -> tuple[Params, Params]:
    """(params, router_bias) as NumPy arrays from the tensors of a checkpoint.

    Args:
      state: name -> array of any float type of two bytes or more, per expert or fused (see `tensor_layouts`). Values
        are cast to `config.param_dtype`, the router's bias to float32.

    Raises:
      UserError: names the tensors that are missing, unexpected, of another shape or quantised.
    """
    source = InMemory({name: array for name, array in state.items() if array.size})
    leaves = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in leaf_shapes(config).items()}
    for leaf, tensors in group_by_leaf(match_layouts(source, config)).items():
        for name, tensor in tensors:
            copy_into(leaves[leaf][tensor.index], tensor.part(source.read(name), leaf))
    return unflatten_leaves(leaves)


def unflatten_leaves(leaves: Mapping[str, Any]) -> tuple[Params, Params]:
    """(params, router_bias) from leaves by dotted path."""
    bias = {path for path in leaves if path.endswith("router.bias")}
    return (
        unflatten_dict({path: leaf for path, leaf in leaves.items() if path not in bias}, sep="."),
        unflatten_dict({path: leaf for path, leaf in leaves.items() if path in bias}, sep="."),
    )


def flatten_leaves(
    params: Params, router_bias: Params, config: ModelConfig, table: Mapping[str, TensorLayout]
) -> dict[str, Any]:
    """Every leaf by dotted path. Raises a UserError if they are not those of `config` or hold what has no tensor."""
    leaves = flatten_dict(params, sep=".") | flatten_dict(router_bias, sep=".")
    found = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    require_shapes("The network", found, {path: leaf.shape for path, leaf in leaf_shapes(config).items()})
    for path in absent_leaves(config, table):
        if np.asarray(leaves[path]).any():
            raise UserError(
                f"{path} is not zero, and a {find_family(config).model_type} checkpoint has no place for it."
            )
    return leaves


def written(config: ModelConfig) -> dict[str, TensorLayout]:
    """Every tensor of a checkpoint that we write, copies included."""
    table = tensor_layouts(config)
    return table | {name: table[of] for name, of in duplicate_tensors(config).items()}


def to_tensors(params: Params, router_bias: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint in the published form (one per expert); dtypes stay, every bit is kept.

    Raises:
      UserError: the arrays are not those of `config`, or the network has a part that a checkpoint has no place for.
    """
    table = written(config)
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_leaves(params, router_bias, config, table).items()}
    return {name: tensor.joined(leaves) for name, tensor in table.items()}


def _carries_nothing(name: str, shape: tuple[int, ...]) -> bool:
    """Rotary frequencies, which some files store though they follow from the config, and the empty matrices that
    transformers has in place of no shared experts."""
    return name.endswith("rotary_emb.inv_freq") or 0 in shape


def require_shapes(owner: str, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises a UserError that says how two sets of named shapes differ."""

    def listed(names: list[str]) -> str:
        rest = len(names) - _SHOWN
        return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")

    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    wrong = [
        f"{name} as {list(found[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    complaints = {"lacks": missing, "has, unexpected,": extra, "has": wrong}
    problems = [f"{verb} {listed(names)}" for verb, names in complaints.items() if names]
    if problems:
        raise UserError(f"{owner} {'; '.join(problems)}; do the weights and the configuration belong together?")
