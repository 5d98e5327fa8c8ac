"""Frames between processes: a JSON header and NumPy arrays. Nothing is unpickled, so a frame cannot run code."""

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
PREFIX = struct.Struct("!QQ")
"""How a frame begins: bytes of its header and of all arrays, which follow in this order."""

_CHUNK = 1 << 20


class FrameError(Exception):
    """The other end sent bytes that are not a frame, or a frame that is too large."""


def encode_frame(header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> bytes:
    """Returns the bytes of a frame. The arrays have any layout, and numbers or booleans of NumPy's own dtypes."""
    little = [array.astype(array.dtype.newbyteorder("<"), copy=False) for array in arrays]
    text = json.dumps(header | {"arrays": [(array.dtype.str, array.shape) for array in little]}).encode()
    prefix = PREFIX.pack(len(text), sum(array.nbytes for array in little))
    buffers = [np.ascontiguousarray(array).data for array in little]
    return b"".join([prefix, text, *buffers])  # the only copy of contiguous arrays


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
      FrameError: the bytes are not a frame, or the frame is larger.
      asyncio.IncompleteReadError, OSError: the connection is closed or broken.
    """
    n_text, n_content = PREFIX.unpack(await _read(reader, PREFIX.size, on_bytes))
    if n_text + n_content > max_bytes:
        raise FrameError(f"a frame of {n_text + n_content} bytes, over {max_bytes}")
    return decode_frame(await _read(reader, n_text, on_bytes), await _read(reader, n_content, on_bytes))


def decode_frame(text: bytes, content: bytes) -> Frame:
    """Returns what the bytes of a header and of arrays hold; the arrays are views of `content`. Raises FrameError."""
    try:
        header = json.loads(text)
        arrays, start = [], 0
        for dtype, shape in header.pop("arrays"):
            if np.dtype(dtype).kind not in "biuf":
                raise FrameError(f"an array of dtype {dtype!r}")
            arrays.append(np.frombuffer(content, dtype, math.prod(shape), start).reshape(shape))
            start += arrays[-1].nbytes
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FrameError(f"a frame that cannot be read ({error})") from error
    if start != len(content):
        raise FrameError(f"{len(content) - start} bytes after its arrays")
    return header, arrays


async def _read(reader: asyncio.StreamReader, n: int, on_bytes: Callable[[], object]) -> bytes:
    parts = []
    while n:
        parts.append(await reader.readexactly(min(n, _CHUNK)))
        n -= len(parts[-1])
        on_bytes()
    return b"".join(parts)
