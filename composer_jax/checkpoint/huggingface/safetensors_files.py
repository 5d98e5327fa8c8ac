"""Folders of safetensors files: tensors read one at a time, and files written in one pass.

The format (https://huggingface.co/docs/safetensors): eight bytes of length, a JSON header of name -> dtype, shape and
byte range, then the bytes. The safetensors library maps local files into memory. A checkpoint of a terabyte in a bucket
has to be read by byte ranges, and a mapped file counts as memory of the process, so both are read by ranges here.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from composer_jax.checkpoint.folder import Folder
from composer_jax.errors import UserError

INDEX = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorSpan(NamedTuple):
    """The bytes of a tensor in a file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset in the file."""
    size: int
    """Bytes."""


class SafetensorsFolder:
    """The tensors of all safetensors files in a folder. The constructor reads the headers only.

    Raises:
      UserError: there are no such files, one in the index is missing, or one is damaged or truncated.
    """

    def __init__(self, folder: Folder):
        self.folder = folder
        self.tensors: dict[str, TensorSpan] = {}
        for file in self._files():
            for name, stored in self._header(file).items():
                if name in self.tensors:
                    raise UserError(f"{name} is in both {self.tensors[name].file} and {file} of {folder.name}.")
                self.tensors[name] = stored

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as it is stored. Raises UserError for a dtype that is not in DTYPES."""
        stored = self.tensors[name]
        if stored.dtype not in DTYPES:
            raise UserError(f"{name} in {stored.file} is {stored.dtype}; {', '.join(DTYPES)} can be read.")
        data = self.folder.read(stored.file, stored.begin, stored.size)
        return data.view(DTYPES[stored.dtype]).reshape(stored.shape)

    def _files(self) -> list[str]:
        names = self.folder.files()
        if INDEX in names:
            weight_map = self.folder.json(INDEX).get("weight_map")
            if not isinstance(weight_map, dict):
                raise UserError(f"{self.folder.name}/{INDEX} has no weight_map.")
            files = sorted(set(weight_map.values()))
            missing = [file for file in files if file not in names]
            if missing:
                raise UserError(f"{self.folder.name} lacks {missing[0]}, which its {INDEX} names.")
        else:
            files = [file for file in names if file.endswith(".safetensors")]
        if not files:
            raise UserError(f"{self.folder.name} has no safetensors files.")
        return files

    def _header(self, file: str) -> dict[str, TensorSpan]:
        where = f"{self.folder.name}/{file}"
        total = self.folder.fs.size(self.folder.path(file))
        if total < 8:
            raise UserError(f"{where} has {total} bytes, too few for a safetensors file; fetch it again.")
        length = int(self.folder.read(file, 0, 8).view("<u8")[0])
        if 8 + length > total:
            raise UserError(
                f"{where} is truncated or damaged: it has {total} bytes, its header alone {8 + length}; fetch it again."
            )
        try:
            header = json.loads(self.folder.read(file, 8, length).tobytes())
            header.pop("__metadata__", None)
            spans = {
                name: TensorSpan(
                    file,
                    str(entry["dtype"]),
                    tuple(entry["shape"]),
                    8 + length + entry["data_offsets"][0],
                    entry["data_offsets"][1] - entry["data_offsets"][0],
                )
                for name, entry in header.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise UserError(f"the header of {where} is damaged ({error}); fetch the file again.") from error
        for name, stored in spans.items():
            if stored.dtype in DTYPES:
                size = math.prod(stored.shape) * DTYPES[stored.dtype].itemsize
                if stored.size != size:
                    raise UserError(f"{name} in {where} has {stored.size} bytes for {size}; the file is damaged.")
            if stored.begin + stored.size > total:
                raise UserError(
                    f"{where} is truncated: it has {total} bytes of {stored.begin + stored.size}; fetch it again."
                )
        return spans


def write_safetensors(folder: Folder, file: str, tensors: Iterable[tuple[str, tuple[int, ...], np.dtype]], get) -> None:
    """Writes one file in a single pass.

    Args:
      tensors: (name, shape, dtype) of each, in the order of the file.
      get: name -> C-contiguous array; called once per tensor, in order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
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


def split_into_files(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divides names, in order, into files of at most `limit` bytes; a larger tensor has a file of its own."""
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not files or size > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return files
