"""Workers as processes of their own, one of which is killed or frozen: every episode ends once, as it does locally."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.rl.rollout import play_episode
from composer_jax.rl.workers.handshake import make_token
from composer_jax.rl.workers.pool import PoolOptions, WorkerPool
from composer_jax.sandbox import LocalSandboxPool, SandboxLimits
from composer_jax.tasks.result_cache import ResultCache
from tests.rl.workers.seeded_policy import CHAT, SeededPolicy, specs, until, worker_setup

ROOT = Path(__file__).parents[3]
EPISODES = 12


@contextlib.contextmanager
def worker_process(pool, token_file):
    command = [sys.executable, "-m", "launch.worker", f"--connect=127.0.0.1:{pool.port}", f"--token_file={token_file}"]
    process = subprocess.Popen([*command, "--episodes=6"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.wait()
        process.stderr.close()


async def play_locally(context):
    policy = SeededPolicy()
    async with LocalSandboxPool(SandboxLimits(), size=2) as sandboxes, policy.serving():
        here = dataclasses.replace(context, pool=sandboxes)
        return await asyncio.gather(*(play_episode(spec, policy, here) for spec in specs(EPISODES)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_that_is_killed_or_frozen_changes_no_token(tmp_path, number):
    context = EpisodeContext(CHAT, None, cache=ResultCache())
    expected = await play_locally(context)
    policy, token_file, ended = SeededPolicy(pause_after=180), tmp_path / "token", []
    options = PoolOptions(silence_s=8.0, patience_s=120)
    pool = WorkerPool(options, worker_setup(tmp_path), make_token(token_file), context)

    async def play(spec):
        episode = await pool.play(spec, policy)
        ended.append(spec.seed)
        return episode

    with contextlib.ExitStack() as stack:
        async with policy.serving(), pool:
            processes = [stack.enter_context(worker_process(pool, token_file)) for _ in range(2)]
            await until(lambda: len(pool.workers) == 2)
            playing = [asyncio.create_task(play(spec)) for spec in specs(EPISODES)]
            await until(lambda: policy.waiting + len(ended) == EPISODES)
            before = policy.waiting
            os.kill(processes[0].pid, number)
            await until(lambda: pool.losses == 1 and policy.waiting == min(before, 6))
            policy.gate.set()
            episodes = await asyncio.gather(*playing)
        assert processes[1].wait(30) == 0
        if number == signal.SIGSTOP:  # it wakes up, finds no trainer, and waits for one
            os.kill(processes[0].pid, signal.SIGCONT)
            assert processes[0].poll() is None
    assert sorted(ended) == [spec.seed for spec in specs(EPISODES)]
    attempts = [policy.seeds.count(spec.seed) for spec in specs(EPISODES)]
    assert set(attempts) == {1, 2}
    assert episodes == expected


@pytest.mark.slow
async def test_a_worker_with_another_token_ends_with_a_sentence(tmp_path):
    other = tmp_path / "other"
    make_token(other)
    pool = WorkerPool(PoolOptions(), worker_setup(tmp_path), "a token of the tests", None)
    async with pool:
        with worker_process(pool, other) as process:
            _, stderr = await asyncio.to_thread(process.communicate, timeout=60)
            assert process.returncode == 2 and "Traceback" not in stderr
            assert "launch.worker: 127.0.0.1:" in stderr and "it refuses this worker: the token is another" in stderr
