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


def unpack(frame: bytes, where: str) -> list[SampledTurn]:
    """Returns the turns of a frame. Raises UserError, which says where it lies, for one that cannot be read."""
    fields = {field.name for field in dataclasses.fields(SampledTurn)}
    try:
        rows = [json.loads(line) for line in zstandard.ZstdDecompressor().decompress(frame).splitlines()]
        return [SampledTurn(**{name: row[name] for name in fields}) for row in rows]
    except (zstandard.ZstdError, ValueError, KeyError) as error:
        raise UserError(f"{where} cannot be read ({error}); restore it from a copy.") from error


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
    if at == 0:  # a new file: its name, and that of a new day
        for folder in (path.parent, path.parent.parent):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
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
        turns = unpack(frame, f"{path_of(folder, name)} at byte {start}")
        yield from (turn for turn in turns if turn.id in ids)
