"""Folders of files, local or at any URL that fsspec reads (gs://...), with errors that name the file."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.core import url_to_fs

from composer_jax.errors import UserError


class Folder:
    """A folder at a path or URL. Missing and unreadable files raise a UserError that names them."""

    def __init__(self, path: str | Path):
        self.name = str(path).rstrip("/")
        try:
            self.fs, self.root = url_to_fs(self.name)
        except (ValueError, ImportError) as error:
            raise UserError(f"{self.name} is neither a folder nor a readable URL: {error}") from error
        self.root = self.root.rstrip("/")  # absolute, where the folder is local
        self.local = "file" in np.atleast_1d(self.fs.protocol)

    def path(self, file: str) -> str:
        return f"{self.root}/{file}"

    def files(self) -> list[str]:
        """Returns the names in the folder, sorted."""
        with self._naming_errors(self.name):
            if not self.fs.isdir(self.root):
                raise UserError(f"there is no folder {self.name}")
            return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in self.fs.ls(self.root, detail=False))

    def require_empty(self) -> None:
        """Raises a UserError if the folder exists and is not empty, or is a file."""
        if self.fs.exists(self.root) and (not self.fs.isdir(self.root) or self.files()):
            raise UserError(f"{self.name} exists and is not empty; choose another folder, or delete it.")

    def content(self, file: str) -> bytes:
        """Returns all bytes of a file. Raises FileNotFoundError if there is no such file."""
        with self._naming_errors(f"{self.name}/{file}"):
            return self.fs.cat_file(self.path(file))

    def json(self, file: str) -> dict[str, Any]:
        """Returns the JSON object in a file."""
        try:
            content = json.loads(self.content(file))
        except FileNotFoundError as error:
            raise UserError(f"{self.name} has no {file}; is it the folder of a Hugging Face checkpoint?") from error
        except ValueError as error:
            raise UserError(f"{self.name}/{file} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise UserError(f"{self.name}/{file} holds a JSON {type(content).__name__}, not an object.")
        return content

    def read(self, file: str, begin: int, size: int) -> np.ndarray:
        """Reads `size` bytes of a file, from `begin`, into a writable uint8 array."""
        with self._naming_errors(f"{self.name}/{file}"):
            if not self.local:
                data = np.frombuffer(bytearray(self.fs.cat_file(self.path(file), begin, begin + size)), np.uint8)
                done = len(data)
            else:
                data, done = np.empty(size, np.uint8), 0
                with open(self.path(file), "rb", buffering=0) as opened:
                    while count := os.preadv(opened.fileno(), [data.data[done:]], begin + done):
                        done += count
        if done < size:
            raise UserError(f"{self.name}/{file} ends at byte {begin + done}, within a tensor; fetch it again.")
        return data

    @contextlib.contextmanager
    def _naming_errors(self, what: str) -> Iterator[None]:
        """Turns errors of the file system into a UserError; remote file systems raise exceptions of their own types."""
        try:
            yield
        except (UserError, FileNotFoundError, ValueError):
            raise
        except Exception as error:
            if self.local and not isinstance(error, OSError):
                raise
            raise UserError(f"cannot read {what}: {error}") from error


class ReadOnceFolder(Folder):
    """A folder whose list of names, and each file that is read as a whole, is read once and stays in memory.

    It is a source of texts for `data.load_chat_format` (TextFiles, data/text_files.py).
    """

    def __init__(self, path: str | Path):
        super().__init__(path)
        self._names: list[str] | None = None
        self._contents: dict[str, bytes] = {}

    def files(self) -> list[str]:
        """See Folder.files."""
        if self._names is None:
            self._names = super().files()
        return self._names

    def content(self, file: str) -> bytes:
        """See Folder.content."""
        if file not in self._contents:
            self._contents[file] = super().content(file)
        return self._contents[file]

    def text(self, file: str) -> str | None:
        """See TextFiles.text."""
        if file not in self.files():
            return None
        try:
            return self.content(file).decode()
        except (UnicodeDecodeError, FileNotFoundError) as error:
            raise UserError(f"{self.name}/{file} cannot be read ({error}); download it again") from error
