"""Reads the rows of a data set from JSON lines or Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from composer_jax.errors import UserError
from composer_jax.tasks.formats.fields import Fields

ROW_FILES = (".jsonl", ".parquet")


def read_rows(path: Path) -> list[Fields]:
    """Returns the rows of a .jsonl or .parquet file, each with its location for error messages.

    Raises UserError for an unreadable file, a line that is not a JSON object, and for Parquet without pyarrow.
    """
    if path.suffix == ".parquet":
        return [Fields(row, f"{path}, row {number}") for number, row in enumerate(_parquet(path), 1)]
    rows = []
    try:
        lines = path.read_bytes().split(b"\n")  # not splitlines: JSON texts may contain U+2028
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(Fields(_json_object(line, f"{path}, line {number}"), f"{path}, line {number}"))
    return rows


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object but a {type(row).__name__}; every line must be one row")
    return row


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"reading {path} needs pyarrow; pip install 'composer_jax[tasks]'") from None
    try:
        return parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from error
