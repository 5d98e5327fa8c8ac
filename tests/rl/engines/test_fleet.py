"""FleetPolicy and engine ports over TCP in one process: losses, stalls, late engines, answers that cannot be."""

import asyncio
import contextlib
import dataclasses
import time

import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import OtherProcessError, UserError
from composer_jax.rl.engines import connection, engine_port, router
from composer_jax.rl.engines.config import FleetConfig
from composer_jax.rl.workers.channel import RemoteError
from composer_jax.sampler.policy import PromptLogprobs
from tests.rl.engines.seeded_engine import REQUIRED, TOKEN, Engine, checksums_of, new_fleet
from tests.rl.workers.seeded_policy import until

PARAMS = SamplingParams(64)
MESSAGES = 4


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(connection, "RETRY_S", 0.05)
    monkeypatch.setattr(router, "LOOK_S", 0.05)


async def play(policy, seed, between=None):
    """An episode of some messages: its tokens."""
    session = await policy.open(seed)
    context = [7]
    try:
        for number in range(MESSAGES):
            if between is not None:
                await between(number)
            sample = await session.sample(context, PARAMS, branch=number // 2)
            context = [*context, *sample.tokens, 5]
    finally:
        session.close()
    return context


@contextlib.asynccontextmanager
async def engines(*members):
    """The engines, serving and listening."""
    async with contextlib.AsyncExitStack() as stack:
        for member in members:
            await stack.enter_async_context(member.serving())
            await stack.enter_async_context(member.listening())
        yield [member.port for member in members]


async def local(seeds):
    engine = Engine()
    async with engine.serving():
        return [await play(engine, seed) for seed in seeds]


async def test_sessions_go_to_the_least_loaded_engine_and_have_the_tokens_of_one_engine():
    expected = await local(range(12))
    both = Engine(slots=8), Engine(slots=4)
    async with engines(*both) as ports, (fleet := new_fleet(ports)).serving():
        await until(lambda: fleet.metrics()["engines_newest"] == 2)
        sessions = [await fleet.open(seed) for seed in range(12)]
        assert [engine.open_sessions for engine in both] == [8, 4]
        for session in sessions:
            session.close()
        await until(lambda: not sum(engine.open_sessions for engine in both))
        assert await asyncio.gather(*(play(fleet, seed) for seed in range(12))) == expected
        assert fleet.busy_seconds > 0 and fleet.resampled == 0
        fleet.reset_prefix_cache()
        await until(lambda: [engine.resets for engine in both] == [1, 1])


async def test_an_engine_that_dies_costs_each_episode_the_message_that_was_sampled():
    seeds, lost = range(8), Engine(pause_after=30)
    expected = await local(seeds)
    other = Engine()
    async with contextlib.AsyncExitStack() as stack, other.serving(), other.listening():
        await stack.enter_async_context(lost.serving())
        dying = contextlib.AsyncExitStack()
        await dying.enter_async_context(lost.listening())
        async with (fleet := new_fleet([lost.port, other.port])).serving():
            await until(lambda: fleet.metrics()["engines_newest"] == 2)
            playing = [asyncio.create_task(play(fleet, seed)) for seed in seeds]
            await until(lambda: lost.waiting == 4)
            before = len(other.samples) + len(lost.samples)
            await dying.aclose()
            assert await asyncio.gather(*playing) == expected
            assert fleet.resampled == 4 and lost.open_sessions == 0
            assert len(other.samples) + len(lost.samples) <= len(seeds) * MESSAGES + 4 and before
            assert fleet.metrics()["engines_lost"] == 1
            async with lost.listening(port=lost.port):  # it comes back, and is used again
                lost.gate.set()
                await until(lambda: fleet.metrics()["engines_newest"] == 2)
                assert [await play(fleet, seed) for seed in (0, 1)] == expected[:2]


async def test_an_engine_that_has_ended_leaves_its_learners_in_place_of_an_error(monkeypatch):
    """Its messages are sampled elsewhere, and none meets it again before it looks whether it has ended."""
    monkeypatch.setattr(engine_port, "STATUS_S", 1000.0)
    seeds, ending, other = range(8), Engine(slots=64, pause_after=30), Engine(slots=8)
    expected = await local(seeds)
    async with engines(ending, other) as ports, (fleet := new_fleet(ports)).serving():
        await until(lambda: fleet.metrics()["engines_newest"] == 2)
        playing = [asyncio.create_task(play(fleet, seed)) for seed in seeds]
        await until(lambda: ending.waiting == 7)
        ending.end(OtherProcessError("process 1 ended: it was killed, or its machine is gone"))
        assert await asyncio.gather(*playing) == expected
        assert fleet.resampled == 7 and fleet.metrics()["engines_lost"] == 1 and ending.open_sessions == 0


async def test_an_engine_that_stalls_in_a_message_is_lost_though_it_sends_heartbeats():
    expected = await local([3])
    stalled, other = Engine(slots=64, pause_after=0), Engine(slots=1)
    async with engines(stalled, other) as ports:
        async with (fleet := new_fleet(ports, FleetConfig(20, 30, 0.5))).serving():
            await until(lambda: fleet.metrics()["engines_newest"] == 2)
            playing = asyncio.create_task(play(fleet, 3))
            await until(lambda: stalled.waiting)
            stalled.progress += 1  # computes for another message
            assert await playing == expected[0]
            assert fleet.resampled >= 1 and stalled.open_sessions == 0
            stalled.gate.set()


async def test_a_late_engine_gets_sessions_when_it_has_the_weights():
    first, late = Engine(slots=2), Engine(slots=64)
    written = []
    async with engines(first, late) as ports:
        fleet = new_fleet(ports, begin=lambda *weights: written.append(weights))
        async with fleet.serving():
            await until(lambda: fleet.metrics()["engines_newest"] == 2)
            old = fleet.of_version(0)
            first.newest = 1
            await fleet.update_serving("params", "bias", 1, mode="keep", checksums=checksums_of(1))
            assert written == [("params", "bias", 1)]
            await until(lambda: first.version == 1)  # the fleet told it to look
            await until(lambda: fleet.metrics()["engines_late"] == 1)
            new = [await fleet.open(seed) for seed in range(2)]
            assert (first.open_sessions, late.open_sessions) == (2, 0)
            group_before = await old.open(9)  # a group that was admitted before may use it
            assert late.open_sessions == 1
            late.version = 1
            await until(lambda: fleet.metrics()["engines_late"] == 0)
            new += [await fleet.open(seed) for seed in range(3)]
            assert late.open_sessions == 4
            sample = await new[-1].sample([7], PARAMS)
            assert set(sample.versions) == {1}
            for session in (*new, group_before):
                session.close()


async def test_an_engine_of_a_run_that_was_killed_loads_the_weights_anew():
    """The learner went on from version 2, and the engine has version 5 of before; or version 2, with other weights."""
    for version in (5, 2):
        engine = Engine(version=version)
        engine.run, engine.newest = "killed", 2
        async with engines(engine) as ports, (fleet := new_fleet(ports, version=2)).serving():
            session = await fleet.open(1)
            assert engine.reloads == 1 and (engine.version, engine.run) == (2, "this run")
            session.close()


async def test_an_engine_of_another_chain_is_refused():
    engine = Engine(version=2)
    engine.run = engine.newest_run = "another run"
    async with engines(engine) as ports, (fleet := new_fleet(ports, version=2)).serving():
        with pytest.raises(
            UserError, match="weights of version 2 are not those that this run has published; .* folder"
        ):
            await fleet.open(1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"network": "other"}, "it serves another model .network other, not network"),
        ({"tokenizer": "other"}, "it has another tokenizer"),
        ({"end_tokens": (4,)}, r"end with the tokens \[4\], not with \[3\]"),
        ({"max_model_len": 100}, "--max_model_len=4096"),
        ({"follows": ""}, "it follows no folder"),
    ],
    ids=str,
)
async def test_an_engine_that_cannot_be_used_ends_the_run_with_a_sentence(changes, says):
    engine = Engine()
    engine.description = dataclasses.replace(engine.description, **changes)
    async with engines(engine) as ports, new_fleet(ports).serving() as fleet:
        with pytest.raises(UserError, match=says):
            await fleet.open(1)


