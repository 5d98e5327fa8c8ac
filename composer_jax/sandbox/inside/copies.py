"""Copies of workspaces with files and folders of any mode and any depth.

The walk is not recursive: two descriptors, in the source and in the copy, move down and up together. The mode of a
closed file or folder is widened while it is copied, so a lock keeps other copies from reading the wider mode.
"""

import errno
import fcntl
import os
import stat

from .files import closing_fd

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_SENDFILE = 1 << 30  # bytes that one call may copy


def copy_layer(layer: str, target: str) -> None:
    """Copies the workspace of a frozen layer, closed files and folders included; the layer is unchanged afterwards."""
    with closing_fd(os.open(layer, _FOLDER)) as place:
        fcntl.flock(place, fcntl.LOCK_EX)  # in the folder of the layer, which no command can close
        copy_tree(f"{layer}/changes", target, open_up=True)


def copy_tree(folder: str, target: str, *, open_up: bool = False) -> None:
    """Copies folders, files and links of a folder into an empty one, with modes and times; no pipes and sockets.

    open_up: make unreadable files and folders readable meanwhile. Raises OSError when something cannot be read or
    written.
    """
    with _Walk(folder, target, open_up) as walk:
        while walk.levels:
            names = walk.levels[-1][1]
            if not names:
                walk.leave()
                continue
            name = names.pop()
            status = os.stat(name, dir_fd=walk.source, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                walk.enter(name, status)
            elif stat.S_ISREG(status.st_mode):
                walk.copy_file(name, status)
            elif stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(name, dir_fd=walk.source), name, dir_fd=walk.copy)
                os.utime(name, ns=_times(status), dir_fd=walk.copy, follow_symlinks=False)


class _Walk:
    """Context with the two open folders. levels: status of each folder on the way, and its names still to be copied."""

    def __init__(self, folder: str, target: str, open_up: bool):
        self.open_up = open_up
        self.levels: list[tuple[os.stat_result, list[str]]] = []
        folder = os.path.realpath(folder)
        status = os.stat(folder)
        self.copy = os.open(target, _FOLDER)
        self.source = self._open(folder, None, status)
        self.levels.append((status, os.listdir(self.source)))

    def __enter__(self) -> "_Walk":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            while self.levels:
                self.leave()
        finally:
            os.close(self.source)
            os.close(self.copy)

    def enter(self, name: str, status: os.stat_result) -> None:
        """Goes down into a folder, which it creates in the copy."""
        os.mkdir(name, 0o700, dir_fd=self.copy)
        self.copy = _replaced(self.copy, os.open(name, _FOLDER, dir_fd=self.copy))
        self.source = _replaced(self.source, self._open(name, self.source, status))
        self.levels.append((status, os.listdir(self.source)))

    def leave(self) -> None:
        """Goes up; restores the mode of the folder and sets that of the copy, except for the outermost copy."""
        status, _ = self.levels.pop()
        mode = stat.S_IMODE(status.st_mode)
        above = [os.open("..", _FOLDER, dir_fd=place) for place in (self.source, self.copy)] if self.levels else []
        if self.open_up and stat.S_IMODE(os.fstat(self.source).st_mode) != mode:
            os.fchmod(self.source, mode)
        if above:
            os.utime(self.copy, ns=_times(status))
            os.fchmod(self.copy, mode)
            self.source, self.copy = _replaced(self.source, above[0]), _replaced(self.copy, above[1])

    def copy_file(self, name: str, status: os.stat_result) -> None:
        """Copies a file of the open folder."""
        mode = stat.S_IMODE(status.st_mode)
        closed = self.open_up and not mode & 0o400
        if closed:
            os.chmod(name, mode | 0o400, dir_fd=self.source)
        with closing_fd(os.open(name, _READ, dir_fd=self.source)) as old:
            if closed:
                os.fchmod(old, mode)
            with closing_fd(os.open(name, _FRESH, 0o600, dir_fd=self.copy)) as new:
                _copy_bytes(old, new, status.st_size)
                os.utime(new, ns=_times(status))
                os.fchmod(new, mode)

    def _open(self, name: str, folder: int | None, status: os.stat_result) -> int:
        if self.open_up and status.st_mode & 0o500 != 0o500:
            os.chmod(name, stat.S_IMODE(status.st_mode) | 0o500, dir_fd=folder)
        return os.open(name, _FOLDER, dir_fd=folder)


def _replaced(old: int, new: int) -> int:
    os.close(old)
    return new


def _copy_bytes(old: int, new: int, size: int) -> None:
    """Copies the data of a file and keeps its holes: a sparse file may be larger than the disk."""
    os.truncate(new, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(old, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # only a hole is left
        end = os.lseek(old, at, os.SEEK_HOLE)
        os.lseek(new, at, os.SEEK_SET)
        while at < end:
            sent = os.sendfile(new, old, at, min(end - at, MAX_SENDFILE))
            if not sent:
                return
            at += sent


def _times(status: os.stat_result) -> tuple[int, int]:
    return status.st_atime_ns, status.st_mtime_ns
