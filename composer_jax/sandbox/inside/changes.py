"""How a workspace differs from the folder that it was made from.

An overlay keeps changes in layers of its own, so that only paths named there are compared, however large the folder is.
A copied workspace is compared whole. A report holds only what is new since the last one; the host merges them.
"""

import contextlib
import os
import stat
from typing import Any

from . import files

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Names:
    """Paths to compare, as a tree of names. whole: compare everything here, in the folder and in the workspace."""

    __slots__ = ("below", "whole")

    def __init__(self, whole: bool = False):
        self.below: dict[str, Names] = {}
        self.whole = whole

    def at(self, name: str) -> "Names":
        return self.below.setdefault(name, Names())

    def copy(self) -> "Names":
        twin = Names(self.whole)
        twin.below = {name: below.copy() for name, below in self.below.items()}
        return twin


class Changes:
    """The changes of one workspace.

    root: descriptor of the workspace. base: descriptor of the folder that it was made from; None: an empty one. layers:
    descriptors of the layers, the newest last; None: compare everything. is_copy: the workspace is a copy of the folder
    in which nothing has been changed yet.
    """

    def __init__(self, root: int, base: int | None, layers: list[int] | None, max_bytes: int, is_copy: bool = False):
        self.root, self.base, self.layers, self.max_bytes = root, base, layers, max_bytes
        self.frozen: Names | None = None  # of all layers except the newest: they do not change any more
        self.reported: dict[str, tuple] = {}  # path -> its status in the last report
        self.unchanged: dict[str, tuple] = {}  # path -> status with which its content equalled the folder
        if is_copy:
            _note_statuses(root, "", _file_system_ns(root), self.unchanged, 0)

    def report(self) -> tuple[dict[str, Any], bytes]:
        """Returns what is new since the last report, and the bytes of all changes.

        What is new: {"changes": [path, kind, mode, length]..., "same": [path]...}. "same": paths of earlier reports
        that are again as in the folder.
        """
        self.entries: list[tuple[str, str, int, int]] = []
        self.bodies: list[bytes] = []
        self.size = self.characters = 0
        self.current: dict[str, tuple] = {}
        self.begun_ns = _file_system_ns(self.root)
        try:
            self._compare(self.root, self.base, self._names(), "", 0)
        except OSError as error:  # background jobs of the shell change files meanwhile
            raise files.FileRefused(f"the workspace was changed while it was compared ({error.strerror})") from None
        same = [path for path in self.reported if path not in self.current]
        self._count(sum(map(len, same)))
        self.reported = self.current
        return {"changes": self.entries, "same": same}, b"".join(self.bodies)

    def _names(self) -> Names:
        if self.layers is None:
            return Names(whole=True)
        if self.frozen is None:
            self.frozen = Names()
            for layer in self.layers[:-1]:
                _collect(layer, self.frozen, 0)
        names = self.frozen.copy()
        _collect(self.layers[-1], names, 0)
        return names

    def _compare(self, here: int, there: int | None, names: Names, prefix: str, depth: int) -> None:
        """Compares one folder of the workspace with the same folder of the base (None: not there)."""
        if depth > files.MAX_DEPTH:
            raise files.FileRefused(f"the workspace has folders nested more than {files.MAX_DEPTH} deep")
        compared = set(names.below)
        if names.whole:
            compared.update(os.listdir(here))
            if there is not None:
                compared.update(os.listdir(there))
        for name in sorted(compared):
            path = prefix + name
            self._count(len(path))
            now, before = _lstat(here, name), None if there is None else _lstat(there, name)
            if now is None or not _is_plain(now):
                if before is not None:
                    self._add_entry(path, "gone", 0, (), b"")
            elif stat.S_ISDIR(now.st_mode):
                was_folder = before is not None and stat.S_ISDIR(before.st_mode)
                if before is None or not was_folder or stat.S_IMODE(before.st_mode) != stat.S_IMODE(now.st_mode):
                    self._add_entry(path, "folder", now.st_mode, (now.st_mode,), b"")
                below = names.below.get(name) or Names()
                below.whole |= names.whole or not was_folder
                self._descend(here, there if was_folder else None, name, below, path, depth)
            else:
                self._compare_file(here, there, name, path, now, before)

    def _count(self, characters: int) -> None:
        self.characters += characters
        if self.characters > files.MAX_NAMES:
            raise files.FileRefused(f"the names of all changes are longer than {files.MAX_NAMES} characters together")

    def _descend(self, here: int, there: int | None, name: str, names: Names, path: str, depth: int) -> None:
        with files.closing_fd(files.open_at(name, _FOLDER, here, path)) as child:
            files.restore_owner_mode(child)
            opened = (
                contextlib.nullcontext() if there is None else files.closing_fd(os.open(name, _FOLDER, dir_fd=there))
            )
            with opened as base:
                self._compare(child, base, names, f"{path}/", depth + 1)

    def _compare_file(
        self, here: int, there: int | None, name: str, path: str, now: os.stat_result, before: os.stat_result | None
    ) -> None:
        """Compares a file or a link of the workspace."""
        look = _look(now)
        if self.reported.get(path) == look:
            self.current[path] = look
            return
        if self.unchanged.get(path) == look:
            return
        link = stat.S_ISLNK(now.st_mode)
        data = os.fsencode(os.readlink(name, dir_fd=here)) if link else self._read(here, name, path, now)
        certain = look if now.st_ctime_ns < self.begun_ns else ()  # () while a change can leave the status as it is
        if before is not None and stat.S_IFMT(before.st_mode) == stat.S_IFMT(now.st_mode):
            modes_agree = link or stat.S_IMODE(before.st_mode) == stat.S_IMODE(now.st_mode)
            if modes_agree and now.st_size == before.st_size and data == _content(there, name, link):
                if certain:
                    self.unchanged[path] = certain
                return
        self._add_entry(path, "link" if link else "file", now.st_mode, certain, data)

    def _read(self, here: int, name: str, path: str, status: os.stat_result) -> bytes:
        if self.size + status.st_size > self.max_bytes:
            raise files.FileRefused(f"what was changed in the workspace is more than {self.max_bytes} bytes")
        with files.closing_fd(files.open_at(name, _READ, here, path)) as fd:
            return files.read_file(fd, path, status.st_size, self.max_bytes - self.size)

    def _add_entry(self, path: str, kind: str, mode: int, look: tuple, data: bytes) -> None:
        known = self.reported.get(path)
        self.current[path] = (kind, *look) if kind in ("gone", "folder") else look
        if kind in ("gone", "folder") and known == self.current[path]:
            return
        self.size += len(data)
        self.entries.append((path, kind, stat.S_IMODE(mode), len(data)))
        self.bodies.append(data)


