"""Rows of JSON lines or Parquet, from a path or any URL that fsspec reads (gs://...), each with its place."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

from fsspec.core import url_to_fs

from composer_jax.errors import UserError


def refuse(sentence: str) -> None:
    """Raises a UserError with the sentence."""
    raise UserError(sentence)


def read_rows(path: str, bad_line: Callable[[str], None] = refuse) -> Iterator[tuple[str, Any]]:
    """Yields (place, row) for every line of JSON and every row of a .parquet file; blank lines are left out.

    A place is "FILE, line 3" or "FILE, row 3", counted from 1. A row is whatever JSON the line holds.

    bad_line: called with a sentence about a line that is not JSON, which is left out if the call returns.

    Raises:
      UserError: a file that cannot be read, Parquet without pyarrow, or what `bad_line` raises.
    """
    if path.endswith(".parquet"):
        yield from _parquet(path)
        return
    try:
        lines = _content(path).split(b"\n")  # bytes, because JSON texts may contain U+2028
    except Exception as error:  # remote file systems raise exceptions of their own types
        raise UserError(f"{path} cannot be read ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad_line(f"{path}, line {number} is not JSON ({error})")
            continue
        yield f"{path}, line {number}", row


def _content(path: str) -> bytes:
    fs, inner = url_to_fs(path)
    return fs.cat_file(inner)


def _parquet(path: str) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"reading {path} needs pyarrow; pip install 'composer_jax[tasks]'") from None
    try:
        rows = parquet.read_table(io.BytesIO(_content(path))).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable Parquet file ({str(error).splitlines()[0]})") from error
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number}", row
