"""What travels between a trainer and its workers: every field, also those that are added later."""

import asyncio
import dataclasses
import json
import math

import numpy as np
import pytest

from composer_jax.agent.effort import EffortConfig, EffortLevel
from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.demo.bugfix import generate
from composer_jax.frames import encode_frame
from composer_jax.rl.workers.messages import (
    sample_from_frame,
    sample_to_frame,
    spec_from_json,
    spec_to_json,
)
from composer_jax.rl.workers.remote_policy import common_prefix
from composer_jax.rl.workers.worker_setup import WorkerSetup
from composer_jax.sampler.policy import PromptLogprobs, Sample
from composer_jax.sandbox import SandboxLimits
from tests.rl.workers.seeded_policy import CHAT, worker_setup
from tests.test_frames import read


def differing_fields(a, b) -> set[str]:
    return {field.name for field in dataclasses.fields(a) if getattr(a, field.name) != getattr(b, field.name)}


def test_a_spec_arrives_with_every_field():
    task = generate("train", 0, 0)
    plain = EpisodeSpec(generate("train", 0, 1), 0, Compaction())
    spec = EpisodeSpec(task, 7, Compaction(trigger=300), group=3, effort="low")
    assert differing_fields(spec, plain) == {field.name for field in dataclasses.fields(EpisodeSpec)}
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_a_setup_arrives_with_every_field_and_fills_every_field_of_the_context(tmp_path):
    """A setting that the setup loses has its default in the context of the worker, which differs from this one."""
    settings = EpisodeSettings(
        EpisodeLimits(max_turns=3),
        system_prompt="Be brief.",
        effort=EffortConfig({"low": EffortLevel(10, 2.0)}, "{level}!"),
        temperature=0.5,
        episode_seconds=9.0,
        return_routing=True,
        infrastructure_retries=5,
    )
    assert differing_fields(settings, EpisodeSettings()) == {field.name for field in dataclasses.fields(settings)}
    setup = worker_setup(tmp_path, settings=settings, sandbox_limits=SandboxLimits(timeout_s=1.5))
    received = WorkerSetup.from_json(json.loads(json.dumps(dataclasses.asdict(setup))))
    assert received == setup
    assert received.chat().user(["a prompt", " of a user"]) == CHAT.user(["a prompt", " of a user"])

    async def context_of_worker() -> EpisodeContext:
        async with received.episode_context(1) as context:
            return context

    assert asyncio.run(context_of_worker()).settings == settings


SAMPLES = [
    Sample([1, 2], [-0.1, -1 / 3], [7, 8], "stop"),
    Sample([], [], [], "cancelled", cached=5, trained=False),
    Sample([4, 5, 6], [-0.5, -1e300, -math.inf], [1, 2, 1], "stop", raw_logprobs=[-0.5, -0.25, -math.inf]),
    Sample(
        [3],
        [-1e-9],
        [0],
        "length",
        raw_logprobs=[-0.7],
        cached=2,
        top_logprobs=[{3: -0.7, 9: -math.inf}],
        prompt=PromptLogprobs([None, -2.5], [{}, {4: -2.5}]),
        routing=np.arange(12, dtype=np.uint16).reshape(2, 3, 2),
        routing_start=4,
    ),
]


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_sample_arrives_exactly(sample):
    back = sample_from_frame(*read(encode_frame(*sample_to_frame(sample))))
    assert dataclasses.replace(back, routing=None) == dataclasses.replace(sample, routing=None)
    np.testing.assert_array_equal(back.routing, sample.routing)


def test_every_field_of_a_sample_travels():
    """A field that is added to Sample has to be added to its message."""
    header, arrays = sample_to_frame(SAMPLES[-1])
    assert len(header) + len(arrays) - len(("raw", "has_routing")) == len(dataclasses.fields(Sample))


def test_a_token_takes_eight_bytes_where_nothing_is_lost():
    """float32 log-probabilities that were drawn at temperature 1; others, and others at temperature 1, take more."""
    logprobs = np.linspace(-3, 0, 1000, dtype=np.float32).tolist()
    narrow = Sample([5] * 1000, logprobs, [3] * 600 + [4] * 400, "stop", raw_logprobs=logprobs)
    for sample, width in (
        (narrow, 8),
        (dataclasses.replace(narrow, raw_logprobs=[-0.5] * 1000), 12),
        (dataclasses.replace(narrow, logprobs=[-0.1] * 1000, raw_logprobs=None), 12),
    ):
        frame = encode_frame(*sample_to_frame(sample))
        assert sample_from_frame(*read(frame)) == sample
        assert 0 < len(frame) - 1000 * width < 400


def test_sampling_params_arrive():
    params = SamplingParams(5, 0.5, 0.9, 10, 0.1, (3, 4), ("a",), 2, True, True, 7)
    assert SamplingParams(**json.loads(json.dumps(dataclasses.asdict(params)))) == params


@pytest.mark.parametrize(
    ("a", "b", "n"), [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 5, 3, 4], 1), ([1], [1, 2], 1)]
)
def test_common_prefix(a, b, n):
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == n
