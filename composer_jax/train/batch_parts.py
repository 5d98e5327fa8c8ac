"""What the devices of one process hold of a batch, as frames: a process gets its rows, and not the batch.

Process 0 makes a batch and sends each other process the blocks of its devices in pieces, a few rows or positions of one
in a frame, so that it holds one frame at a time beside its own part. The receiver puts them together (BatchPartReader)
and places them on its devices (train/shard_batch.py). A block is rows of a batch and, in fields that the mesh axis
`context` divides, positions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from composer_jax.data.host_batch import Block, HostField
from composer_jax.frames import Frame, FrameError
from composer_jax.parallel.processes import process_index
from composer_jax.train.shard_batch import process_blocks, read_block
from composer_jax.train.teacher_kl import SLOT_FIELDS

Key = tuple[int, ...]
"""First row and the one after the last of a block, and likewise its positions where it has not all."""

PIECE_BYTES = 1 << 21
"""Bytes of the piece of a block that is in a frame. What is made and sent next stays in the processor's cache, and
memory of this size is used again instead of being asked of the system; smaller pieces cost more in headers."""


def part_frames(batch: Mapping[str, HostField], mesh: Mesh, process: int) -> Iterator[Frame]:
    """Yields frames from which the BatchPartReader of a process makes what its devices hold of a batch [B,S]."""
    yield {"fields": {name: [np.dtype(field.dtype).name, list(field.shape)] for name, field in batch.items()}}, []
    for names in _by_blocks(batch):
        fields = [batch[name] for name in names]
        for block in process_blocks(mesh, process, names[0], fields[0].shape):
            place_bytes = sum(_block_bytes(field, block) for field in fields) // math.prod(map(_length, block))
            for piece in _pieces(block, place_bytes):
                arrays = [
                    _as_plain(read_block(field, piece, mesh, name)) for name, field in zip(names, fields, strict=True)
                ]
                yield {"names": names, "block": _key(block), "piece": _key(piece)}, arrays


def part_bytes(batch: Mapping[str, HostField], mesh: Mesh, process: int) -> int:
    """Returns the bytes of the arrays of `part_frames`; headers add less than 1 % to frames of PIECE_BYTES."""
    return sum(
        _block_bytes(field, block)
        for name, field in batch.items()
        for block in process_blocks(mesh, process, name, field.shape)
    )


class HeldBlocks:
    """A field of a batch [B,S,...] of which this process has what its devices hold."""

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...], blocks: Sequence[Block]) -> None:
        self.dtype, self.shape = dtype, shape
        self._missing = {_key(block): math.prod(map(_length, block)) for block in blocks}
        self._blocks: dict[Key, np.ndarray] = {}

    def add(self, key: Key, piece: Key, values: np.ndarray) -> None:
        """Takes a piece of a block. Raises FrameError for one that this process does not get."""
        ends = list(zip(key[::2], key[1::2], piece[::2], piece[1::2], strict=True))
        lengths = [stop - start for _, _, start, stop in ends]
        is_inside = all(first <= start < stop <= last for first, last, start, stop in ends)
        if not is_inside or self._missing.get(key, 0) < math.prod(lengths):
            raise FrameError(f"a piece {piece} of a block {key} that this process lacks nothing of")
        if self.dtype.kind == "V" and values.dtype == f"u{self.dtype.itemsize}":
            values = values.view(self.dtype)
        others = self.shape[len(ends) :]
        if values.shape != (*lengths, *others) or values.dtype != self.dtype:
            expected = f"{self.dtype}{[*lengths, *others]}"
            raise FrameError(f"{values.dtype}{list(values.shape)} for a piece {expected} of a batch")
        self._missing[key] -= math.prod(lengths)
        if piece == key:
            self._blocks[key] = values
            return
        if key not in self._blocks:
            self._blocks[key] = np.empty((*(last - first for first, last, _, _ in ends), *others), self.dtype)
        self._blocks[key][tuple(slice(start - first, stop - first) for first, _, start, stop in ends)] = values

    @property
    def is_complete(self) -> bool:
        """Whether every block is there."""
        return not any(self._missing.values())

    def read(self, block: Block, order: np.ndarray | None) -> np.ndarray:
        """Returns a block; its positions are in the order of the devices already."""
        return self._blocks[_key(block)]


class BatchPartReader:
    """Puts together what this process gets of a batch."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._fields: dict[str, HeldBlocks] = {}

    def add(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """Takes a frame of `part_frames`. Raises FrameError for one of another batch, mesh or process."""
        try:
            if "fields" in header:
                self._fields = {name: self._empty(name, *of) for name, of in header["fields"].items()}
                return
            for name, values in zip(header["names"], arrays, strict=True):
                self._fields[name].add(tuple(header["block"]), tuple(header["piece"]), values)
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"a part of a batch that cannot be read ({error!r})") from error

    def take(self) -> dict[str, HeldBlocks]:
        """Returns the batch, of which the next frame begins another one. Raises FrameError if rows are missing."""
        fields, self._fields = self._fields, {}
        if missing := [name for name, field in fields.items() if not field.is_complete]:
            raise FrameError(f"a batch without all rows of {', '.join(missing)}")
        return fields

    def _empty(self, name: str, dtype: str, shape: Sequence[int]) -> HeldBlocks:
        blocks = process_blocks(self._mesh, process_index(), name, tuple(shape))
        return HeldBlocks(jnp.dtype(dtype), tuple(shape), blocks)


def _as_plain(array: np.ndarray) -> np.ndarray:
    """Returns bfloat16 numbers, which frames do not have, as integers of their bits; other arrays as they are."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def _by_blocks(batch: Mapping[str, HostField]) -> list[list[str]]:
    """Returns the names of the fields by what their blocks are."""
    by_kind = [[name for name in batch if (name in SLOT_FIELDS) is is_slot] for is_slot in (False, True)]
    return [names for names in by_kind if names]


def _pieces(block: Block, place_bytes: int) -> Iterator[Block]:
    """Yields parts of a block in their order: rows, or positions of one row where a row has over PIECE_BYTES."""
    rows, *columns = block
    row_bytes = place_bytes * math.prod(map(_length, columns))
    step = max(1, PIECE_BYTES // row_bytes)
    for start in range(rows.start, rows.stop, step):
        of_rows = slice(start, min(start + step, rows.stop))
        if row_bytes <= PIECE_BYTES or not columns:
            yield (of_rows, *columns)
            continue
        (positions,), width = columns, max(1, PIECE_BYTES // place_bytes)
        for first in range(positions.start, positions.stop, width):
            yield of_rows, slice(first, min(first + width, positions.stop))


def _block_bytes(field: HostField, block: Block) -> int:
    items = math.prod(_length(part) for part in block) * math.prod(field.shape[len(block) :])
    return items * np.dtype(field.dtype).itemsize


def _length(part: slice) -> int:
    return part.stop - part.start


def _key(block: Block) -> Key:
    return tuple(number for part in block for number in (part.start, part.stop))
