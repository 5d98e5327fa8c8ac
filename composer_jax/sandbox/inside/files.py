"""File operations of the worker, all inside the workspace.

Every component of a path is opened relative to the one before it and without following links, so no link leads out. An
operation that fails raises FileRefused with one sentence for the agent. `closing_fd` closes descriptors for the other
modules, too.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator

MAX_DEPTH = 64  # folders within folders
MAX_NAMES = 2 << 20  # characters of all paths together, so that the header of a reply stays below the host's limit
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: opening a FIFO must not wait
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FileRefused(Exception):
    """The operation failed; the message is one sentence for the caller."""


class WorkspaceFiles:
    """The folder `root`, which agents know as `alias`. Replies hold at most `max_bytes`."""

    def __init__(self, root: str, alias: str, max_bytes: int):
        self.alias = alias
        self.max_bytes = max_bytes
        self.root = os.open(root, _FOLDER)

    def read(self, path: str) -> bytes:
        """Returns the content of a regular file."""
        with _Parent(self, path) as (parent, name), closing_fd(open_at(name, _READ, parent, path)) as fd:
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                raise FileRefused(f"{path} is a folder, not a file")
            if not stat.S_ISREG(status.st_mode):
                raise FileRefused(f"{path} is not a regular file")
            return read_file(fd, path, status.st_size, self.max_bytes)

    def write(self, path: str, data: bytes | memoryview) -> None:
        """Creates or replaces a regular file, and creates the folders above it."""
        parents = _Parent(self, path, create=True)
        with parents as (parent, name), closing_fd(open_at(name, _WRITE, parent, path)) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FileRefused(f"{path} is not a regular file")
            os.ftruncate(fd, 0)
            _write_all(fd, memoryview(data))

    def delete(self, path: str) -> None:
        """Removes one file or link."""
        with _Parent(self, path) as (parent, name):
            if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise FileRefused(f"{path} is a folder, not a file")
            os.unlink(name, dir_fd=parent)

    def paths(self) -> list[str]:
        """Returns the relative paths of all regular files, sorted; links and special files are left out."""
        return sorted(self._walk())

    def write_files(self, index: list[tuple[str, int]], body: bytes) -> None:
        """Writes several files. index: (path, length) each; body: their contents in that order."""
        view, offset = memoryview(body), 0
        for path, length in index:
            self.write(path, view[offset : offset + length])
            offset += length

    def apply(self, index: list[tuple[str, str, int, int]], body: bytes) -> None:
        """Makes the changes of a report of changes.py.

        index: (path, kind, mode, length) each, a folder before what is in it. body: their data in that order.
        """
        view, offset, modes = memoryview(body), 0, []
        for path, kind, mode, length in index:
            data, offset = view[offset : offset + length], offset + length
            with _Parent(self, path, create=True) as (parent, name):
                self._make_path(parent, name, path, kind, mode & 0o777, data)
            if kind == "folder":
                modes.append((path, mode & 0o777))
        for path, mode in reversed(modes):  # last, because a folder may be closed
            with _Parent(self, path) as (parent, name):
                os.chmod(name, mode, dir_fd=parent)  # fails where a job has replaced the folder

    def _make_path(self, parent: int, name: str, path: str, kind: str, mode: int, data: memoryview) -> None:
        try:
            is_folder = stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            is_folder = None
        if is_folder is not None and kind != "folder" and (is_folder or kind == "gone"):
            _remove(parent, name, path)
        if kind == "folder":
            if is_folder is False:
                os.unlink(name, dir_fd=parent)
            if not is_folder:
                os.mkdir(name, dir_fd=parent)
        elif kind in ("file", "link"):
            _replace(parent, name, path, mode if kind == "file" else None, data)

    def parts(self, path: str) -> list[str]:
        """Returns the components of a path in the workspace. Raises FileRefused for any other path."""
        inside = path
        if path == self.alias or path.startswith(self.alias + "/"):
            inside = path[len(self.alias) + 1 :]
        parts = [part for part in inside.split("/") if part not in ("", ".")]
        if inside.startswith("/") or ".." in parts:
            raise FileRefused(f"{path!r} is outside the workspace")
        try:
            encoded = os.fsencode(inside)
        except UnicodeEncodeError:
            encoded = b"\0"
        if b"\0" in encoded:
            raise FileRefused(f"{path!r} is not a file name")
        if not parts:
            raise FileRefused(f"{path!r} is a folder, not a file")
        if len(parts) > MAX_DEPTH:
            raise FileRefused(f"{path[:60]!r}... has more than {MAX_DEPTH} folders")
        return parts

    def _walk(self) -> Iterator[str]:
        os.fchmod(self.root, 0o755)  # a command may have removed all rights
        characters = 0
        for path in self._walk_folder(self.root, "", 0):
            characters += len(path)
            if characters > MAX_NAMES:
                raise FileRefused(f"the names of all files are longer than {MAX_NAMES} characters together")
            yield path

    def _walk_folder(self, folder: int, prefix: str, depth: int) -> Iterator[str]:
        if depth > MAX_DEPTH:
            raise FileRefused(f"the workspace has folders nested more than {MAX_DEPTH} deep")
        try:
            with os.scandir(folder) as entries:
                listed = [(entry.name, entry.stat(follow_symlinks=False).st_mode) for entry in entries]
        except OSError as error:
            raise _explain(error, prefix or ".") from None
        for name, mode in sorted(listed):
            if stat.S_ISREG(mode):
                yield prefix + name
            elif stat.S_ISDIR(mode):
                with closing_fd(open_at(name, _FOLDER, folder, prefix + name)) as child:
                    restore_owner_mode(child)
                    yield from self._walk_folder(child, f"{prefix}{name}/", depth + 1)


def _replace(parent: int, name: str, path: str, mode: int | None, data: memoryview) -> None:
    """Replaces a file, or without a mode a link, atomically: readers see the whole old or the whole new one."""
    fresh = f".composer-{secrets.token_hex(8)}"
    try:
        if mode is None:
            os.symlink(bytes(data), os.fsencode(fresh), dir_fd=parent)
        else:
            with closing_fd(open_at(fresh, _WRITE | os.O_EXCL, parent, path)) as fd:
                _write_all(fd, data)
                os.fchmod(fd, mode)
        if os.geteuid() == 0:  # root of the host, in a folder of another user
            _keep_owner(parent, name, fresh)
        os.rename(fresh, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=parent)
        raise


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


def _keep_owner(parent: int, name: str, fresh: str) -> None:
    """Gives a new file the owner of the file that it replaces, else that of the folder."""
    try:
        old = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        old = os.fstat(parent)
    os.chown(fresh, old.st_uid, old.st_gid, dir_fd=parent, follow_symlinks=False)


def _remove(parent: int, name: str, path: str, depth: int = 0) -> None:
    """Removes a file, a link, or a folder with everything in it."""
    if depth > MAX_DEPTH:
        raise FileRefused(f"{path[:60]}... cannot be removed: its folders are nested more than {MAX_DEPTH} deep")
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=parent)
        return
    with closing_fd(open_at(name, _FOLDER, parent, path)) as folder:
        restore_owner_mode(folder)
        for below in os.listdir(folder):
            _remove(folder, below, f"{path}/{below}", depth + 1)
    os.rmdir(name, dir_fd=parent)


class _Parent:
    """Context that opens the parent folder of a path without following links: (descriptor, last component).

    Errors of the kernel inside become FileRefused.
    """

    def __init__(self, workspace: WorkspaceFiles, path: str, create: bool = False):
        self.workspace, self.path, self.create = workspace, path, create

    def __enter__(self) -> tuple[int, str]:
        *folders, name = self.workspace.parts(self.path)
        restore_owner_mode(self.workspace.root)
        self.fd = os.dup(self.workspace.root)
        try:
            for folder in folders:
                if self.create:
                    try:
                        os.mkdir(folder, dir_fd=self.fd)
                    except FileExistsError:
                        pass
                    except OSError as error:
                        raise _explain(error, self.path) from None
                below = open_at(folder, _FOLDER, self.fd, self.path)
                os.close(self.fd)
                self.fd = below
        except BaseException:
            os.close(self.fd)
            raise
        return self.fd, name

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        os.close(self.fd)
        if isinstance(error, OSError):
            raise _explain(error, self.path) from None


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Context that closes a descriptor."""
    try:
        yield fd
    finally:
        os.close(fd)


