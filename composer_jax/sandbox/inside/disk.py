"""Disk usage of a folder, and the removal of its contents.

Commands can close folders to everyone and nest them deeper than paths and recursion reach. So nothing here is
recursive, no link is followed, and the owner's rights are restored where needed.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .files import closing_fd

MAX_PATH_CHARACTERS = 1000  # of a path below the folder; deeper files are not counted, and are moved up to be removed
BLOCK = 512  # the unit of st_blocks
MAX_ATTEMPTS = 4  # to list a folder that a command closes meanwhile
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskUsage(NamedTuple):
    """What a folder holds.

    size: bytes on disk. entries: files and folders. too_deep, closed: whether some entries were not counted, because
    they are too deep or because a command closes their folder again and again.
    """

    size: int
    entries: int
    too_deep: bool = False
    closed: bool = False


def disk_usage(root: str) -> DiskUsage:
    """Returns the disk usage below `root`.

    Changes meanwhile may or may not be counted; counting stops at a folder that stays closed.
    """
    size, entries, too_deep, waiting = 0, 0, False, ["."]
    with _open_root(root) as top:
        while waiting:
            path = waiting.pop()
            try:
                listed = _list_folder(top, path)
            except (FileNotFoundError, NotADirectoryError):  # a running command removed it
                continue
            except PermissionError:
                return DiskUsage(size, entries, too_deep, closed=True)
            for name, status in listed:
                size, entries = size + status.st_blocks * BLOCK, entries + 1
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(f"{path}/{name}")
            if len(path) > MAX_PATH_CHARACTERS:
                too_deep = True
                waiting = [other for other in waiting if not other.startswith(f"{path}/")]
    return DiskUsage(size, entries, too_deep)


def remove_contents(root: str) -> None:
    """Deletes everything in a folder that no process uses. Raises OSError when something cannot be deleted."""
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
        # A folder comes before the folders in it.
        for path in reversed(folders[1:]):
            os.rmdir(path, dir_fd=top)


def _list_folder(top: int, path: str, tries: int = MAX_ATTEMPTS) -> list[tuple[str, os.stat_result]]:
    """Lists the folder at `path` below `top`. Raises PermissionError when it is closed again and again."""
    try:
        with _open_folder(top, path, 0o500) as folder:
            return list(_scan(folder))
    except PermissionError:
        if tries == 1:
            raise
    _open_up_path(top, path)
    return _list_folder(top, path, tries - 1)


def _open_up_path(top: int, path: str) -> None:
    """Restores the rights of the owner on `top` and on the folders from there to `path`."""
    folder = os.dup(top)
    try:
        for name in path.split("/"):
            _grant_owner(folder, 0o500)
            below = os.open(name, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
    except PermissionError:
        return  # closed again: the next attempt starts at the top
    finally:
        os.close(folder)


@contextmanager
def _open_root(root: str) -> Iterator[int]:
    with closing_fd(os.open(os.path.realpath(root), _FOLDER)) as folder:
        _grant_owner(folder, 0o700)
        yield folder


@contextmanager
def _open_folder(top: int, path: str, rights: int) -> Iterator[int]:
    """Context with a descriptor of the folder at `path` below `top`, whose owner gets at least these rights."""
    try:
        place = os.open(path, _FOLDER, dir_fd=top)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotADirectoryError(error.errno, f"{path} is a link now") from None
        raise
    with closing_fd(place):
        # A running command may have replaced a folder above by a link, so the real path is checked.
        if not f"{os.readlink(f'/proc/self/fd/{place}')}/".startswith(os.readlink(f"/proc/self/fd/{top}") + "/"):
            raise FileNotFoundError(errno.ENOENT, f"{path} is elsewhere now")
        folder = os.open(_grant_owner(place, rights), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with closing_fd(folder):
        yield folder


def _grant_owner(place: int, rights: int) -> str:
    """Gives the owner of an open folder at least these rights; returns its path in /proc/self/fd."""
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
