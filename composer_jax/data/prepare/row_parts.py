"""Rows of a range of a JSON-lines or Parquet file, without reading the rest of the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from composer_jax.errors import UserError


class RawRow(NamedTuple):
    """One row. `name` says where it is; `value` is None where the row cannot be decoded."""

    name: str
    num_bytes: int
    value: Any


def read_json_range(path: Path, start: int, end: int) -> Iterator[RawRow]:
    """Yields the rows of the lines that begin at the bytes `start` <= b < `end`; blank lines are left out."""
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()  # the rest of a line that began before `start`, or the end of the one before it
        while (place := file.tell()) < end:
            line = file.readline()
            if not line:
                return
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            yield RawRow(f"{path.name}#{place}", len(line), value)


def parquet_ranges(path: Path, column: str, unit_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first row group, end, bytes of the column) of ranges that hold about `unit_bytes`.

    Raises:
      UserError: not a Parquet file, a file without the column, or no pyarrow.
    """
    metadata = _open(path).metadata
    columns = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    if column not in columns:
        raise UserError(
            f"{path} has no column {column!r} but {', '.join(columns)}; name the column of the text as --text_field"
        )
    first, size = 0, 0
    for group in range(metadata.num_row_groups):
        num_bytes = metadata.row_group(group).column(columns.index(column)).total_uncompressed_size
        if group > first and size + num_bytes > unit_bytes:
            yield first, group, size
            first, size = group, 0
        size += num_bytes
    if metadata.num_row_groups:
        yield first, metadata.num_row_groups, size


def read_parquet_range(path: Path, first: int, end: int, columns: Sequence[str]) -> Iterator[RawRow]:
    """Yields the rows of row groups `first` <= g < `end`, with these columns only."""
    from pyarrow import ArrowException

    try:
        file = _open(path)
        for group in range(first, end):
            row = 0
            for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=list(columns)):
                for value in batch.to_pylist():
                    text = value.get(columns[0])
                    yield RawRow(f"{path.name}#{group}.{row}", len(text) if isinstance(text, str) else 0, value)
                    row += 1
    except (ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a readable Parquet file ({str(error).splitlines()[0]}); make it anew"
        ) from error


def _open(path: Path) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"reading {path} needs pyarrow; pip install 'composer_jax[prepare]'") from None
    try:
        return parquet.ParquetFile(path)
    except (ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a readable Parquet file ({str(error).splitlines()[0]}); make it anew"
        ) from error
