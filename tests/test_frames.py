"""Frames arrive as they were sent; bytes that are not a frame are refused before they are read."""

import asyncio
import json
import math
import struct

import numpy as np
import pytest

from composer_jax.frames import FrameError, encode_frame, read_frame


def read(content: bytes, **options):
    async def main():
        reader = asyncio.StreamReader()
        reader.feed_data(content)
        reader.feed_eof()
        return await read_frame(reader, **options)

    return asyncio.run(main())


def packed(text: bytes, content: bytes = b"") -> bytes:
    return struct.pack("!QQ", len(text), len(content)) + text + content


def test_arrays_of_all_dtypes_and_shapes_arrive():
    arrays = [
        np.arange(6, dtype=np.int16).reshape(3, 2, 1)[:, ::-1],
        np.arange(6, dtype=">i4").reshape(2, 3).T,
        np.empty((0, 4), np.int64),
        np.array([0.1, -math.inf, math.nan], np.float32),
        np.array(1e-300),
        np.array([True, False]),
        np.arange(3, dtype=np.uint8),
    ]
    header, back = read(encode_frame({"a": ["b", None, 0.1]}, arrays))
    assert header == {"a": ["b", None, 0.1]}
    for ours, theirs in zip(arrays, back, strict=True):
        assert ours.dtype == theirs.dtype.newbyteorder(ours.dtype.byteorder) and ours.shape == theirs.shape
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("!QQ", 1 << 62, 0), "a frame of 4611686018427387904 bytes, over 1073741824"),
        (packed(b"nonsense"), "cannot be read"),
        (packed(b"[]"), "cannot be read"),
        (packed(b'{"a": 1}'), "cannot be read"),
        (packed(json.dumps({"arrays": [["|O", [1]]]}).encode(), b"12345678"), r"dtype '\|O'"),
        (packed(json.dumps({"arrays": [["<i4", [3]]]}).encode(), b"1234"), "cannot be read"),
        (packed(json.dumps({"arrays": []}).encode(), b"1234"), "4 bytes after its arrays"),
    ],
)
def test_what_is_no_frame_is_refused(content, message):
    with pytest.raises(FrameError, match=message):
        read(content)


def test_a_frame_that_ends_early():
    with pytest.raises(asyncio.IncompleteReadError):
        read(encode_frame({"a": 1}, [np.arange(9)])[:-1])
