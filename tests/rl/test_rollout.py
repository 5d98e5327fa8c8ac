"""Rollouts: every EpisodeSpec yields one episode, in order; a dead sandbox is retried with a fresh session."""

import asyncio
import contextlib
import dataclasses
import hashlib
import random

import pytest

from composer_jax.agent.episode_context import EpisodeContext, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.errors import UserError
from composer_jax.rl import rollout
from composer_jax.rl.rollout import roll_out
from composer_jax.sandbox import SandboxDied
from composer_jax.seeds import hash_seed
from tests.demo.generate import generate
from tests.rl.made_up import episode
from tests.rl.workers.seeded_policy import SeededPolicy


class FakeSampler(SeededPolicy):
    """Also counts how many sessions were open at once."""

    most = 0

    def __init__(self, slots=3):
        super().__init__(slots=slots)

    async def open(self, seed):
        session = await super().open(seed)
        self.most = max(self.most, self.open_sessions)
        return session


SPECS = [EpisodeSpec(generate("bugfix", "train", 0, i), 100 + i, Compaction(None)) for i in range(8)]
CONTEXT = EpisodeContext(None, None, EpisodeSettings(infrastructure_retries=2))


@pytest.fixture
def run_episode(monkeypatch):
    """Replaces the harness by function(task, attempt number) -> reward, None for a dead sandbox."""

    def install(reward_of):
        attempts = {}

        async def fake(spec, session, context):
            task = spec.task
            attempt = attempts[task.id] = attempts.get(task.id, 0) + 1
            await asyncio.sleep(random.random() / 200)
            reward = reward_of(task, attempt)
            if isinstance(reward, Exception):
                raise reward
            return episode(reward, task_id=task.id, seed=spec.seed)

        monkeypatch.setattr(rollout, "run_episode", fake)
        return attempts

    return install


def test_episodes_come_in_the_order_of_the_specs_and_never_more_at_once_than_slots(run_episode):
    run_episode(lambda task, attempt: 1.0)
    sampler, done = FakeSampler(), []
    rollout_result = asyncio.run(roll_out(SPECS, sampler, CONTEXT, done.append))
    assert [(e.task_id, e.seed) for e in rollout_result] == [(spec.task.id, spec.seed) for spec in SPECS]
    assert sampler.most == 3 and sampler.open_sessions == 0
    assert sorted(e.task_id for e in done) == sorted(spec.task.id for spec in SPECS)


def test_a_dead_sandbox_is_tried_again_with_new_random_numbers(run_episode):
    attempts = run_episode(lambda task, attempt: 1.0 if attempt == 3 or task is not SPECS[2].task else None)
    sampler = FakeSampler()
    rollout_result = asyncio.run(roll_out(SPECS, sampler, CONTEXT))
    assert attempts[SPECS[2].task.id] == 3
    assert rollout_result[2].reward == 1.0
    again = [hash_seed("retry", SPECS[2].seed, attempt) for attempt in (1, 2)]
    assert [sampler.seeds.count(seed) for seed in (SPECS[2].seed, *again)] == [1, 1, 1]
    assert rollout_result[2].seed == again[-1]
    assert sampler.open_sessions == 0


def test_an_episode_that_stays_dead_is_returned_once_without_a_reward(run_episode):
    attempts = run_episode(lambda task, attempt: None if task is SPECS[2].task else 0.0)
    done = []
    rollout_result = asyncio.run(roll_out(SPECS, FakeSampler(), CONTEXT, done.append))
    assert attempts[SPECS[2].task.id] == 3 and len(done) == len(SPECS)
    assert [e.reward for e in rollout_result] == [0.0, 0.0, None, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert rollout_result[2].outcome == "infrastructure"


def test_a_bug_of_the_harness_costs_one_episode_and_leaves_no_session_open(run_episode, caplog):
    run_episode(lambda task, attempt: ZeroDivisionError("oh") if task is SPECS[4].task else 1.0)
    sampler = FakeSampler()
    episodes = asyncio.run(roll_out(SPECS, sampler, CONTEXT))
    assert [e.reward for e in episodes] == [1.0, 1.0, 1.0, 1.0, None, 1.0, 1.0, 1.0]
    assert (episodes[4].outcome, episodes[4].detail) == ("infrastructure", "ZeroDivisionError: oh")
    assert sampler.open_sessions == 0
    assert "is lost: ZeroDivisionError: oh" in caplog.text and "Traceback" in caplog.text


def test_no_session_waits_while_a_container_starts(monkeypatch):
    """Two sessions, and an image whose container starts only when an episode of another task has ended."""
    ended = asyncio.Event()

    class Images:
        @contextlib.asynccontextmanager
        async def workspace(self, task):
            await ended.wait()
            yield

    async def fake(spec, session, context):
        async with context.images.workspace(spec.task) if spec.task.image else contextlib.nullcontext():
            return episode(1.0, task_id=spec.task.id, seed=spec.seed)

    monkeypatch.setattr(rollout, "run_episode", fake)
    specs = [dataclasses.replace(spec, task=dataclasses.replace(spec.task, image="an image")) for spec in SPECS[:2]]
    context = dataclasses.replace(CONTEXT, images=Images())
    rolled = roll_out([*specs, *SPECS[2:]], FakeSampler(slots=2), context, lambda episode: ended.set())
    assert [e.reward for e in asyncio.run(asyncio.wait_for(rolled, 10))] == [1.0] * 8


def test_an_image_in_which_nothing_starts_loses_its_episodes_only(run_episode):
    class Images:
        def workspace(self, task):
            raise SandboxDied("the container does not start")

    specs = [dataclasses.replace(SPECS[0], task=dataclasses.replace(SPECS[0].task, image="an image")), SPECS[1]]
    run_episode(lambda task, attempt: 1.0)
    sampler = FakeSampler()
    lost, other = asyncio.run(roll_out(specs, sampler, dataclasses.replace(CONTEXT, images=Images())))
    assert (lost.reward, lost.outcome, lost.detail) == (None, "infrastructure", "the container does not start")
    assert other.reward == 1.0 and sampler.seeds == [101]


def test_what_a_user_must_mend_ends_the_rollout(run_episode):
    run_episode(lambda task, attempt: UserError("no image") if task is SPECS[4].task else 1.0)
    with pytest.raises(UserError, match="no image"):
        asyncio.run(roll_out(SPECS, FakeSampler(), CONTEXT))


def test_a_policy_that_fails_ends_the_rollout(monkeypatch):
    async def fake(spec, session, context):
        await session.sample([1], None)

    monkeypatch.setattr(rollout, "run_episode", fake)
    sampler = FakeSampler()
    sampler.error = ZeroDivisionError("the engine died")
    with pytest.raises(ZeroDivisionError):
        asyncio.run(roll_out(SPECS, sampler, CONTEXT))


def test_seeds_depend_on_every_part_and_on_nothing_else():
    seeds = {hash_seed("rl", s, task, i) for s in range(5) for task in "abc" for i in range(7)}
    assert len(seeds) == 5 * 3 * 7
    assert hash_seed("rl", 0, "bugfix-1", 3) == hash_seed("rl", 0, "bugfix-1", 3)
    # Fixed for all time: a resumed run draws the same numbers in another process.
    assert hash_seed("a", 1) == int.from_bytes(hashlib.sha256(b"('a', 1)").digest()[:4], "little")
