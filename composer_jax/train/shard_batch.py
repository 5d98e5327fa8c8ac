"""shard_batch: a batch of the host -> arrays on the mesh."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.data.host_batch import Block, HostField
from composer_jax.errors import UserError
from composer_jax.parallel.context import zigzag_order
from composer_jax.parallel.mesh import BATCH_AXES, BATCH_SPEC, ROW_SPEC, batch_shards
from composer_jax.train.forward import Batch
from composer_jax.train.teacher_kl import SLOT_FIELDS


def field_spec(name: str) -> PartitionSpec:
    """Returns the sharding of a field of a batch."""
    return ROW_SPEC if name in SLOT_FIELDS else BATCH_SPEC


def addressable_rows(mesh: Mesh, batch_size: int, accumulate: int = 1) -> frozenset[int]:
    """Returns the rows of a batch that devices of this process hold; several processes may hold a row.

    accumulate: micro-batches (`micro_batches`), each of which is placed on all devices.

    Raises:
      UserError: the rows of a micro-batch do not divide over the mesh.
    """
    size = batch_size // accumulate
    _check_rows(size, mesh)
    indices = NamedSharding(mesh, ROW_SPEC).addressable_devices_indices_map((size,))
    rows = {row for part in indices.values() if part for row in range(*part[0].indices(size))}
    return frozenset(first + row for first in range(0, batch_size, size) for row in rows)


def micro_batches(batch: dict[str, np.ndarray], count: int) -> list[dict[str, np.ndarray]]:
    """Returns the rows of a batch [B,S] in `count` batches [B/count,S], in their order; `count` divides B."""
    parts = {name: np.split(array, count) for name, array in batch.items()}
    return [{name: of[i] for name, of in parts.items()} for i in range(count)]


def process_blocks(mesh: Mesh, process: int, name: str, shape: tuple[int, ...]) -> list[Block]:
    """Returns the blocks of a field [B,S,...] that devices of a process hold, each once.

    Raises:
      UserError: the rows or positions do not divide over the mesh.
    """
    _check_shape(name, shape, mesh)
    spec = field_spec(name)
    cut = shape[: len(spec)]
    blocks = {
        tuple(part.indices(n)[:2] for part, n in zip(index, cut, strict=True))
        for device, index in NamedSharding(mesh, spec).devices_indices_map(cut).items()
        if device.process_index == process
    }
    return [tuple(slice(start, stop) for start, stop in block) for block in sorted(blocks)]


def read_block(field: HostField, block: Block, mesh: Mesh, name: str) -> np.ndarray:
    """Returns a block of a field, its positions in the order in which the devices hold them (zigzag_order)."""
    parts = mesh.shape["context"]
    order = zigzag_order(field.shape[1], parts) if parts > 1 and name not in SLOT_FIELDS else None
    if not isinstance(field, np.ndarray):
        return field.read(block, order)
    if order is None:
        return field[block]
    return field[block[0]][:, order[block[1]]]


def shard_batch(batch: Mapping[str, HostField], mesh: Mesh) -> Batch:
    """Places a batch [B,S] on the mesh. Each process reads the blocks of its own devices, and nothing else.

    Raises:
      UserError: the rows or positions do not divide over the mesh.
    """
    for name, field in batch.items():
        _check_shape(name, field.shape, mesh)
    return {name: _shard_field(name, field, mesh) for name, field in batch.items()}


def _shard_field(name: str, field: HostField, mesh: Mesh) -> jax.Array:
    spec = field_spec(name)
    blocks: dict[tuple[int, ...], np.ndarray] = {}  # several devices hold the same one

    def of_device(index: Any) -> np.ndarray:
        ranges = [part.indices(n)[:2] for part, n in zip(index[: len(spec)], field.shape, strict=False)]
        key = tuple(number for part in ranges for number in part)
        if key not in blocks:
            blocks[key] = read_block(field, tuple(slice(*part) for part in ranges), mesh, name)
        return blocks[key]

    return jax.make_array_from_callback(field.shape, NamedSharding(mesh, spec), of_device)


def _check_shape(name: str, shape: tuple[int, ...], mesh: Mesh) -> None:
    _check_rows(shape[0], mesh)
    if name not in SLOT_FIELDS:
        zigzag_order(shape[1], mesh.shape["context"])  # raises


def _check_rows(rows: int, mesh: Mesh) -> None:
    shards = batch_shards(mesh)
    if rows % shards:
        raise UserError(
            f"A batch of {rows} rows does not divide over {shards} devices (mesh axes "
            f"{', '.join(BATCH_AXES)}); use a multiple of {shards}."
        )
