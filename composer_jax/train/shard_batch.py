"""shard_batch: a batch of the host -> arrays on the mesh."""

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.errors import UserError
from composer_jax.parallel.context import zigzag_order
from composer_jax.parallel.mesh import BATCH_AXES, BATCH_SPEC, ROW_SPEC, batch_shards
from composer_jax.parallel.processes import device_put_global
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


def shard_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> Batch:
    """Places a batch [B,S] on the mesh. Each process places its `addressable_rows` and ignores the content of others.

    Raises:
      UserError: the rows or positions do not divide over the mesh.
    """
    _check_rows(next(iter(batch.values())).shape[0], mesh)
    if (parts := mesh.shape["context"]) > 1:
        batch = {
            name: array if name in SLOT_FIELDS else array[:, zigzag_order(array.shape[1], parts)]
            for name, array in batch.items()
        }
    shardings = {name: NamedSharding(mesh, field_spec(name)) for name in batch}
    return {name: device_put_global(array, shardings[name]) for name, array in batch.items()}


def _check_rows(rows: int, mesh: Mesh) -> None:
    shards = batch_shards(mesh)
    if rows % shards:
        raise UserError(
            f"A batch of {rows} rows does not divide over {shards} devices (mesh axes "
            f"{', '.join(BATCH_AXES)}); use a multiple of {shards}."
        )
