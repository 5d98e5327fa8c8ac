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

MAX_PATH_CHARACTERS = (
    1000  # characters of a path below the folder; what is deeper is neither counted nor kept where it is
)
BLOCK = 512  # the unit of st_blocks
MAX_ATTEMPTS = 4  # at a folder that a command closes while it is looked at
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskUsage(NamedTuple):
    """What is in a folder: bytes on disk, how many files and folders, and whether some cannot be counted: too deep, or
    closed again by whoever works there as often as they are opened."""

    size: int
    entries: int
    too_deep: bool = False
    closed: bool = False


def disk_usage(root: str) -> DiskUsage:
    """What is below `root`. What comes or goes meanwhile may or may not be counted; nothing is counted after a folder
    that stays closed."""
    size, entries, too_deep, waiting = 0, 0, False, ["."]
    with _open_root(root) as top:
        while waiting:
            path = waiting.pop()
            try:
                found = _list_folder(top, path)
            except (FileNotFoundError, NotADirectoryError):  # a command that still runs took it away
                continue
            except PermissionError:
                return DiskUsage(size, entries, too_deep, closed=True)
            for name, status in found:
                size, entries = size + status.st_blocks * BLOCK, entries + 1
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(f"{path}/{name}")
            if len(path) > MAX_PATH_CHARACTERS:
                too_deep = True
                waiting = [other for other in waiting if not other.startswith(f"{path}/")]
    return DiskUsage(size, entries, too_deep)


def remove_contents(root: str) -> None:
    """Delete all that is in a folder in which nobody works any more. OSError when something cannot be deleted."""
    folders, waiting = [], ["."]
    with _open_root(root) as top:
        while waiting:
            path = waiting.pop()
            with _open_folder(top, path, 0o700) as folder:
                if len(path) > MAX_PATH_CHARACTERS:
                    nearer = secrets.token_hex(16)
                    os.rename(path, nearer, src_dir_fd=top, dst_dir_fd=top)
                    path = nearer
                for name, status in list(_scan(folder)):
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(f"{path}/{name}")
                    else:
                        os.unlink(name, dir_fd=folder)
            folders.append(path)
        # What was found later is never above what was found before.
        for path in reversed(folders[1:]):
            os.rmdir(path, dir_fd=top)


def _list_folder(top: int, path: str, tries: int = MAX_ATTEMPTS) -> list[tuple[str, os.stat_result]]:
    """What is in the folder at `path` below `top`. PermissionError when it is closed again and again."""
    try:
        with _open_folder(top, path, 0o500) as folder:
            return list(_scan(folder))
    except PermissionError:
        if tries == 1:
            raise
    _open_up_path(top, path)
    return _list_folder(top, path, tries - 1)


def _open_up_path(top: int, path: str) -> None:
    """Opens up `top` and the folders below it on the way to `path`, as far as whoever closes them allows."""
    folder = os.dup(top)
    try:
        for name in path.split("/"):
            _grant_owner(folder, 0o500)
            below = os.open(name, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
    except PermissionError:
        return  # closed in between: the next try begins at the top
    finally:
        os.close(folder)


@contextmanager
def _open_root(root: str) -> Iterator[int]:
    folder = os.open(os.path.realpath(root), _FOLDER)
    try:
        _grant_owner(folder, 0o700)
        yield folder
    finally:
        os.close(folder)


@contextmanager
def _open_folder(top: int, path: str, rights: int) -> Iterator[int]:
    """Context: the folder at `path` below `top`, open, with at least these rights for its owner."""
    try:
        place = os.open(path, _FOLDER, dir_fd=top)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotADirectoryError(error.errno, f"{path} is a link now") from None
        raise
    try:
        # A command that still runs may have put a link above it in the meantime: only what is where it should be.
        if not f"{os.readlink(f'/proc/self/fd/{place}')}/".startswith(os.readlink(f"/proc/self/fd/{top}") + "/"):
            raise FileNotFoundError(errno.ENOENT, f"{path} is elsewhere now")
        folder = os.open(_grant_owner(place, rights), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(place)
    try:
        yield folder
    finally:
        os.close(folder)


def _grant_owner(place: int, rights: int) -> str:
    """At least these rights for the owner of an open folder; its path by the descriptor."""
    here, mode = f"/proc/self/fd/{place}", os.fstat(place).st_mode
    if mode & rights != rights:
        os.chmod(here, stat.S_IMODE(mode) | rights)
    return here


def _scan(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        try:
            yield name, os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