def _collect(layer: int, names: Names, depth: int) -> None:
    """Adds the names in one layer; folders that it hides are compared whole."""
    if depth > files.MAX_DEPTH:
        return  # the comparison raises
    names.whole |= _is_opaque(layer)
    with os.scandir(layer) as entries:
        listed = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in listed:
        below = names.at(name)
        if not is_folder:
            # A file, or the whiteout of a removed path. It may hide a folder that a newer layer has replaced.
            below.whole = True
            continue
        with files.closing_fd(files.open_at(name, _FOLDER, layer, name)) as child:
            files.restore_owner_mode(child)
            _collect(child, below, depth + 1)


def _is_opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, "user.overlay.opaque") == b"y"
    except OSError:
        return False


def _lstat(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _note_statuses(folder: int, prefix: str, before_ns: int, statuses: dict[str, tuple], depth: int) -> None:
    """Adds the statuses of files and links that were changed before that time, by path. Closed folders are left out."""
    if depth > files.MAX_DEPTH:
        return  # the comparison raises
    for name in os.listdir(folder):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            if status.st_ctime_ns < before_ns:
                statuses[prefix + name] = _look(status)
            continue
        try:
            child = os.open(name, _FOLDER, dir_fd=folder)
        except PermissionError:
            continue
        with files.closing_fd(child):
            _note_statuses(child, f"{prefix}{name}/", before_ns, statuses, depth + 1)


def _look(status: os.stat_result) -> tuple:
    """Returns what differs after each change, whatever the clock was set to in between."""
    return status.st_ino, status.st_size, status.st_ctime_ns, status.st_mode


def _file_system_ns(folder: int) -> int:
    """Returns the ctime of a change at this moment, by the file system's own clock, which advances in ticks."""
    os.fchmod(folder, 0o755)
    return os.fstat(folder).st_ctime_ns


def _is_plain(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)


def _content(folder: int | None, name: str, link: bool) -> bytes:
    if link:
        return os.fsencode(os.readlink(name, dir_fd=folder))
    with open(os.open(name, _READ, dir_fd=folder), "rb") as file:
        return file.read()
