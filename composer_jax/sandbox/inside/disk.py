"""What a folder holds on disk, and how to get rid of it, whatever a command made of it.

Commands can close folders to everyone and nest them deeper than paths and recursion reach. So each step opens a folder
relative to one that is open already, nothing is recursive and no link is followed.
"""

import errno
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

LONGEST = 2000  # characters of a path relative to an open folder; the kernel takes 4095
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
BLOCK = 512  # the unit of st_blocks


class Held(NamedTuple):
    """What is in a folder: bytes on disk, and how many files and folders."""

    size: int
    entries: int


def held(root: str) -> Held:
    """What is below `root`. What comes or goes meanwhile may or may not be counted."""
    size = entries = 0
    with _Open(root) as places:
        for _, _, status in _walk(places, 0o500):
            size, entries = size + status.st_blocks * BLOCK, entries + 1
    return Held(size, entries)


def clear(root: str) -> None:
    """Delete all that is in a folder. OSError when something cannot be deleted."""
    folders = []
    # Deep down first: what is found later is never above what was found before.
    with _Open(root) as places:
        for place, name, status in _walk(places, 0o700):
            if stat.S_ISDIR(status.st_mode):
                folders.append((place, name))
            else:
                os.unlink(name, dir_fd=place)
        for place, name in reversed(folders):
            os.rmdir(name, dir_fd=place)


class _Open:
    """Context: the open folders of a walk, the first of them `root`."""

    def __init__(self, root: str):
        self.root = os.path.realpath(root)
        self.folders = [_open(root, self, None, 0o500)]

    def below(self, place: int, path: str) -> int:
        """One more, for what lies too deep."""
        self.folders.append(_open(path, self, place, 0o500))
        return self.folders[-1]

    def __enter__(self) -> "_Open":
        return self

    def __exit__(self, *_: object) -> None:
        for folder in self.folders:
            os.close(folder)


def _walk(places: _Open, rights: int) -> Iterator[tuple[int, str, os.stat_result]]:
    """(open folder, path relative to it, status) of all that is below; a folder comes before what is in it."""
    waiting = [(places.folders[0], ".")]
    while waiting:
        place, path = waiting.pop()
        if len(path) > LONGEST:
            place, path = places.below(place, path), "."
        try:
            folder = _open(path, places, place, rights)
        except (FileNotFoundError, NotADirectoryError):  # a command that still runs took it away
            continue
        try:
            with os.scandir(folder) as entries:
                names = [entry.name for entry in entries]
            for name in names:
                below = name if path == "." else f"{path}/{name}"
                try:
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    waiting.append((place, below))
                yield place, below, status
        finally:
            os.close(folder)


def _open(path: str, places: _Open, place: int | None, rights: int) -> int:
    """Open a folder; gives its owner back the rights that a command took away."""
    try:
        folder = os.open(path, _FOLDER | os.O_PATH, dir_fd=place)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotADirectoryError(error.errno, f"{path} is a link now") from None
        raise
    try:
        here = f"/proc/self/fd/{folder}"
        mode = os.fstat(folder).st_mode
        if mode & rights != rights:
            # A command that still runs may have put a link above it in the meantime: only what is where it should be.
            if not os.readlink(here).startswith(places.root):
                raise FileNotFoundError(errno.ENOENT, f"{path} is elsewhere now")
            os.chmod(here, stat.S_IMODE(mode) | rights)
        return os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(folder)
