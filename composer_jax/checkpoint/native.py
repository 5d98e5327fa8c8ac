"""Weights of a network in a checkpoint of our own, which says itself what network it is."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef, Params


def model_notes(definition: ModelDef) -> dict[str, Any]:
    """The notes of a store of this network's weights."""
    return {"model": dataclasses.asdict(definition.config)}


def read_model_config(store: CheckpointStore) -> ModelConfig:
    """The network whose weights the latest step of a store holds."""
    notes = store.read_notes()
    if "model" not in notes:
        raise UserError(f"the checkpoint in {store.directory} does not say what network it is of; write it anew.")
    return ModelConfig.from_dict(notes["model"])


def restore_weights(store: CheckpointStore, definition: ModelDef, mesh: Mesh | None) -> tuple[Params, Params]:
    """(params, router_bias) of the latest step on a mesh, or on the first device."""
    shapes = definition.shapes()
    if mesh is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, shapes)
    else:
        shardings = definition.shardings(mesh)
    params, bias = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    arrays, _ = store.restore(like={"params": params, "router_bias": bias})
    return arrays["params"], arrays["router_bias"]
