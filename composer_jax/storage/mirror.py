"""Mirror: the files of a run in a bucket, as a folder of this machine in which the stages read and write.

`fetch` makes the folder equal to the bucket, `publish` uploads what has changed. Checkpoints are not mirrored: Orbax
writes them to the bucket itself. Files whose path has a part that begins with a dot stay on their side.

What an interrupted `publish` leaves behind: files that replace older ones are replaced one by one, and of new files
either all are there or none: their names are written to the bucket first, and `roll_back` deletes them if the note is
still there when a run is opened.
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError
from composer_jax.storage.bucket import BucketFolder, ChangedObject, StoredObject, content_md5

NOT_MIRRORED = ("checkpoints",)
"""Folders that the stages write to the bucket themselves."""
_NOTE = ".publishing"
_TRANSFERS = 8  # at once
_ATTEMPTS = 5  # of a fetch while another process publishes


class _Published(NamedTuple):
    """A file as the bucket holds it."""

    object: StoredObject
    stamp: tuple[int, int] | None
    """(mtime_ns, size) of the local file of that content; None if unknown."""


class Mirror:
    """The files below a bucket folder, in the folder `local`, which exists."""

    def __init__(self, folder: BucketFolder, local: Path):
        self.folder, self.local = folder, local
        self._published: dict[str, _Published] = {}
        self._note: tuple[int, list[str]] | None = None  # generation and names of an unfinished publish

    def roll_back(self) -> None:
        """Deletes the new files of a `publish` that was interrupted. Only for the process that holds the lease."""
        note = self.folder.read(_NOTE)
        if note is None:
            return
        objects = self._list()
        for name in json.loads(note[0]):
            if name in objects:
                self.folder.delete(name, objects[name].generation)
        self.folder.delete(_NOTE, note[1])

    def fetch(self) -> None:
        """Makes the local folder equal to the bucket.

        Raises:
          UserError: an object's name is not a path within a folder, or objects change while they are read.
        """
        for _ in range(_ATTEMPTS):
            objects = self._list()
            try:
                with ThreadPoolExecutor(_TRANSFERS) as pool:
                    list(pool.map(self._fetch_one, objects, objects.values()))
            except ChangedObject:
                continue  # process 0 has published a file meanwhile
            break
        else:
            raise UserError(f"{self.folder.url} changes while it is read; stop the program that writes it")
        for name, path in self._local_files():
            if name not in objects:
                path.unlink()
        _remove_empty_folders(self.local)
        self._published = {name: _Published(stored, _stamp(self.local / name)) for name, stored in objects.items()}

    def publish(self) -> None:
        """Uploads every local file that is new or changed; files that are gone here stay in the bucket.

        Raises:
          UserError: another process has changed one of these files in the bucket.
        """
        changed = [name for name, path in self._local_files() if self._has_changed(name, path)]
        new = [name for name in changed if name not in self._published]
        if len(new) > 1 or self._note is not None:
            self._write_note(new)
        with ThreadPoolExecutor(_TRANSFERS) as pool:
            list(pool.map(self.publish_file, changed))
        if self._note is not None:
            self.folder.delete(_NOTE, self._note[0])
            self._note = None

    def publish_file(self, name: str) -> None:
        """Uploads one file, by its name relative to the folder. Raises like `publish`."""
        path, known = self.local / name, self._published.get(name)
        stamp, data = _stamp(path), path.read_bytes()
        try:
            generation = self.folder.write(name, data, known.object.generation if known else 0)
        except ChangedObject as error:
            raise UserError(
                f"{self.folder.url}/{name} was changed by another process while this run used it; only one run may "
                "work in a folder"
            ) from error
        self._published[name] = _Published(StoredObject(generation, content_md5(data)), stamp)

    def _list(self) -> dict[str, StoredObject]:
        """Returns the mirrored objects of the bucket, without those of checkpoints, of which there are many."""
        objects: dict[str, StoredObject] = {}
        for name in self.folder.names():
            if name.rstrip("/") not in NOT_MIRRORED and is_mirrored(name):
                objects |= self.folder.list(name)
        return {name: stored for name, stored in objects.items() if is_mirrored(name) and not name.endswith("/")}

    def _fetch_one(self, name: str, stored: StoredObject) -> None:
        path = self.local / _safe(name, self.folder.url)
        known = self._published.get(name)
        if known and known.object.generation == stored.generation and known.stamp == _stamp(path):
            return
        if stored.md5 is not None and path.is_file() and content_md5(path.read_bytes()) == stored.md5:
            return
        write_atomically(path, self.folder.read_generation(name, stored.generation))

    def _local_files(self) -> list[tuple[str, Path]]:
        """Returns (name, path) of the mirrored files on this side, sorted."""
        files = []
        for parent, folders, names in os.walk(self.local):
            above = Path(parent).relative_to(self.local)
            folders[:] = [name for name in folders if is_mirrored((above / name).as_posix())]
            files += [(above / name).as_posix() for name in names if is_mirrored(name)]
        return [(name, self.local / name) for name in sorted(files)]

    def _has_changed(self, name: str, path: Path) -> bool:
        known, stamp = self._published.get(name), _stamp(path)
        if known is None:
            return True
        if known.stamp == stamp:
            return False
        if known.object.md5 != content_md5(path.read_bytes()):
            return True
        self._published[name] = known._replace(stamp=stamp)
        return False

    def _write_note(self, new: list[str]) -> None:
        generation, names = self._note or (0, [])  # those of an attempt that failed are new as well
        names = sorted({*names, *new})
        try:
            self._note = self.folder.write(_NOTE, json.dumps(names).encode(), generation), names
        except ChangedObject as error:
            raise UserError(f"another process publishes files in {self.folder.url}; only one run may work there") from (
                error
            )


def is_mirrored(name: str) -> bool:
    """Whether a file of this name, relative to the folder of a run, is mirrored."""
    parts = PurePosixPath(name).parts
    hidden = any(part.startswith(".") for part in name.split("/"))  # PurePosixPath would drop "."
    return not hidden and parts[:1] not in [(folder,) for folder in NOT_MIRRORED]


def _safe(name: str, url: str) -> str:
    """Returns the name of an object if it is a path within a folder. Raises a UserError if it is not."""
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise UserError(f"{url} holds an object with the name {name!r}, which is not a path of a file; rename it")
    return name


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _remove_empty_folders(root: Path) -> None:
    for parent, _, _ in os.walk(root, topdown=False):
        if Path(parent) != root and not any(Path(parent).iterdir()):
            shutil.rmtree(parent)
