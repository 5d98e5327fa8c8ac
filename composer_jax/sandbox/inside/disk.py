"""What a folder holds on disk, and how to get rid of it, whatever a command made of it.

Commands can close folders to everyone and nest them deeper than paths and recursion reach. Nothing here is recursive,
no link is followed, and folders are opened up for their owner where that is needed.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

LONGEST = 1000  # characters of a path below the folder; what is deeper is neither counted nor kept where it is
BLOCK = 512  # the unit of st_blocks
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Held(NamedTuple):
    """What is in a folder: bytes on disk, how many files and folders, and whether some are too deep to be counted."""

    size: int
    entries: int
    too_deep: bool = False


def held(root: str) -> Held:
    """What is below `root`. What comes or goes meanwhile may or may not be counted."""
    size, entries, too_deep, waiting = 0, 0, False, ["."]
    with _opened(root) as top:
        while waiting:
            path = waiting.pop()
            try:
                with _unfolded(top, path, 0o500) as folder:
                    found = list(_statuses(folder))
            except (FileNotFoundError, NotADirectoryError):  # a command that still runs took it away
                continue
            for name, status in found:
                size, entries = size + status.st_blocks * BLOCK, entries + 1
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(f"{path}/{name}")
            if len(path) > LONGEST:
                too_deep = True
                waiting = [other for other in waiting if not other.startswith(f"{path}/")]
    return Held(size, entries, too_deep)


def clear(root: str) -> None:
    """Delete all that is in a folder in which nobody works any more. OSError when something cannot be deleted."""
    folders, waiting = [], ["."]
    with _opened(root) as top:
        while waiting:
            path = waiting.pop()
            with _unfolded(top, path, 0o700) as folder:
                if len(path) > LONGEST:
                    nearer = secrets.token_hex(16)
                    os.rename(path, nearer, src_dir_fd=top, dst_dir_fd=top)
                    path = nearer
                for name, status in list(_statuses(folder)):
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(f"{path}/{name}")
                    else:
                        os.unlink(name, dir_fd=folder)
            folders.append(path)
        # What was found later is never above what was found before.
        for path in reversed(folders[1:]):
            os.rmdir(path, dir_fd=top)


@contextmanager
def _opened(root: str) -> Iterator[int]:
    folder = os.open(os.path.realpath(root), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


@contextmanager
def _unfolded(top: int, path: str, rights: int) -> Iterator[int]:
    """Context: the folder at `path` below `top`, open, with at least these rights for its owner."""
    try:
        place = os.open(path, _FOLDER, dir_fd=top)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotADirectoryError(error.errno, f"{path} is a link now") from None
        raise
    try:
        here = f"/proc/self/fd/{place}"
        # A command that still runs may have put a link above it in the meantime: only what is where it should be.
        if not f"{os.readlink(here)}/".startswith(os.readlink(f"/proc/self/fd/{top}") + "/"):
            raise FileNotFoundError(errno.ENOENT, f"{path} is elsewhere now")
        mode = os.fstat(place).st_mode
        if mode & rights != rights:
            os.chmod(here, stat.S_IMODE(mode) | rights)
        folder = os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(place)
    try:
        yield folder
    finally:
        os.close(folder)


def _statuses(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        try:
            yield name, os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
