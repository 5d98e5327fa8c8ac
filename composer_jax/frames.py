"""Frames between processes: a JSON header and NumPy arrays. Nothing is unpickled, so a frame cannot run code."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Frame = tuple[dict[str, Any], list[np.ndarray]]
"""A header of plain JSON, and arrays."""

Buffer = bytes | memoryview

MAX_FRAME_BYTES = 1 << 30
"""Largest frame of a connection. The routing of a context of a million tokens through 60 layers of 8 experts is just
below it."""
PREFIX = struct.Struct("!QQ")
"""How a frame begins: bytes of its header and of all arrays, which follow in this order."""

_CHUNK = 1 << 20


class FrameError(Exception):
    """The other end sent bytes that are not a frame, or a frame that is too large."""


def frame_buffers(header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> list[Buffer]:
    """Returns buffers whose bytes, one after another, are a frame; those of contiguous arrays are not copied.

    Frames are not compressed. zstd at level 1 shrinks the routes of 384 experts to two thirds at 0.6 GB/s, and token
    ids to one third at 0.2 GB/s (level 3 saves no more; python -m benchmarks.step_batches), which takes longer than a
    disk or a network of 1 GB/s needs for what it saves.

    arrays: of any layout, with numbers or booleans of NumPy's own dtypes.
    """
    little = [array.astype(array.dtype.newbyteorder("<"), copy=False) for array in arrays]
    text = json.dumps(header | {"arrays": [(array.dtype.str, array.shape) for array in little]}).encode()
    prefix = PREFIX.pack(len(text), sum(array.nbytes for array in little))
    contents = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in little if array.size]
    return [prefix, text, *contents]


def encode_frame(header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> bytes:
    """Returns the bytes of a frame for a connection (`frame_buffers`). Raises FrameError if it is too large for one."""
    buffers = frame_buffers(header, arrays)
    if (n := sum(map(len, buffers)) - PREFIX.size) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {n} bytes, over {MAX_FRAME_BYTES}")
    return b"".join(buffers)


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
    text = bytes(await _read(reader, n_text, on_bytes))
    return decode_frame(text, await _read(reader, n_content, on_bytes))


def read_frames(data: Buffer) -> Iterator[Frame]:
    """Yields frames that follow each other in memory, such as those of a file; their arrays are views of `data`.

    Raises FrameError for what is not a frame, and for one that is cut.
    """
    rest = memoryview(data)
    while rest:
        if len(rest) < PREFIX.size:
            raise FrameError(f"{len(rest)} bytes in place of a frame")
        n_text, n_content = PREFIX.unpack(rest[: PREFIX.size])
        end = PREFIX.size + n_text + n_content
        if end > len(rest):
            raise FrameError(f"a frame of {end} bytes that ends after {len(rest)}")
        yield decode_frame(bytes(rest[PREFIX.size : end - n_content]), rest[end - n_content : end])
        rest = rest[end:]


def decode_frame(text: bytes, content: Buffer | bytearray) -> Frame:
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


async def _read(reader: asyncio.StreamReader, n: int, on_bytes: Callable[[], object]) -> memoryview:
    """Returns the next n bytes; a frame that is announced and does not come takes no memory."""
    if n <= _CHUNK:
        part = await reader.readexactly(n)
        on_bytes()
        return memoryview(bytearray(part))
    content, start = np.empty(n, np.uint8), 0
    while start < n:
        part = await reader.readexactly(min(n - start, _CHUNK))
        content[start : start + len(part)] = np.frombuffer(part, np.uint8)
        start += len(part)
        on_bytes()
    return content.data
