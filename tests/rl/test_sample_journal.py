"""SampleJournal: recorded samples come back exactly, as long as the contexts are the same and the file is whole."""

import asyncio
import dataclasses
import functools
import threading

import numpy as np
import pytest

from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.rl.rollout import play_episode
from composer_jax.rl.sample_journal import GatheredWrites, SampleJournal
from composer_jax.sampler.policy import Sample
from composer_jax.sandbox import LocalSandboxPool, SandboxLimits
from composer_jax.tasks.result_cache import ResultCache
from tests.rl.workers.seeded_policy import CHAT, SeededPolicy, specs, until

PARAMS = SamplingParams(64)
CONTEXTS = [[7, 8, 9], [7, 8, 9, 1, 1, 5], [7, 8, 4], [7, 8, 4, 1, 1, 6, 6]]
"""Two turns, and two turns of another branch. Every sample is [1, 1]."""


class RoutingPolicy:
    """A Policy that counts its calls. A token's route depends on the call that computed it, as in a real engine."""

    busy_seconds, decoded_tokens = 0.0, 0

    def __init__(self, finish_reason="stop"):
        self.calls, self.finish_reason, self.max_model_len, self.is_open = 0, finish_reason, 512, False

    async def open(self, seed):
        self.is_open = True
        return self

    async def sample(self, context, params, branch=0):
        self.calls += 1
        start = params.routing_start
        routing = np.full((len(context) + 1 - start, 2, 3), self.calls, np.uint16)
        versions = [self.calls] * 2
        return Sample([1, 1], [-0.1, -1 / 3], versions, self.finish_reason, routing=routing, routing_start=start)

    def close(self):
        self.is_open = False


