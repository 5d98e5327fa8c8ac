"""The tensors of a checkpoint against a network: which there must be, and which leaves of our Params they hold."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from flax.traverse_util import unflatten_dict

from composer_jax.checkpoint.huggingface.families import find_family
from composer_jax.checkpoint.huggingface.tensor_layout import (
    TensorLayout,
    absent_leaves,
    duplicate_tensors,
    flatten_tree,
    leaf_shapes,
    tensor_layouts,
)
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import Params

_SHOWN = 4  # names listed in one error


class TensorSource(Protocol):
    """Named tensors whose shapes are known before any of them is read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of the stored form, by name, for the progress of reading."""
        ...

    def read(self, name: str, /) -> np.ndarray:
        """Reads a tensor in a float dtype of two bytes or more."""
        ...


def match_layouts(source: TensorSource, config: ModelConfig) -> dict[str, TensorLayout]:
    """Returns the layouts of the tensors of `source` after checking their names and shapes.

    Only duplicates of embedding and head are read, to compare them with their originals.

    Raises:
      UserError: tensors are missing, unexpected, of another shape, or differ from their original; names them.
    """
    # Rotary frequencies follow from the config. transformers stores empty matrices in the place of no shared experts.
    shapes = {
        name: shape
        for name, shape in source.shapes.items()
        if not name.endswith("rotary_emb.inv_freq") and 0 not in shape
    }
    duplicates = duplicate_tensors(config)
    if config.tie_embeddings:
        duplicates["lm_head.weight"] = "model.embed_tokens.weight"
    duplicates = {name: original for name, original in duplicates.items() if shapes.pop(name, None) is not None}
    fused = any(name.endswith("mlp.experts.gate_up_proj") for name in shapes)
    table = tensor_layouts(config, fused_experts=fused)
    require_shapes("The checkpoint", shapes, {name: tensor.shape for name, tensor in table.items()})
    for name, original in duplicates.items():
        if not np.array_equal(source.read(name), source.read(original)):
            way_out = (
                "set tie_word_embeddings to false"
                if name == "lm_head.weight"
                else "leave the modules out (mtp=False, --nomtp)"
            )
            raise UserError(f"{name} differs from {original}, of which it must be a copy; {way_out}.")
    return table


def group_by_leaf(table: Mapping[str, TensorLayout]) -> dict[str, list[tuple[str, TensorLayout]]]:
    """Returns, for the dotted path of each leaf, the tensors that hold a part of it."""
    tensors: dict[str, list[tuple[str, TensorLayout]]] = {}
    for name, tensor in table.items():
        for leaf in tensor.leaves:
            tensors.setdefault(leaf, []).append((name, tensor))
    return tensors


def unflatten_leaves(leaves: Mapping[str, Any]) -> tuple[Params, Params]:
    """Returns (params, router_bias) from leaves by dotted path."""
    bias = {path for path in leaves if path.endswith("router.bias")}
    return (
        unflatten_dict({path: leaf for path, leaf in leaves.items() if path not in bias}, sep="."),
        unflatten_dict({path: leaf for path, leaf in leaves.items() if path in bias}, sep="."),
    )


def flatten_leaves(
    params: Params, router_bias: Params, config: ModelConfig, table: Mapping[str, TensorLayout]
) -> dict[str, Any]:
    """Returns every leaf by dotted path. Raises a UserError if they do not fit `config` or cannot be stored."""
    leaves = flatten_tree(params) | flatten_tree(router_bias)
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    require_shapes("The network", shapes, {path: leaf.shape for path, leaf in leaf_shapes(config).items()})
    for path in absent_leaves(config, table):
        if np.asarray(leaves[path]).any():
            raise UserError(f"{path} is not zero, and a {find_family(config).model_type} checkpoint cannot store it.")
    return leaves


def export_layouts(config: ModelConfig) -> dict[str, TensorLayout]:
    """Returns the layout of every tensor of a checkpoint that we write, duplicates included."""
    table = tensor_layouts(config)
    return table | {name: table[original] for name, original in duplicate_tensors(config).items()}


def require_shapes(owner: str, actual: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises a UserError that lists the differences of two sets of named shapes."""

    def listed(names: list[str]) -> str:
        rest = len(names) - _SHOWN
        return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")

    missing = [name for name in expected if name not in actual]
    extra = [name for name in actual if name not in expected]
    wrong = [
        f"{name} as {list(actual[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in actual and tuple(actual[name]) != tuple(shape)
    ]
    complaints = {"lacks": missing, "has, unexpected,": extra, "has": wrong}
    problems = [f"{verb} {listed(names)}" for verb, names in complaints.items() if names]
    if problems:
        raise UserError(f"{owner} {'; '.join(problems)}; do the weights and the configuration belong together?")
