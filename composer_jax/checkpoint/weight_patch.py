"""The difference of two versions of one array of weights, in a few bytes per changed element.

Adam with a small learning rate changes about one bfloat16 weight in a hundred per step, so a patch is some hundred
times smaller than the weights (PULSE; docs/design.md, "Weights travel as patches"). Changes are found by the bits and
sent as values, not as differences, so that nothing drifts. Their places are gaps of 16 bits; longer gaps have an
escape. The bytes are sorted by significance, because the high bytes of gaps and of floating-point numbers compress
well, and then compressed (zstandard, level 1).
"""

import hashlib
import struct
from typing import NamedTuple

import numpy as np
import zstandard

LEVEL = 1
"""Of zstandard: higher ones are many times slower for a tenth less."""
BLOCK = 1 << 22
"""Elements that are compared at once."""
ESCAPE = 0xFFFF
"""A gap that is this long or longer; it stands in full after the short ones."""

_HEADER = struct.Struct("<QQ")  # changed elements and long gaps


class BadPatch(ValueError):
    """The bytes are not a patch of this array."""


class ElementChanges(NamedTuple):
    """Elements of a flat array."""

    places: np.ndarray
    """int64, ascending."""
    bits: np.ndarray
    """Unsigned integers of the array's width."""


def find_changes(before: np.ndarray, after: np.ndarray) -> ElementChanges:
    """Returns the elements of `after` whose bits differ from those of `before`; equal shapes and dtypes."""
    assert before.shape == after.shape and before.dtype == after.dtype, "two arrays of one shape and dtype"
    old, new = as_bits(before), as_bits(after)
    parts = [
        start + np.flatnonzero(old[start : start + BLOCK] != new[start : start + BLOCK])
        for start in range(0, len(new), BLOCK)
    ]
    places = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return ElementChanges(places, new[places])


def encode_changes(changes: ElementChanges) -> bytes:
    """Returns changes as bytes."""
    gaps = np.diff(changes.places, prepend=-1) - 1
    long_gaps = gaps[gaps >= ESCAPE].astype("<u8")
    short_gaps = np.minimum(gaps, ESCAPE).astype("<u2")
    header = _HEADER.pack(len(gaps), len(long_gaps))
    parts = [header, _by_significance(short_gaps), long_gaps.tobytes(), _by_significance(changes.bits)]
    return zstandard.ZstdCompressor(level=LEVEL).compress(b"".join(parts))


def decode_changes(data: bytes, dtype: np.dtype, size: int) -> ElementChanges:
    """Returns the changes that `encode_changes` wrote, for an array of `size` elements.

    Raises:
      BadPatch: the bytes are none, or those of another array.
    """
    bits = _bits_dtype(dtype)
    try:
        content = zstandard.ZstdDecompressor().decompress(
            data, max_output_size=_HEADER.size + size * (10 + bits.itemsize)
        )
        count, n_long = _HEADER.unpack_from(content)
    except (zstandard.ZstdError, struct.error) as error:
        raise BadPatch(f"the patch cannot be decompressed ({error})") from error
    if len(content) != _HEADER.size + count * (2 + bits.itemsize) + 8 * n_long:
        raise BadPatch("the patch has another length than its header says")
    at = _HEADER.size
    short_gaps = _from_significance(content[at : (at := at + 2 * count)], np.dtype("<u2"))
    long_gaps = np.frombuffer(content, "<u8", n_long, at)
    gaps = short_gaps.astype(np.int64)
    escaped = short_gaps == ESCAPE
    if escaped.sum() != n_long:
        raise BadPatch("the patch has another number of long gaps than its header says")
    gaps[escaped] = long_gaps
    places = np.cumsum(gaps + 1) - 1
    if ((places < 0) | (places >= size)).any():
        raise BadPatch(f"the patch changes elements beyond the {size} of the array")
    return ElementChanges(places, _from_significance(content[at + 8 * n_long :], bits))


def apply_changes(array: np.ndarray, changes: ElementChanges) -> ElementChanges:
    """Changes an array in place; returns the changes that undo it."""
    bits = as_bits(array)
    undo = ElementChanges(changes.places, bits[changes.places])
    bits[changes.places] = changes.bits
    return undo


def digest(array: np.ndarray) -> str:
    """Returns the SHA-256 of an array's bytes, in hexadecimal."""
    return hashlib.sha256(as_bits(array).data).hexdigest()


def as_bits(array: np.ndarray) -> np.ndarray:
    """Returns the elements as flat unsigned integers that share the memory of a contiguous array."""
    assert array.flags.c_contiguous, "patches change contiguous arrays in place"
    return array.reshape(-1).view(_bits_dtype(array.dtype))


def _bits_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"<u{dtype.itemsize}")


def _by_significance(numbers: np.ndarray) -> bytes:
    """All lowest bytes, then all next ones, ..."""
    width = numbers.dtype.itemsize
    return np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, width).T).tobytes()


def _from_significance(data: bytes, dtype: np.dtype) -> np.ndarray:
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
