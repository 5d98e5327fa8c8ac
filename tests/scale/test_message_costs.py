"""The formulas of messages against the frames that cross a connection, at two sizes."""

import asyncio
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.frames import encode_frame
from composer_jax.models.presets import PRESETS
from composer_jax.rl.workers import channel
from composer_jax.sampler.policy import Sample
from composer_jax.scale.message_costs import (
    CALL_S,
    REPLY_HEADER_BYTES,
    REQUEST_HEADER_BYTES,
    STATUS_BYTES,
    message_route_bytes,
    message_seconds,
    reply_bytes,
    request_bytes,
)
from tests.rl.engines.seeded_engine import REQUIRED, Engine, new_fleet
from tests.rl.workers.seeded_policy import until

KIMI = PRESETS["kimi_k2_5"]


async def frames_of(monkeypatch, prompt: int, observed: int, sampled: int) -> dict[str, list[int]]:
    """Sizes of the frames of two messages of a session, and of statuses, by what they are; a fleet in this process."""
    sizes: dict[str, list[int]] = {"sample": [], "reply": [], "status": []}

    def counting(header, arrays=()):
        frame = encode_frame(header, arrays)
        kind = "reply" if arrays and "reply" in header else header.get("method")
        if kind in sizes:
            sizes[kind].append(len(frame))
        return frame

    def spoil(sample):
        routes = np.ones((lengths[0] - known[0], 60, 8), np.uint16)
        numbers = [float(np.float32(-0.123456789))] * sampled  # as our engines give them
        return Sample(
            [5] * sampled,
            numbers,
            [0] * sampled,
            "length",
            raw_logprobs=numbers,
            routing=routes,
            routing_start=known[0],
        )

    engine = Engine()
    engine.spoil, lengths, known = spoil, [0], [0]
    engine.description = dataclasses.replace(engine.description, returns_routing=True)
    required = dataclasses.replace(REQUIRED, route_shape=(60, 8), n_experts=384)
    async with engine.serving(), engine.listening():
        monkeypatch.setattr(channel, "encode_frame", counting)
        async with (fleet := new_fleet([engine.port], required=required)).serving():
            session = await fleet.open(0)
            context = [7] * prompt
            for _ in range(2):
                lengths[0] = len(context) + sampled - 1
                params = SamplingParams(sampled, return_routing=True, routing_start=known[0])
                sample = await session.sample(context, params)
                known[0] = lengths[0]
                context = [*context, *sample.tokens, *[9] * observed]
            await until(lambda: sizes["status"])
            session.close()
    return sizes


@pytest.mark.parametrize(("prompt", "observed", "sampled"), [(1000, 100, 50), (1000, 400, 200), (3000, 400, 200)])
def test_a_message_has_the_bytes_of_its_new_tokens(monkeypatch, prompt, observed, sampled):
    """The second message of a session: it does not contain the prompt."""
    sizes = asyncio.run(frames_of(monkeypatch, prompt, observed, sampled))
    for name, formula, header in (
        ("sample", request_bytes(observed), REQUEST_HEADER_BYTES),
        (
            "reply",
            reply_bytes(sampled, message_route_bytes(KIMI, observed + sampled).frame),
            REPLY_HEADER_BYTES,
        ),
    ):
        assert len(sizes[name]) == 2
        assert formula - header < sizes[name][1] <= formula, name
    assert sizes["sample"][0] - sizes["sample"][1] == pytest.approx(4 * (prompt - observed), abs=20)
    assert max(sizes["status"]) <= STATUS_BYTES


def test_the_seconds_of_messages_and_calls_are_those_of_the_rows_that_were_measured():
    """1,024 sessions without routes, and routes of K2.5's size: of 875 tokens in the mean, 60 layers, 8 experts."""
    rows = {row["part"]: row for row in json.loads(Path("docs/data/fleet.json").read_text())}
    assert pytest.approx(rows["scheduler"]["scheduler_ms"] / 1000, rel=0.05) == CALL_S
    row = rows["router"]
    assert message_seconds(0) == pytest.approx(row["router_ms"] / 1000, rel=0.05)
    assert message_seconds(875 * 60 * 8 * 2) == pytest.approx(row["with_routes_ms"] / 1000, rel=0.05)
