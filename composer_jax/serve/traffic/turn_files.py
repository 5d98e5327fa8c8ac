"""Files of turns: lines of JSON in frames of zstd, each of them whole; the database says which frames count.

turns/DAY/NNN.jsonl.zst holds turns of the sessions that opened on DAY. What lies behind the last frame that the
database names was written by a process that was killed, and does not count.
"""

import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import zstandard

from composer_jax.errors import UserError
from composer_jax.serve.traffic.records import SampledTurn

FOLDER = "turns"
LEVEL = 3
MOST_FILE_BYTES = 64 << 20
"""A file that has more gets no further frame; deleting a session copies the files that it is in."""


def pack(turns: Iterable[SampledTurn]) -> bytes:
    """Returns a frame of turns."""
    lines = (json.dumps(vars(turn), separators=(",", ":"), default=list) + "\n" for turn in turns)
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress("".join(lines).encode())


def read_frame(folder: Path, name: str, start: int, size: int) -> bytes:
    """Returns the bytes [start, start + size) of the file DAY/NNN. Raises FileNotFoundError if it was deleted."""
    with path_of(folder, name).open("rb") as file:
        file.seek(start)
        return file.read(size)


def unpack(frame: bytes, where: str, ids: Collection[str] | None = None) -> list[SampledTurn]:
    """Returns the turns of a frame, or those with these ids; the lines of others are not parsed.

    Raises UserError, which says where the frame lies, for one that cannot be read.
    """
    fields = {field.name for field in dataclasses.fields(SampledTurn)}
    try:
        lines = zstandard.ZstdDecompressor().decompress(frame).splitlines()
        rows = [json.loads(line) for line in lines if ids is None or _id_of(line) in ids]
        return [SampledTurn(**{name: row[name] for name in fields}) for row in rows]
    except (zstandard.ZstdError, ValueError, KeyError) as error:
        raise UserError(f"{where} cannot be read ({error}); restore it from a copy.") from error


def _id_of(line: bytes) -> str:
    """The id of the turn in a line, which begins with it: see `pack`."""
    return line.removeprefix(b'{"id":"')[:32].decode(errors="replace")


def path_of(folder: Path, name: str) -> Path:
    """Returns the path of the file DAY/NNN. Raises UserError for another name."""
    if not re.fullmatch(r"\d{4}-\d\d-\d\d/\d{3,}", name):
        raise UserError(f"{folder}: {name!r} is not a file of turns; restore the folder's database.")
    return folder / FOLDER / f"{name}.jsonl.zst"


def append(folder: Path, name: str, frame: bytes, at: int) -> None:
    """Writes a frame at byte `at` of a file, over whatever lies there, and waits until it is on disk."""
    path = path_of(folder, name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(file, at)
        view = memoryview(frame)
        while view:
            view = view[os.pwrite(file, view, at + len(frame) - len(view)) :]
        os.fsync(file)
    finally:
        os.close(file)
    if at == 0:
        sync_names(folder, name)


def sync_names(folder: Path, name: str) -> None:
    """Waits until the name of a new file DAY/NNN, and that of its day, are on disk."""
    path = path_of(folder, name)
    for parent in (path.parent, path.parent.parent):
        descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_turns(folder: Path, frames: Iterable[tuple[str, int, int]], ids: Collection[str]) -> Iterator[SampledTurn]:
    """Yields the turns with these ids from frames (file, start, size), in their order.

    Raises FileNotFoundError for a file that was deleted meanwhile, and UserError for a frame that cannot be read.
    """
    for name, start, size in frames:
        frame = read_frame(folder, name, start, size)
        yield from unpack(frame, f"{path_of(folder, name)} at byte {start}", ids)
