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
    """A folder by path or URL. Missing files and unreadable ones are a UserError that names them."""

    def __init__(self, path: str | Path):
        self.name = str(path).rstrip("/")
        try:
            self.fs, self.root = url_to_fs(self.name)
        except (ValueError, ImportError) as error:
            raise UserError(f"{self.name} is neither a folder nor a URL that can be read: {error}") from error
        self.root = self.root.rstrip("/")  # absolute, where the folder is local
        self.local = "file" in np.atleast_1d(self.fs.protocol)

    def path(self, file: str) -> str:
        return f"{self.root}/{file}"

    def files(self) -> list[str]:
        """Names in the folder."""
        with self._named(self.name):
            if not self.fs.isdir(self.root):
                raise UserError(f"there is no folder {self.name}")
            return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in self.fs.ls(self.root, detail=False))

    def require_empty(self) -> None:
        """Raises a UserError if something is there that writing to the folder would mix with or replace."""
        if self.fs.exists(self.root) and (not self.fs.isdir(self.root) or self.files()):
            raise UserError(f"{self.name} is there already and not empty; choose another folder, or delete it.")

    def json(self, file: str) -> dict[str, Any]:
        try:
            with self._named(f"{self.name}/{file}"):
                found = json.loads(self.fs.cat_file(self.path(file)))
        except FileNotFoundError as error:
            raise UserError(f"{self.name} has no {file}; is it the folder of a Hugging Face checkpoint?") from error
        except ValueError as error:
            raise UserError(f"{self.name}/{file} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise UserError(f"{self.name}/{file} holds a JSON {type(found).__name__}, not an object.")
        return found

    def read(self, file: str, begin: int, size: int) -> np.ndarray:
        """A writable uint8 array with these bytes of a file."""
        with self._named(f"{self.name}/{file}"):
            if not self.local:
                data = np.frombuffer(bytearray(self.fs.cat_file(self.path(file), begin, begin + size)), np.uint8)
                done = len(data)
            else:
                data, done = np.empty(size, np.uint8), 0
                with open(self.path(file), "rb", buffering=0) as opened:
                    while count := os.preadv(opened.fileno(), [memoryview(data)[done:]], begin + done):
                        done += count
        if done < size:
            raise UserError(f"{self.name}/{file} ends at byte {begin + done}, within a tensor; fetch it again.")
        return data

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """What a file system refuses, in one sentence; buckets raise exceptions of their own kinds."""
        try:
            yield
        except (UserError, FileNotFoundError, ValueError):
            raise
        except Exception as error:
            if self.local and not isinstance(error, OSError):
                raise
            raise UserError(f"cannot read {what}: {error}") from error