def ask(folder, policy, contexts, group=4, seed=9, params=PARAMS):
    """Opens one session in a new process, as it were, and samples after each context.

    Every second context continues the one before it, whose routes are known.
    """

    async def main():
        session = await SampleJournal(folder).recorded(policy, group).open(seed)
        samples = []
        for i, context in enumerate(contexts):
            asked = dataclasses.replace(params, routing_start=len(contexts[i - 1]) + 1 if i % 2 else 0)
            samples.append(await session.sample(context, asked, branch=i // 2))
        session.close()
        return samples

    return asyncio.run(main())


def first_routes(contexts, samples):
    """The first routes of each token of each context, which are what a transcript keeps."""
    known = {}
    for context, sample in zip(contexts, samples, strict=True):
        tokens = [*context, *sample.tokens]
        for i, route in enumerate(sample.routing, sample.routing_start):
            known.setdefault(tuple(tokens[: i + 1]), route.tolist())
    return known


@pytest.mark.parametrize("recorded", range(5))
def test_a_session_returns_what_was_recorded_and_then_samples(tmp_path, recorded):
    whole = ask(tmp_path / "whole", RoutingPolicy(), CONTEXTS)
    ask(tmp_path / "cut", RoutingPolicy(), CONTEXTS[:recorded])
    policy = RoutingPolicy()
    policy.calls = recorded
    again = ask(tmp_path / "cut", policy, CONTEXTS)
    assert policy.calls == 4 and not policy.is_open
    fields = [[dataclasses.asdict(dataclasses.replace(s, routing=None)) for s in side] for side in (again, whole)]
    assert fields[0] == fields[1]
    assert [s.routing.shape for s in again] == [s.routing.shape for s in whole]
    assert first_routes(CONTEXTS, again) == first_routes(CONTEXTS, whole)


def test_routes_of_a_token_are_recorded_once(tmp_path):
    long = [[7] * 1000, [*[7] * 1000, 1, 1, 5]]
    ask(tmp_path, RoutingPolicy(), long)
    [file] = tmp_path.rglob("00000009")
    assert 1000 * 12 < file.stat().st_size < 1.2 * 1000 * 12


def test_another_context_makes_the_session_sample_from_there_on(tmp_path):
    ask(tmp_path, RoutingPolicy(), CONTEXTS)
    other = [CONTEXTS[0], [7, 8, 9, 1, 1, 6], *CONTEXTS[2:]]
    policy = RoutingPolicy()
    ask(tmp_path, policy, other)
    assert policy.calls == 3
    policy = RoutingPolicy()
    ask(tmp_path, policy, other)
    assert policy.calls == 0, "the new samples are recorded in the place of the old ones"


def test_other_parameters_seeds_and_groups_share_nothing(tmp_path):
    ask(tmp_path, RoutingPolicy(), CONTEXTS)
    for changes in ({"params": SamplingParams(63)}, {"seed": 10}, {"group": 5}):
        policy = RoutingPolicy()
        ask(tmp_path, policy, CONTEXTS[:1], **changes)
        assert policy.calls == 1, changes


def test_a_message_that_was_not_finished_is_not_recorded(tmp_path):
    ask(tmp_path, RoutingPolicy(finish_reason="cancelled"), CONTEXTS[:1])
    assert not list(tmp_path.rglob("00000009"))


@pytest.mark.parametrize("damage", ["cut", "flipped", "no header", "appended"])
def test_a_damaged_file_costs_the_samples_from_the_damage_on(tmp_path, damage):
    ask(tmp_path, RoutingPolicy(), CONTEXTS[:3])
    [file] = tmp_path.rglob("00000009")
    content = file.read_bytes()
    last = content.rfind(b"{") - 16
    damaged = {
        "cut": content[:-1],
        "flipped": content[:-1] + bytes([content[-1] ^ 1]),
        "no header": content[:last] + bytes(len(content) - last),
        "appended": content[:last] + b"\xff" * 64,
    }[damage]
    file.write_bytes(damaged)
    policy = RoutingPolicy()
    ask(tmp_path, policy, CONTEXTS[:3])
    assert policy.calls == 1
    policy = RoutingPolicy()
    ask(tmp_path, policy, CONTEXTS[:3])
    assert policy.calls == 0


def test_groups_are_forgotten_and_kept(tmp_path):
    journal = SampleJournal(tmp_path)
    for group in range(4):
        ask(tmp_path, RoutingPolicy(), CONTEXTS[:1], group=group)
    journal.forget(0)
    journal.forget(17)
    assert [folder.name for folder in sorted(tmp_path.iterdir())] == ["00000001", "00000002", "00000003"]
    journal.keep({2, 99})
    assert [folder.name for folder in tmp_path.iterdir()] == ["00000002"]


def test_an_episode_with_tools_and_summaries_goes_on_where_it_was_cut(tmp_path):
    """In real sandboxes; the policy stops for good in the middle of each episode, as if its process were killed."""

    async def play(policy, folder, cut=False):
        async with LocalSandboxPool(SandboxLimits(), size=4) as pool, policy.serving():
            context = EpisodeContext(CHAT, pool, EpisodeSettings(EpisodeLimits(max_turns=6)), ResultCache())
            journal = SampleJournal(folder)
            tasks = [
                asyncio.create_task(play_episode(spec, journal.recorded(policy, spec.group), context))
                for spec in specs(4)
            ]
            if cut:
                await until(lambda: policy.waiting + sum(task.done() for task in tasks) == len(tasks))
                waiting = policy.waiting
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                return waiting
            return await asyncio.gather(*tasks)

    whole, first, second = SeededPolicy(), SeededPolicy(pause_after=150), SeededPolicy()
    expected = asyncio.run(play(whole, tmp_path / "whole"))
    waiting = asyncio.run(play(first, tmp_path / "cut", cut=True))
    answered = len(first.samples) - waiting
    assert waiting > 1 and answered > 4
    assert asyncio.run(play(second, tmp_path / "cut")) == expected
    assert len(second.samples) == len(whole.samples) - answered


async def test_writes_that_wait_go_together_and_fail_apart():
    threads, writes, began, go = [], GatheredWrites(), threading.Event(), threading.Event()

    def write(number):
        threads.append(number)
        if number == 0:
            began.set()
            assert go.wait(10)
        if number == 2:
            raise OSError("the disk is full")

    running = [asyncio.create_task(writes.run(functools.partial(write, 0)))]
    await asyncio.to_thread(began.wait)
    running += [asyncio.create_task(writes.run(functools.partial(write, number))) for number in range(1, 5)]
    await asyncio.sleep(0)
    running[3].cancel()
    go.set()
    done = await asyncio.gather(*running, return_exceptions=True)
    assert threads == [0, 1, 2, 3, 4], "in their order, also the one whose caller has gone"
    assert [type(one) for one in done] == [type(None), type(None), OSError, asyncio.CancelledError, type(None)]
    await writes.run(functools.partial(write, 5))
    assert threads[-1] == 5
