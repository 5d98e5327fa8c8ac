"""Source code on disk -> lists of files to train on and to hold out.

The split depends on each file's relative path only: it is the same on every machine, and added files move no other file
to the other side. Files are read in a pseudo-random order that also depends on the paths only, so that the first
megabytes are a fair sample of the whole.
"""

import hashlib
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_jax.errors import UserError

MAX_FILE_BYTES = 1_000_000
"""Larger files, which are rarely written by people, are skipped."""

# Folders that never hold the user's own source.
_NEVER = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})

# Folders of the standard library: tests are half of it; idlelib, lib2to3 and turtledemo are applications and their
# fixtures; encodings and pydoc_data are tables in the form of code; the rest are binaries.
_STDLIB_LEFT_OUT = frozenset(
    "test tests idle_test idlelib lib2to3 turtledemo encodings pydoc_data ensurepip lib-dynload".split()
)


@dataclass(frozen=True)
class CorpusFile:
    """One text file. `name` is its path below the corpus folder, `digest` the SHA-256 of its bytes."""

    path: Path
    name: str
    num_bytes: int
    digest: str

    def read(self) -> str:
        """Returns the text with \\n line ends. Raises UserError if the file has changed since it was found."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise UserError(f"{self.path} can no longer be read ({error}); run again") from error
        if _digest(data) != self.digest:
            raise UserError(f"{self.path} has changed since the run began; run again")
        return source_text(data)


@dataclass(frozen=True)
class Corpus:
    """The files of one folder; `train` and `heldout` share no content. `skipped` counts files by reason."""

    folder: Path
    train: tuple[CorpusFile, ...]
    heldout: tuple[CorpusFile, ...]
    skipped: Mapping[str, int]


def find_corpus(
    folder: Path | str | None = None,
    *,
    extensions: Sequence[str] = (".py",),
    heldout_fraction: float = 0.05,
    max_bytes: int | None = None,
    max_heldout_bytes: int | None = None,
) -> Corpus:
    """Finds source files under `folder`, or in the standard library of the running Python.

    Args:
      extensions: endings of source files' names.
      heldout_fraction: fraction of the files never trained on, 0 <= f < 1. Above zero, at least one file is held out.
      max_bytes, max_heldout_bytes: bytes after which no more files are taken, for each side; None takes every file.

    Skipped and counted are files that are unreadable, too large, empty, not UTF-8 text, or equal to an earlier one.
    Held-out files are read first, so that a file equal to a held-out one is never trained on.

    Raises UserError when the folder is missing or unreadable, or holds too few source files to train on.
    """
    if not 0 <= heldout_fraction < 1:
        raise UserError(f"heldout_fraction={heldout_fraction} is not a fraction of the files; use 0 <= f < 1")
    extensions = tuple(e if e.startswith(".") else f".{e}" for e in extensions)
    left_out = _NEVER
    if folder is None:
        folder = sysconfig.get_path("stdlib")
        left_out = _NEVER | _STDLIB_LEFT_OUT
    folder = Path(folder)
    skipped: Counter[str] = Counter()
    names = _source_names(folder, extensions, left_out, skipped)
    ends = " ".join(extensions)
    if not names:
        raise UserError(f"{folder} holds no source files ({ends}); name another folder or other extensions")

    names.sort(key=lambda name: (_hash(name)[8:], name))
    heldout_names = [name for name in names if split_position(name) < heldout_fraction]
    if heldout_fraction > 0 and not heldout_names:
        heldout_names = [min(names, key=split_position)]
    held = set(heldout_names)
    seen: set[str] = set()
    # Held-out files first: of equal files on both sides, the one for training is the duplicate.
    heldout = _take(folder, heldout_names, max_heldout_bytes, seen, skipped)
    train = _take(folder, [name for name in names if name not in held], max_bytes, seen, skipped)
    if not train:
        reasons = "".join(f", {n} {why}" for why, n in sorted(skipped.items()))
        raise UserError(
            f"{folder} holds no source files ({ends}) to train on: of {len(names)} found, "
            f"{len(heldout)} held out{reasons}; name a larger folder"
        )
    return Corpus(folder, tuple(train), tuple(heldout), dict(skipped))


def read_texts(files: Iterable[CorpusFile], max_bytes: int | None = None) -> Iterator[str]:
    """Yields the texts in order; stops after the file that reaches `max_bytes`."""
    total = 0
    for file in files:
        if max_bytes is not None and total >= max_bytes:
            return
        total += file.num_bytes
        yield file.read()


def _source_names(
    folder: Path, extensions: tuple[str, ...], left_out: frozenset[str], skipped: Counter[str]
) -> list[str]:
    """Relative paths of all files with these extensions, in no order. Linked folders are not followed."""
    if not os.path.exists(folder):
        raise UserError(f"the data folder {folder} does not exist; name a folder with source files")
    if not os.path.isdir(folder):
        raise UserError(f"the data folder {folder} is a file; name the folder that it is in")

    def on_error(error: OSError) -> None:
        if error.filename is None or Path(error.filename) == folder:
            raise UserError(f"the data folder {folder} cannot be read ({error.strerror})") from error
        skipped["unreadable"] += 1

    names = []
    for parent, folders, files in os.walk(folder, onerror=on_error):
        folders[:] = [f for f in folders if f not in left_out and not f.startswith(".")]
        base = Path(parent).relative_to(folder)
        names += [(base / f).as_posix() for f in files if f.endswith(extensions)]
    return names


def _take(
    folder: Path, names: Sequence[str], max_bytes: int | None, seen: set[str], skipped: Counter[str]
) -> list[CorpusFile]:
    """Reads files in order, until they have `max_bytes`.

    seen: digests of the files so far. skipped: files left out, by reason. Both are updated.
    """
    files: list[CorpusFile] = []
    num_bytes = 0
    for name in names:
        if max_bytes is not None and num_bytes >= max_bytes:
            break
        file = _read(folder / name, name)
        if isinstance(file, CorpusFile) and file.digest in seen:
            file = "duplicate"
        if isinstance(file, str):
            skipped[file] += 1
        else:
            seen.add(file.digest)
            files.append(file)
            num_bytes += file.num_bytes
    return files


def _read(path: Path, name: str) -> CorpusFile | str:
    """Returns the file, or the reason to skip it."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
            return "unreadable"
        if status.st_size > MAX_FILE_BYTES:
            return "too large"
        data = path.read_bytes()
    except OSError:
        return "unreadable"
    try:
        text = source_text(data)
    except UnicodeDecodeError:
        return "not text"
    if "\0" in text:
        return "not text"
    return CorpusFile(path, name, len(data), _digest(data)) if text.strip() else "empty"


def source_text(data: bytes) -> str:
    """Returns a file's text with \\n line ends, without a byte order mark. Raises UnicodeDecodeError."""
    return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def split_position(name: str) -> float:
    """Returns a number in [0, 1) that depends on the path only; files below heldout_fraction are held out."""
    return int.from_bytes(_hash(name)[:8], "big") / 2**64


def _hash(name: str) -> bytes:
    # File names need not be valid UTF-8; Python holds their bytes by surrogateescape.
    return hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest()
