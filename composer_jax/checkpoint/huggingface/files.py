"""Folders of safetensors files, local or behind any URL that fsspec knows (gs://...): tensors read one at a time, and
files written in one pass.

The format (https://huggingface.co/docs/safetensors): eight bytes of length, a JSON header of name -> dtype, shape and
byte range, then the bytes. The library of that name maps local files into memory; a terabyte in a bucket has to be read
by byte ranges, and a mapped file counts as memory of the process, so both are read here in one way.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from fsspec.core import url_to_fs

from composer_jax.errors import UserError

INDEX = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Stored(NamedTuple):
    """Where a tensor lies."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Byte in the file."""
    size: int
    """Bytes."""


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


class SafetensorsFolder:
    """Every tensor of the safetensors files of a folder. Only headers are read before `read`.

    Raises:
      UserError: there are no such files, one that the index names is missing, or one is damaged or cut short.
    """

    def __init__(self, folder: Folder):
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        for file in self._files():
            for name, stored in self._header(file).items():
                if name in self.tensors:
                    raise UserError(f"{name} is in both {self.tensors[name].file} and {file} of {folder.name}.")
                self.tensors[name] = stored

    def read(self, name: str) -> np.ndarray:
        stored = self.tensors[name]
        data = self.folder.read(stored.file, stored.begin, stored.size)
        return data.view(DTYPES[stored.dtype]).reshape(stored.shape)

    def _files(self) -> list[str]:
        there = self.folder.files()
        if INDEX in there:
            weight_map = self.folder.json(INDEX).get("weight_map")
            if not isinstance(weight_map, dict):
                raise UserError(f"{self.folder.name}/{INDEX} has no weight_map.")
            named = sorted(set(weight_map.values()))
            missing = [file for file in named if file not in there]
            if missing:
                raise UserError(f"{self.folder.name} lacks {missing[0]}, which its {INDEX} names.")
        else:
            named = [file for file in there if file.endswith(".safetensors")]
        if not named:
            raise UserError(f"{self.folder.name} has no safetensors files.")
        return named

    def _header(self, file: str) -> dict[str, Stored]:
        where = f"{self.folder.name}/{file}"
        total = self.folder.fs.size(self.folder.path(file))
        if total < 8:
            raise UserError(f"{where} has {total} bytes, too few for a safetensors file; fetch it again.")
        length = int(self.folder.read(file, 0, 8).view("<u8")[0])
        if 8 + length > total:
            raise UserError(
                f"{where} is cut short or damaged: it has {total} bytes, its header alone {8 + length}; fetch it again."
            )
        try:
            header = json.loads(self.folder.read(file, 8, length).tobytes())
            header.pop("__metadata__", None)
            found = {
                name: Stored(
                    file,
                    entry["dtype"],
                    tuple(entry["shape"]),
                    8 + length + entry["data_offsets"][0],
                    entry["data_offsets"][1] - entry["data_offsets"][0],
                )
                for name, entry in header.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise UserError(f"the header of {where} is damaged ({error}); fetch the file again.") from error
        for name, stored in found.items():
            if stored.dtype in DTYPES:  # of other dtypes are tensors that nobody asks for
                size = math.prod(stored.shape) * DTYPES[stored.dtype].itemsize
                if stored.size != size:
                    raise UserError(f"{name} in {where} has {stored.size} bytes for {size}; the file is damaged.")
            if stored.begin + stored.size > total:
                raise UserError(
                    f"{where} is cut short: it has {total} bytes of {stored.begin + stored.size}; fetch it again."
                )
        return found


def write_safetensors(folder: Folder, file: str, tensors: Iterable[tuple[str, tuple[int, ...], np.dtype]], get) -> None:
    """Writes one file in a single pass.

    Args:
      tensors: (name, shape, dtype) of each, in the order of the file.
      get: name -> C-contiguous array; called once per tensor, when its turn comes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    names, begin = [], 0
    for name, shape, dtype in tensors:
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, begin + size]}
        names.append(name)
        begin += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with folder.fs.open(folder.path(file), "wb") as opened:
        opened.write(np.array(len(encoded), "<u8").tobytes())
        opened.write(encoded)
        for name in names:
            opened.write(get(name).view(np.uint8).reshape(-1).data)


def shard(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut into files of at most `limit` bytes (a larger tensor has a file of its own)."""
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not files or size > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return files