def read_file(fd: int, path: str, size: int, most: int) -> bytes:
    """Returns the content of an open file of about `size` bytes. Refuses more than `most`, also if the file grows."""
    if size > most:
        raise FileRefused(f"{path} has {size} bytes; at most {most} can be read")
    chunks, left = [], most
    while chunk := os.read(fd, max(65536, size + 1)):
        chunks.append(chunk)
        left -= len(chunk)
        if left < 0:
            raise FileRefused(f"{path} grows while it is read; at most {most} bytes can be read")
    return b"".join(chunks)


def open_at(name: str, flags: int, parent: int, path: str) -> int:
    """Opens `name` in `parent`; restores rights of the owner that a command removed."""
    try:
        try:
            return os.open(name, flags, 0o644, dir_fd=parent)
        except PermissionError:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                raise
            os.chmod(name, stat.S_IMODE(status.st_mode) | 0o700, dir_fd=parent)
            return os.open(name, flags, 0o644, dir_fd=parent)
    except OSError as error:
        raise _explain(error, path, name, parent) from None


def restore_owner_mode(folder: int) -> None:
    """Restores the rights of the owner of an open folder that a command removed."""
    mode = os.fstat(folder).st_mode
    if mode & 0o700 != 0o700:
        os.fchmod(folder, stat.S_IMODE(mode) | 0o755)


def _explain(error: OSError, path: str, name: str = "", parent: int = -1) -> FileRefused:
    """Returns the error of the kernel about `path` as one sentence."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR) and name:
        try:
            if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                return FileRefused(f"{path} goes through the symbolic link {name!r}, which is not followed")
        except OSError:
            pass
    sentences = {
        errno.ENOENT: f"{path} does not exist",
        errno.EISDIR: f"{path} is a folder, not a file",
        errno.ENOTDIR: f"{path} goes through a file that is not a folder",
        errno.ENAMETOOLONG: f"{path[:60]}... is longer than a file name may be",
        errno.ENXIO: f"{path} is not a regular file",
        errno.ENOSPC: f"no space left in the workspace for {path}",
        errno.EDQUOT: f"no space left in the workspace for {path}",
    }
    return FileRefused(sentences.get(error.errno or 0, f"{path}: {error.strerror}"))
