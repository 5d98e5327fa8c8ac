"""Rollouts: every EpisodeSpec yields one episode, in order; a dead sandbox is retried with a fresh session."""

import asyncio
import contextlib
import hashlib
import random

import pytest

from composer_jax.agent.summary import Compaction
from composer_jax.demo.generate import generate
from composer_jax.rl import rollout
from composer_jax.rl.rollout import EpisodeSpec, RolloutContext, roll_out
from composer_jax.seeds import hash_seed
from composer_jax.tasks.result_cache import ResultCache
from tests.rl.made_up import episode


class FakeSampler:
    """Opens sessions and records their seeds."""

    def __init__(self, slots=3):
        self.slots, self.open_sessions, self.most, self.seeds, self.busy_seconds = slots, 0, 0, [], 5.0

    @contextlib.asynccontextmanager
    async def serving(self):
        self.free = asyncio.Semaphore(self.slots)
        yield self
        self.busy_seconds += 2.0

    async def open(self, seed):
        await self.free.acquire()
        self.seeds.append(seed)
        self.open_sessions += 1
        self.most = max(self.most, self.open_sessions)
        return self

    def close(self):
        self.open_sessions -= 1
        self.free.release()


SPECS = [EpisodeSpec(generate("bugfix", "train", 0, i), 100 + i, Compaction(None)) for i in range(8)]
CONTEXT = RolloutContext(None, None, None, ResultCache(), infrastructure_retries=2)


@pytest.fixture
def run_episode(monkeypatch):
    """Replaces the harness by function(task, attempt number) -> reward, None for a dead sandbox."""

    def install(reward_of):
        attempts = {}

        async def fake(task, session, pool, tok, *, seed, **_):
            attempt = attempts[task.id] = attempts.get(task.id, 0) + 1
            await asyncio.sleep(random.random() / 200)
            reward = reward_of(task, attempt)
            if isinstance(reward, Exception):
                raise reward
            return episode(reward, task_id=task.id, seed=seed)

        monkeypatch.setattr(rollout, "run_episode", fake)
        return attempts

    return install


def test_episodes_come_in_the_order_of_the_specs_and_never_more_at_once_than_slots(run_episode):
    run_episode(lambda task, attempt: 1.0)
    sampler, done = FakeSampler(), []
    rollout_result = asyncio.run(roll_out(SPECS, sampler, CONTEXT, done.append))
    assert [(e.task_id, e.seed) for e in rollout_result.episodes] == [(spec.task.id, spec.seed) for spec in SPECS]
    assert sampler.most == 3 and sampler.open_sessions == 0
    assert sorted(e.task_id for e in done) == sorted(spec.task.id for spec in SPECS)
    assert rollout_result.sampler_seconds == 2.0


def test_a_dead_sandbox_is_tried_again_with_the_same_seed(run_episode):
    attempts = run_episode(lambda task, attempt: 1.0 if attempt == 3 or task is not SPECS[2].task else None)
    sampler = FakeSampler()
    rollout_result = asyncio.run(roll_out(SPECS, sampler, CONTEXT))
    assert attempts[SPECS[2].task.id] == 3
    assert rollout_result.episodes[2].reward == 1.0
    assert sampler.seeds.count(SPECS[2].seed) == 3
    assert sampler.open_sessions == 0


def test_an_episode_that_stays_dead_is_returned_once_without_a_reward(run_episode):
    attempts = run_episode(lambda task, attempt: None if task is SPECS[2].task else 0.0)
    done = []
    rollout_result = asyncio.run(roll_out(SPECS, FakeSampler(), CONTEXT, done.append))
    assert attempts[SPECS[2].task.id] == 3 and len(done) == len(SPECS)
    assert [e.reward for e in rollout_result.episodes] == [0.0, 0.0, None, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert rollout_result.episodes[2].outcome == "infrastructure"


def test_a_bug_in_one_episode_ends_the_rollout_and_leaves_no_session_open(run_episode):
    run_episode(lambda task, attempt: ZeroDivisionError() if task is SPECS[4].task else 1.0)
    sampler = FakeSampler()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(roll_out(SPECS, sampler, CONTEXT))
    assert sampler.open_sessions == 0


def test_seeds_depend_on_every_part_and_on_nothing_else():
    seeds = {hash_seed("rl", s, task, i) for s in range(5) for task in "abc" for i in range(7)}
    assert len(seeds) == 5 * 3 * 7
    assert hash_seed("rl", 0, "bugfix-1", 3) == hash_seed("rl", 0, "bugfix-1", 3)
    # Fixed for all time: a resumed run draws the same numbers in another process.
    assert hash_seed("a", 1) == int.from_bytes(hashlib.sha256(b"('a', 1)").digest()[:4], "little")
