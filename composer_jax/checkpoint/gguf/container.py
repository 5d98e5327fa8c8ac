"""The container: metadata and tensors of a GGUF file, read by the `gguf` library, with errors that name the file."""

from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.errors import UserError

MAGIC = b"GGUF"
_REQUIRED = object()
_DAMAGED = (ValueError, IndexError, KeyError, OverflowError, TypeError)  # what the library raises for damaged files
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}


class GGUFContainer:
    """A memory-mapped GGUF file. The constructor reads its metadata and checks that all tensors are in the file.

    Raises:
      UserError: the gguf library is not installed; no such file, another format, a truncated or damaged file, a file of
        another byte order, one of several parts, or a tensor of a type that the library cannot dequantise.
    """

    def __init__(self, path: str | Path):
        self.path = str(path)
        self._library = _import_gguf()
        _require_magic(self.path)
        size = Path(self.path).stat().st_size
        try:
            self._reader = _bounded_reader(self._library)(self.path)
        except _DAMAGED as error:
            raise UserError(
                f"{self.path} of {size:,} bytes is truncated or damaged ({error}); fetch it again."
            ) from error
        if self._reader.endianess != self._library.GGUFEndian.LITTLE:
            raise UserError(f"{self.path} is big-endian; only little-endian GGUF files are read.")
        parts = self.value("split.count", int, 1)
        if parts > 1:
            raise UserError(f"{self.path} is one of {parts} parts; join them with llama-gguf-split --merge.")
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._require_readable_types()
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()
        }
        """Shapes by the names of the file, outermost dimension first: a matrix is [out, in]."""
        self.sizes: dict[str, int] = {name: int(tensor.n_bytes) for name, tensor in self._tensors.items()}
        """Bytes in the file, by name."""

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as float32, dequantised."""
        tensor = self._tensors[name]
        return self._library.dequantize(tensor.data, tensor.tensor_type)

    def __contains__(self, key: str) -> bool:
        """Whether the metadata has a key."""
        return key in self._reader.fields

    def value(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Returns a value of the metadata. Raises a UserError if it is missing, damaged or of another kind."""
        field = self._reader.fields.get(key)
        if field is None:
            if default is _REQUIRED:
                raise UserError(f"{self.path} lacks {key} in its metadata.")
            return default
        try:
            value = field.contents()
        except _DAMAGED as error:
            raise UserError(f"{key} in {self.path} is damaged ({error}); fetch the file again.") from error
        if kind is float and field.types[0] == self._library.GGUFValueType.FLOAT32:
            return float(str(np.float32(value)))  # 1e-5 instead of the nearest float32, 9.999999747e-06
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, int | float if kind is float else kind):
            shown = f"{len(value)} values" if isinstance(value, list) else repr(value)
            raise UserError(f"{self.path} has {key}={shown}, which is not {_KINDS[kind]}.")
        return value

    def _require_readable_types(self) -> None:
        """Raises a UserError that names a tensor type without a dequantisation in the library."""
        first = {tensor.tensor_type: tensor for tensor in reversed(self._reader.tensors)}
        for kind, tensor in first.items():
            _, block_bytes = self._library.GGML_QUANT_SIZES[kind]
            try:
                self._library.dequantize(np.zeros(block_bytes, np.uint8), kind)
            except NotImplementedError as error:
                raise UserError(
                    f"{tensor.name} in {self.path} is of type {kind.name}, which the gguf library does not dequantise; "
                    "use a file of another type, such as Q8_0, Q4_K_M or BF16."
                ) from error


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise UserError('GGUF files are read by the gguf library: pip install "composer_jax[gguf]".') from error
    return gguf


def _bounded_reader(library: Any) -> Any:
    """Returns the library's reader with a check that everything it reads is within the file.

    The library takes what is beyond the end for empty arrays, and would loop for ever over a damaged number of values.
    """

    class BoundedReader(library.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"it needs {end:,} bytes")
            return super()._get(offset, dtype, count, override_order)

    return BoundedReader


def _require_magic(path: str) -> None:
    """Raises a UserError if there is no such file, or it does not begin like a GGUF file."""
    try:
        with open(path, "rb") as opened:
            magic = opened.read(len(MAGIC))
    except OSError as error:
        way_out = "; a GGUF file has to be local: download it first" if "://" in path else ""
        raise UserError(f"cannot read {path}: {error.strerror}{way_out}.") from error
    if magic != MAGIC:
        raise UserError(f"{path} is not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}.")
