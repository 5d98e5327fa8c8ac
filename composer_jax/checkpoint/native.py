"""Weights in our own checkpoint format, whose notes hold the ModelConfig of the network."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef, Params


def model_notes(definition: ModelDef) -> dict[str, Any]:
    """Returns the notes of a store that holds this network's weights."""
    return {"model": _of_weights(dataclasses.asdict(definition.config))}


def _of_weights(fields: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the fields that weights do not need elsewhere.

    The initialiser's import path may not resolve there, and a form of attention by name may not run there.
    """
    return {name: value for name, value in fields.items() if name not in ("init", "attention_form")}


def read_model_config(store: CheckpointStore) -> ModelConfig:
    """Returns the ModelConfig in the notes of a store's latest step, without the fields that weights do not need.

    Raises:
      UserError: the notes have no ModelConfig.
    """
    return network_of_notes(store.read_notes(), str(store.directory))


def network_of_notes(notes: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the ModelConfig in `model_notes`. Raises UserError, with `where` they are, if they have none."""
    if "model" not in notes:
        raise UserError(f"the checkpoint in {where} has no model config in its notes; write it again.")
    return ModelConfig.from_dict(_of_weights(notes["model"]))


def restore_weights(store: CheckpointStore, definition: ModelDef, mesh: Mesh | None) -> tuple[Params, Params]:
    """Restores (params, router_bias) of the latest step onto a mesh; None is the first device of this process."""
    if mesh is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)  # noqa: E731
        params, bias = jax.tree.map(place, definition.shapes())
    else:
        params, bias = definition.abstract_weights(mesh)
    arrays, _ = store.restore(like={"params": params, "router_bias": bias})
    return arrays["params"], arrays["router_bias"]
