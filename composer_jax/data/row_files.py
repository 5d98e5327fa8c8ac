"""Rows of JSON lines and Parquet files, each with its place: all of a file, or a range of it."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import zstandard
from fsspec.core import url_to_fs

from composer_jax.errors import UserError

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_REFUSED_FORMS = {
    b"BZh": "is compressed with bzip2; compress it with gzip or zstd",
    b"\xfd7zXZ": "is compressed with xz; compress it with gzip or zstd",
    b"PK\x03\x04": "is a zip archive; unpack it",
}
"""By the first bytes of a file."""


def refuse(sentence: str) -> None:
    """Raises a UserError with the sentence."""
    raise UserError(sentence)


def read_rows(path: str, bad_line: Callable[[str], None] = refuse) -> Iterator[tuple[str, Any]]:
    """Yields (place, row) for every row of a file: a line of JSON, an object of a JSON array, a row of .parquet.

    A place is "FILE, line 3" or "FILE, row 3", counted from 1; blank lines are left out. A row is whatever JSON the
    line holds. The first bytes of a file say whether it is compressed (gzip, zstd). A struct of a Parquet file has the
    keys of all its rows; those that are null are left out.

    path: also any URL that fsspec reads (gs://...). bad_line: called with a sentence about a line that is not JSON,
    which is left out if the call returns.

    Raises UserError for a file that cannot be read, for Parquet without pyarrow, or what `bad_line` raises.
    """
    if path.endswith(".parquet"):
        with _reading_parquet(path) as parquet:
            from pyarrow import BufferReader

            # Of a Python file, and with threads of its own, pyarrow can abort the program when it ends.
            rows = parquet.ParquetFile(BufferReader(_read_bytes(path))).read(use_threads=False).to_pylist()
        for number, row in enumerate(rows, 1):
            yield f"{path}, row {number}", {name: _without_nulls(value) for name, value in row.items()}
        return
    content = _decompress(path, _read_bytes(path))
    array = _json_array(path, content)
    if array is not None:
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(array, 1))
        return
    lines = content.split(b"\n")  # bytes, because JSON texts may contain U+2028
    del content  # the lines are a copy
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad_line(f"{path}, line {number} is not JSON ({error})")
            continue
        yield f"{path}, line {number}", row


def _read_bytes(path: str) -> bytes:
    """The content of a file at a path or URL. Callers keep no reference to it, so it is freed once it is parsed."""
    try:
        fs, inner = url_to_fs(path)
        return fs.cat_file(inner)
    except Exception as error:  # remote file systems raise exceptions of their own types
        raise UserError(f"{path} cannot be read ({error})") from error


def _without_nulls(value: Any) -> Any:
    """The value without the keys of structs that are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _decompress(path: str, content: bytes) -> bytes:
    """The content of a file that may be compressed. Raises UserError for a file that is cut off or broken."""
    for begin, sentence in _REFUSED_FORMS.items():
        if content.startswith(begin):
            raise UserError(f"{path} {sentence}")
    name, read = "gzip", gzip.decompress
    if content.startswith(_ZSTD):
        name, read = "zstd", _decompress_zstd
    elif not content.startswith(_GZIP):
        return content
    try:
        return read(content)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{path} is not a whole {name} file ({error}); copy or compress it anew") from error


def _decompress_zstd(content: bytes) -> bytes:
    """All frames of zstd. Raises EOFError where the last one is cut off."""
    parts = []
    while content:
        frame = zstandard.ZstdDecompressor().decompressobj()
        parts.append(frame.decompress(content))
        if not frame.eof:
            raise EOFError("it ends within a frame")
        content = frame.unused_data
    return b"".join(parts)


def _json_array(path: str, content: bytes) -> list[Any] | None:
    """The objects of a file that is one JSON array of them; None for lines of JSON, which may be arrays, too."""
    first, *others = content.lstrip().split(b"\n", 1)
    if not first.startswith(b"["):
        return None
    is_one_line = not any(other.strip() for other in others)
    try:
        line = json.loads(first)
        return line if is_one_line and line and all(isinstance(row, dict) for row in line) else None
    except (ValueError, RecursionError):
        if is_one_line:
            return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is neither lines of JSON nor an array ({error})") from error


class RawRow(NamedTuple):
    """One row of a range. `name` says where it is; `value` is None where the row cannot be decoded."""

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

    Raises UserError for another kind of file, a file without the column, and without pyarrow.
    """
    with _reading_parquet(path, "prepare") as parquet:
        metadata = parquet.ParquetFile(path).metadata
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
    with _reading_parquet(path, "prepare") as parquet:
        file = parquet.ParquetFile(path)
        for group in range(first, end):
            row = 0
            for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=list(columns)):
                for value in batch.to_pylist():
                    text = value.get(columns[0])
                    yield RawRow(f"{path.name}#{group}.{row}", len(text) if isinstance(text, str) else 0, value)
                    row += 1


@contextmanager
def _reading_parquet(path: Path | str, extra: str = "tasks") -> Iterator[Any]:
    """Context with pyarrow.parquet, in which errors of the file become UserError.

    extra: that of setup.py which installs pyarrow for the caller.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"reading {path} needs pyarrow; pip install 'composer_jax[{extra}]'") from None
    try:
        yield parquet
    except (ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not a readable Parquet file ({reason}); make it anew") from error
