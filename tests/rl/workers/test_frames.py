"""Frames and messages arrive as they were sent; what is no frame is refused before it is read."""

import asyncio
import dataclasses
import json
import math
import struct

import numpy as np
import pytest

from composer_jax.agent.episode import EpisodeLimits
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.frames import FrameError, encode_frame, read_frame
from composer_jax.rl.workers.messages import (
    params_to_json,
    sample_from_frame,
    sample_to_frame,
    spec_from_json,
    spec_to_json,
)
from composer_jax.rl.workers.remote_policy import common_prefix
from composer_jax.rl.workers.worker_setup import WorkerSetup
from composer_jax.sampler.policy import PromptLogprobs, Sample
from composer_jax.sandbox import SandboxLimits
from tests.rl.workers.seeded_policy import CHAT, specs, worker_setup


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


SAMPLES = [
    Sample([1, 2], [-0.1, -1 / 3], [7, 8], "stop"),
    Sample([], [], [], "cancelled", cached=5, trained=False),
    Sample(
        [3],
        [-1e-9],
        [0],
        "length",
        raw_logprobs=[-0.7],
        cached=2,
        top_logprobs=[{3: -0.7, 9: -math.inf}],
        prompt=PromptLogprobs([None, -2.5], [{}, {4: -2.5}]),
        routing=np.arange(12, dtype=np.int16).reshape(2, 3, 2),
    ),
]


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_sample_arrives_exactly(sample):
    back = sample_from_frame(*read(encode_frame(*sample_to_frame(sample))))
    assert dataclasses.replace(back, routing=None) == dataclasses.replace(sample, routing=None)
    np.testing.assert_array_equal(back.routing, sample.routing)


def test_every_field_of_a_sample_travels():
    """A field that is added to Sample has to be added to its message."""
    header, arrays = sample_to_frame(SAMPLES[2])
    assert len(header) + len(arrays) - len(("has_raw", "has_routing")) == len(dataclasses.fields(Sample))


def test_specs_params_and_setup_arrive(tmp_path):
    for spec in specs(2):
        assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec
    params = SamplingParams(5, 0.5, 0.9, 10, 0.1, (3, 4), ("a",), 2, True, True)
    assert SamplingParams(**json.loads(json.dumps(params_to_json(params)))) == params
    setup = worker_setup(tmp_path, limits=EpisodeLimits(3, 4, 5), sandbox_limits=SandboxLimits(timeout_s=1.5))
    back = WorkerSetup.from_json(json.loads(json.dumps(setup.to_json())))
    assert back == setup
    prompt = CHAT.user(["a prompt", " of a user"])
    assert back.chat().user(["a prompt", " of a user"]) == prompt


@pytest.mark.parametrize(
    ("a", "b", "n"), [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 5, 3, 4], 1), ([1], [1, 2], 1)]
)
def test_common_prefix(a, b, n):
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == n
