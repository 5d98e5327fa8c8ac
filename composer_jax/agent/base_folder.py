"""The folder below the changes of a workspace, read on the host. It never changes; links are not followed."""

import functools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from composer_jax.agent.search.index import SearchIndex
from composer_jax.errors import UserError
from composer_jax.sandbox.async_lazy import AsyncLazy

Kind = Literal["file", "link", "folder"]
VCS_FOLDERS = frozenset((".git", ".hg", ".svn"))
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: opening a FIFO must not wait


@dataclass(frozen=True)
class Entry:
    """One path of a folder. size: bytes. mode: permission bits. data: the target of a link, as bytes."""

    kind: Kind
    size: int
    mode: int
    data: bytes = b""


class BaseFolder:
    """The contents of a folder by relative path, without special files (pipes, sockets, devices).

    All workspaces on the same folder share it and its search index (see `open_base_folder`).
    """

    def __init__(self, folder: Path | None):
        self._folder = folder
        self.entries: AsyncLazy[dict[str, Entry]] = AsyncLazy(self._list)
        """Path -> entry, a folder before its contents."""
        self.index: AsyncLazy[SearchIndex] = AsyncLazy(self._build_index)
        """The search index of all files."""

    def entry(self, path: str) -> Entry | None:
        """The entry at a path, reached through real folders only; None if there is none."""
        return self.entries.get_here().get(path)

    def read(self, path: str) -> bytes:
        """The content of a file of `entries`. Raises UserError if the folder has changed since it was listed."""
        if self._folder is None:
            raise UserError(f"an empty workspace has no file {path}")
        try:
            fd = os.open(os.path.join(self._folder, path), _READ)
            with open(fd, "rb") as file:
                return file.read()
        except OSError as error:
            raise UserError(
                f"{path} in {self._folder} cannot be read any more ({error.strerror}); do not change the folders "
                "of tasks while they are in use."
            ) from error

    def _build_index(self) -> SearchIndex:
        files = ((path, entry) for path, entry in self.entries.get_here().items() if entry.kind == "file")
        sizes = {path: entry.size for path, entry in files if not is_vcs_path(path)}
        return SearchIndex.of(sizes, self.read)

    def _list(self) -> dict[str, Entry]:
        if self._folder is None:
            return {}
        if not self._folder.is_dir():
            raise UserError(f"{self._folder} is not a folder; a workspace needs one.")
        try:
            return dict(_walk(str(self._folder), ""))
        except OSError as error:
            raise UserError(f"{self._folder} cannot be listed for workspaces: {error}") from error


@functools.lru_cache(maxsize=16)
def open_base_folder(folder: Path | None) -> BaseFolder:
    """The BaseFolder of a folder, the same object for the same folder; None: an empty folder."""
    return BaseFolder(folder)


def is_vcs_path(path: str) -> bool:
    """Whether a path belongs to version control, which searches and listings skip."""
    return not VCS_FOLDERS.isdisjoint(path.split("/"))


def _walk(folder: str, prefix: str) -> Iterator[tuple[str, Entry]]:
    with os.scandir(folder) as entries:
        items = sorted(entries, key=lambda entry: entry.name)
    for item in items:
        path, status = prefix + item.name, item.stat(follow_symlinks=False)
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISREG(status.st_mode):
            yield path, Entry("file", status.st_size, mode)
        elif stat.S_ISLNK(status.st_mode):
            yield path, Entry("link", 0, mode, os.fsencode(os.readlink(item.path)))
        elif stat.S_ISDIR(status.st_mode):
            yield path, Entry("folder", 0, mode)
            yield from _walk(item.path, f"{path}/")