async def test_an_engine_without_routes_is_refused_where_they_are_replayed():
    required = dataclasses.replace(REQUIRED, route_shape=(2, 2), n_experts=8)
    async with engines(Engine()) as ports, new_fleet(ports, required=required).serving() as fleet:
        with pytest.raises(UserError, match="start it with --return_routed_experts"):
            await fleet.open(1)


async def test_an_engine_with_another_token_is_refused():
    engine = Engine()
    async with engine.serving(), engine.listening(token=TOKEN + "!"), new_fleet([engine.port]).serving() as fleet:
        with pytest.raises(
            UserError, match="is no engine for this learner: it refuses this learner: the token is another"
        ):
            await fleet.open(1)


async def test_without_an_engine_the_run_waits_and_goes_on_or_ends_with_a_sentence(caplog, monkeypatch):
    monkeypatch.setattr(router, "SAY_S", 0.2)
    engine = Engine()
    async with engine.serving():
        async with engine.listening():
            pass
        async with (fleet := new_fleet([engine.port])).serving():
            playing = asyncio.create_task(play(fleet, 3))
            await until(lambda: "The run waits for an engine" in caplog.text)
            async with engine.listening(port=engine.port):
                assert [await playing] == await local([3])
                await until(lambda: "the run goes on" in caplog.text and "does not answer" in caplog.text)
        async with (fleet := new_fleet([engine.port], FleetConfig(patience_s=0.3))).serving():
            with pytest.raises(UserError, match=r"No engine could be used .* does not answer .*--engine_port"):
                await fleet.open(1)


