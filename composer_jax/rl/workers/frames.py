"""Frames of the worker protocol: a JSON header and NumPy arrays. Nothing is unpickled, so a frame cannot run code."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Frame = tuple[dict[str, Any], list[np.ndarray]]
"""A header of plain JSON, and arrays."""

MAX_FRAME_BYTES = 1 << 30
"""Largest frame. The routing of a context of a million tokens through 60 layers of 8 experts is just below it."""
MAX_HANDSHAKE_BYTES = 4096
"""Largest frame before the other end has proved that it knows the token."""
DTYPES = ("<i2", "<i4", "<i8", "<f4", "<f8")
"""dtypes that a frame may hold: those of tokens, versions, routing and log-probabilities."""

_SIZES = struct.Struct("!QQ")  # bytes of the header and of all arrays
_CHUNK = 1 << 20


class FrameError(Exception):
    """The other end sent what is no frame, or a frame that is too large."""


def encode_frame(header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> bytes:
    """Returns the bytes of a frame."""
    little = [array.astype(array.dtype.newbyteorder("<"), copy=False) for array in arrays]
    text = json.dumps(header | {"arrays": [(array.dtype.str, array.shape) for array in little]}).encode()
    content = b"".join(array.tobytes() for array in little)
    return _SIZES.pack(len(text), len(content)) + text + content


async def read_frame(
    reader: asyncio.StreamReader,
    max_bytes: int = MAX_FRAME_BYTES,
    on_bytes: Callable[[], object] = lambda: None,
) -> Frame:
    """Reads the next frame.

    Args:
      max_bytes: largest frame to accept.
      on_bytes: called as parts of the frame arrive.

    Raises:
      FrameError: what arrives is no frame, or a larger one.
      asyncio.IncompleteReadError, OSError: the connection is closed or broken.
    """
    n_text, n_content = _SIZES.unpack(await _read(reader, _SIZES.size, on_bytes))
    if n_text + n_content > max_bytes:
        raise FrameError(f"a frame of {n_text + n_content} bytes, over {max_bytes}")
    text, content = await _read(reader, n_text, on_bytes), await _read(reader, n_content, on_bytes)
    try:
        header = json.loads(text)
        return header, _decode_arrays(header.pop("arrays"), content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FrameError(f"a frame that cannot be read ({error})") from error


def _decode_arrays(shapes: Sequence[tuple[str, Sequence[int]]], content: bytes) -> list[np.ndarray]:
    arrays, start = [], 0
    for dtype, shape in shapes:
        if dtype not in DTYPES:
            raise FrameError(f"an array of dtype {dtype!r}")
        array = np.frombuffer(content, dtype, math.prod(shape), start).reshape(shape)
        arrays.append(array)
        start += array.nbytes
    if start != len(content):
        raise FrameError(f"{len(content) - start} bytes after its arrays")
    return arrays


async def _read(reader: asyncio.StreamReader, n: int, on_bytes: Callable[[], object]) -> bytes:
    parts = []
    while n:
        parts.append(await reader.readexactly(min(n, _CHUNK)))
        n -= len(parts[-1])
        on_bytes()
    return b"".join(parts)