def answers(**changes):
    return lambda sample: dataclasses.replace(sample, **changes)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (answers(versions=[7] * 64), "versions of"),
        (lambda s: dataclasses.replace(s, versions=[9] * len(s.tokens)), "the weight version 9"),
        (lambda s: dataclasses.replace(s, versions=[-1] * len(s.tokens)), "the weight version -1"),
        (lambda s: dataclasses.replace(s, logprobs=s.logprobs[1:]), "log-probabilities of"),
        (lambda s: dataclasses.replace(s, logprobs=[float("nan")] * len(s.tokens)), "the log-probability nan"),
        (lambda s: dataclasses.replace(s, logprobs=[0.5] * len(s.tokens)), "the log-probability 0.5"),
        (lambda s: dataclasses.replace(s, tokens=[900] * len(s.tokens)), "the token id 900"),
        (answers(tokens=[], logprobs=[], versions=[]), "0 tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_answer_that_cannot_be_is_refused_and_the_message_sampled_elsewhere(spoil, says, caplog):
    expected = await local([3])
    liar, honest = Engine(slots=64), Engine(slots=1)
    liar.spoil = spoil
    async with engines(liar, honest) as ports, (fleet := new_fleet(ports)).serving():
        await until(lambda: fleet.metrics()["engines_newest"] == 2)
        assert await play(fleet, 3) == expected[0]
        assert fleet.resampled == 1 and says in caplog.text
        assert fleet.metrics()["engines_newest"] == 1, "the engine is not used again"


@pytest.mark.parametrize(
    "routing",
    [None, np.zeros((3, 2, 2), np.int16), np.full((70, 2, 2), 8, np.int16)],
    ids=["none", "too short", "no expert"],
)
async def test_routes_of_another_shape_or_of_no_expert_are_refused(routing):
    required = dataclasses.replace(REQUIRED, route_shape=(2, 2), n_experts=8)
    engine = Engine()
    engine.description = dataclasses.replace(engine.description, returns_routing=True)
    engine.spoil = lambda s: dataclasses.replace(s, routing=None if routing is None else routing[: len(s.tokens)])
    async with engines(engine) as ports, new_fleet(ports, required=required).serving() as fleet:
        session = await fleet.open(1)
        with pytest.raises(UserError, match="it has answered with .*routed expert"):
            await session.sample([7], SamplingParams(64, return_routing=True))
        session.close()


async def test_an_engine_that_fails_at_a_message_again_and_again_ends_the_run():
    engine = Engine()
    async with engines(engine) as ports, new_fleet(ports).serving() as fleet:
        engine.error = ValueError("broken")
        with pytest.raises(RemoteError, match="ValueError: broken"):
            await play(fleet, 1)
        engine.error = UserError("no such thing.")
        with pytest.raises(UserError, match="engine .*: no such thing"):
            await play(fleet, 1)


async def test_a_version_that_cannot_be_written_ends_the_run():
    def fail():
        raise UserError("the folder is full.")

    def is_full():
        return pytest.raises(UserError, match="the folder is full")

    async with engines(Engine()) as ports:
        with is_full():
            async with new_fleet(ports, finish=fail).serving() as fleet:
                await fleet.update_serving(0, 0, 1, mode="keep", checksums=checksums_of(1))
                with is_full():
                    await fleet.open(1)
                with is_full():
                    await fleet.update_serving(0, 0, 2, mode="keep", checksums=checksums_of(2))


async def test_the_end_waits_until_the_last_version_is_written():
    fleet = new_fleet([], finish=lambda: time.sleep(0.2) or written.append(1))
    written = []
    async with fleet.serving():
        await fleet.update_serving(0, 0, 1, mode="keep", checksums=checksums_of(1))
    assert written
    fleet = new_fleet([], finish=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        async with fleet.serving():
            await fleet.update_serving(0, 0, 1, mode="keep", checksums=checksums_of(1))


async def test_a_row_is_scored_by_every_engine_with_the_newest_weights():
    both = Engine(), Engine()
    for number, engine in enumerate(both):
        prompt = PromptLogprobs([None, -1.0 - number, -2.0], [{}, {}, {}])
        engine.spoil = lambda sample, prompt=prompt: dataclasses.replace(
            sample, tokens=sample.tokens[:1], logprobs=[-1.0], versions=sample.versions[:1], prompt=prompt
        )
    async with engines(*both) as ports, (fleet := new_fleet(ports)).serving():
        await until(lambda: fleet.metrics()["engines_newest"] == 2)
        scores = await asyncio.to_thread(fleet.score, [4, 5, 6])
        assert sorted(scores.logprobs_BS.tolist()) == [[-2.0, -2.0], [-1.0, -2.0]]
        await until(lambda: not sum(engine.open_sessions for engine in both))


async def test_a_session_whose_opening_is_cancelled_is_closed_at_the_engine():
    engine = Engine(slots=1)
    engine.slots = 1
    async with engines(engine) as ports, (fleet := new_fleet(ports)).serving():
        first = await fleet.open(1)
        second = asyncio.create_task(fleet.open(2))
        await until(lambda: fleet.router.usable(0) and fleet.router.usable(0)[0].opening == 1)
        second.cancel()
        await asyncio.wait([second])
        first.close()
        third = await asyncio.wait_for(fleet.open(3), 10)
        third.close()
        await until(lambda: engine.open_sessions == 0)


async def test_no_more_sessions_are_open_than_the_run_has_sandboxes():
    engine = Engine(slots=8)
    async with engines(engine) as ports, (fleet := new_fleet(ports, most_sessions=2)).serving():
        sessions = [await fleet.open(seed) for seed in range(2)]
        third = asyncio.create_task(fleet.open(3))
        await asyncio.sleep(0.2)
        assert not third.done() and engine.open_sessions == 2
        sessions[0].close()
        for session in (sessions[1], await third):
            session.close()
