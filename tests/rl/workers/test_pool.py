"""WorkerPool and workers over TCP in one process: losses, joins, cancellation, errors, the same tokens as locally."""

import asyncio
import contextlib
import dataclasses

import pytest

from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.errors import UserError
from composer_jax.rl import rollout
from composer_jax.rl.rollout import play_episode
from composer_jax.rl.workers.channel import RemoteError
from composer_jax.rl.workers.pool import PoolOptions, WorkerPool
from composer_jax.rl.workers.worker import WorkerOptions, WorkerThread, run_worker
from composer_jax.rl.workers.worker_setup import WorkerSetup
from composer_jax.sandbox import LocalSandboxPool, SandboxLimits
from composer_jax.tasks.result_cache import ResultCache
from tests.rl.made_up import conversation, episode
from tests.rl.workers.seeded_policy import CHAT, SeededPolicy, specs, until, worker_setup

TOKEN = "a token of the tests"
SETUP = WorkerSetup({})
NO_SANDBOXES = EpisodeContext(None, None)


@contextlib.asynccontextmanager
async def no_sandboxes(setup, sandboxes):
    yield dataclasses.replace(NO_SANDBOXES, cache=ResultCache())


@contextlib.asynccontextmanager
async def refuse(setup, sandboxes):
    raise UserError("no sandboxes here")
    yield


def start_worker(pool, episodes=4, make_context=no_sandboxes, **options):
    options = WorkerOptions("127.0.0.1", pool.port, TOKEN, episodes=episodes, **options)
    pool.started.append(asyncio.create_task(run_worker(options, make_context)))
    return pool.started[-1]


@contextlib.asynccontextmanager
async def trainer(policy, setup=SETUP, context=NO_SANDBOXES, **options):
    """The pool of a trainer, at whose end the workers end that start_worker has started."""
    started = []
    try:
        async with policy.serving(), WorkerPool(PoolOptions(**options), setup, TOKEN, context) as pool:
            pool.started = started
            yield pool
    finally:
        results = await asyncio.gather(*started, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results


def play_all(pool, policy, jobs):
    return [asyncio.create_task(pool.play(spec, policy)) for spec in jobs]


async def play_one_on_a_worker():
    policy = SeededPolicy()
    async with trainer(policy) as pool:
        start_worker(pool)
        return await pool.play(specs(1)[0], policy)


@pytest.fixture
def harness(monkeypatch):
    """An episode samples three times: tokens 7 and then all of its context."""

    async def run_episode(spec, session, _):
        context = [7]
        for branch in (0, 0, 1):
            sample = await session.sample(context, rollout.SamplingParams(64), branch=branch)
            context = [*context, *sample.tokens, 5]
        made = episode(1.0, conversation(100), task_id=spec.task.id, seed=spec.seed)
        made.detail = str(context)
        return made

    monkeypatch.setattr(rollout, "run_episode", run_episode)


async def test_episodes_of_workers_equal_those_of_this_process_token_for_token(tmp_path):
    """Real sandboxes and real episodes, half of them with summaries."""
    jobs, setup = specs(12), worker_setup(tmp_path)
    context = EpisodeContext(CHAT, None, cache=ResultCache())
    local, remote = SeededPolicy(), SeededPolicy()
    async with LocalSandboxPool(SandboxLimits(), size=2) as sandboxes, local.serving():
        here = dataclasses.replace(context, pool=sandboxes)
        expected = await asyncio.gather(*(play_episode(spec, local, here) for spec in jobs))
    async with trainer(remote, setup, context) as pool:
        for _ in range(2):
            start_worker(pool, make_context=WorkerSetup.episode_context)
        episodes = await asyncio.gather(*play_all(pool, remote, jobs))
    assert episodes == expected
    assert sorted(local.samples) == sorted(remote.samples)
    assert {e.summaries > 0 for e in episodes} == {True, False} and {e.reward for e in episodes} == {0.0, 1.0}
    assert context.cache.runs + context.cache.hits > 0


async def test_this_machine_plays_beside_the_workers_and_the_one_with_most_room_is_next(harness):
    policy = SeededPolicy(pause_after=0)
    async with trainer(policy, local_episodes=2) as pool:
        start_worker(pool, episodes=3)
        await until(lambda: len(pool.workers) == 2)
        playing = play_all(pool, policy, specs(7))
        await until(lambda: policy.open_sessions == 5)
        assert [w.room for w in pool._workers] == [0, 0]
        policy.gate.set()
        episodes = await asyncio.gather(*playing)
    assert [e.seed for e in episodes] == [spec.seed for spec in specs(7)]


async def test_a_lost_worker_gets_none_of_its_episodes_back(harness):
    """The others have room at the moment of the loss."""
    policy = SeededPolicy(pause_after=1)
    async with trainer(policy) as pool:
        workers = [start_worker(pool, episodes=8) for _ in range(4)]
        await until(lambda: len(pool.workers) == 4)
        playing = play_all(pool, policy, specs(16))
        await until(lambda: len(policy.samples) == 32)
        workers[2].cancel()
        await until(lambda: pool.losses == 1)
        await until(lambda: policy.open_sessions == 16)
        policy.gate.set()
        episodes = await asyncio.gather(*playing)
        assert [(e.seed, e.reward) for e in episodes] == [(spec.seed, 1.0) for spec in specs(16)]
        assert sorted(policy.seeds.count(spec.seed) for spec in specs(16)) == [1] * 12 + [2] * 4


async def test_an_episode_that_loses_every_worker_is_lost_itself(harness):
    policy = SeededPolicy(pause_after=0)
    async with trainer(policy, retries=1) as pool:
        (playing,) = play_all(pool, policy, [dataclasses.replace(spec, effort="low") for spec in specs(1)])
        for attempt in (1, 2):
            worker = start_worker(pool)
            await until(lambda attempt=attempt: len(policy.samples) == attempt)
            worker.cancel()
            await until(lambda attempt=attempt: pool.losses == attempt)
        lost = await playing
    assert (lost.outcome, lost.reward, lost.effort) == ("infrastructure", None, "low")
    assert "2 workers were lost, the last one: " in lost.detail and "the connection ended" in lost.detail


async def test_a_worker_that_joins_later_gets_what_waits(harness):
    policy = SeededPolicy(pause_after=0)
    async with trainer(policy) as pool:
        playing = play_all(pool, policy, specs(4))
        start_worker(pool, episodes=2)
        await until(lambda: policy.open_sessions == 2)
        start_worker(pool, episodes=2)
        await until(lambda: policy.open_sessions == 4)
        policy.gate.set()
        await asyncio.gather(*playing)


async def test_cancelling_an_episode_ends_it_on_its_worker_and_frees_its_place(harness):
    policy = SeededPolicy(pause_after=0)
    async with trainer(policy) as pool:
        start_worker(pool, episodes=2)
        playing = play_all(pool, policy, specs(3))
        await until(lambda: len(policy.samples) == 2)
        playing[0].cancel()
        await asyncio.wait([playing[0]])
        await until(lambda: len(policy.samples) == 3)  # the third has its place
        assert policy.open_sessions == 2
        playing[1].cancel()
        playing[2].cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        assert policy.open_sessions == 0 and [w.room for w in pool._workers] == [2]
        assert pool.losses == 0


async def test_cancelling_an_episode_that_waits_for_a_session_opens_none(harness):
    policy = SeededPolicy(pause_after=0, slots=1)
    async with trainer(policy) as pool:
        start_worker(pool)
        playing = play_all(pool, policy, specs(2))
        await until(lambda: len(policy.samples) == 1)
        playing[1].cancel()
        await asyncio.wait([playing[1]])
        policy.gate.set()
        await playing[0]
        assert len(policy.seeds) == 1


async def test_without_a_worker_one_sentence_ends_the_run(harness):
    policy = SeededPolicy()
    async with trainer(policy, patience_s=0.2) as pool:
        with pytest.raises(UserError, match="No rollout worker"):
            await pool.play(specs(1)[0], policy)
        start_worker(pool)
        await until(lambda: pool.workers)
        assert (await pool.play(specs(1)[0], policy)).reward == 1.0


async def test_an_episode_of_a_suite_does_not_wait_behind_those_of_training(harness):
    policy, order = SeededPolicy(pause_after=0), []
    async with trainer(policy, local_episodes=1) as pool:
        playing = play_all(pool, policy, specs(3))
        await until(lambda: policy.open_sessions == 1)
        playing.append(asyncio.create_task(pool.play(specs(4)[3], policy, ahead=True)))
        for task, spec in zip(playing, specs(4), strict=True):
            task.add_done_callback(lambda _, seed=spec.seed: order.append(seed))
        await asyncio.sleep(0.01)
        policy.gate.set()
        await asyncio.gather(*playing)
    assert order == [specs(4)[i].seed for i in (0, 3, 1, 2)]


async def test_a_policy_that_fails_ends_the_run_with_its_own_exception(harness):
    policy = SeededPolicy(pause_after=0)
    async with trainer(policy) as pool:
        start_worker(pool)
        playing = play_all(pool, policy, specs(2))
        await until(lambda: len(policy.samples) == 2)
        policy.error = ZeroDivisionError("the engine died")
        policy.gate.set()
        for task in playing:
            with pytest.raises(ZeroDivisionError):
                await task


def test_a_task_that_a_worker_cannot_play_ends_the_run_with_its_sentence(monkeypatch):
    async def run_episode(*_):
        raise UserError("task t needs the image i")

    monkeypatch.setattr(rollout, "run_episode", run_episode)
    with pytest.raises(UserError, match="image i"):
        asyncio.run(play_one_on_a_worker())


def test_a_spec_that_a_worker_cannot_read_ends_the_run(harness, monkeypatch):
    from composer_jax.rl.workers import worker as worker_file

    def unreadable(data):
        raise ValueError("no spec")

    monkeypatch.setattr(worker_file, "spec_from_json", unreadable)
    with pytest.raises(RemoteError, match="no spec"):
        asyncio.run(play_one_on_a_worker())


async def test_a_machine_that_cannot_build_sandboxes_gets_no_episodes(harness):
    policy = SeededPolicy()
    async with trainer(policy) as pool:
        (playing,) = play_all(pool, policy, specs(1))
        with pytest.raises(UserError, match="no sandboxes here"):
            await start_worker(pool, make_context=refuse)
        pool.started.clear()
        start_worker(pool)
        assert (await playing).reward == 1.0


async def test_a_worker_connects_again_when_its_trainer_comes_back(harness):
    policy = SeededPolicy(pause_after=0)
    async with trainer(policy) as pool:
        port = pool.port
        start_worker(pool)
        playing = play_all(pool, policy, specs(1))
        await until(lambda: policy.samples)
        for channel in pool._connections.values():
            channel.abort("a test broke it")
        await until(lambda: pool.losses == 1 and pool.workers)
        policy.gate.set()
        assert (await playing[0]).reward == 1.0
        assert port == pool.port


def thread_of(pool, **options) -> WorkerThread:
    return WorkerThread(WorkerOptions("127.0.0.1", pool.port, TOKEN, episodes=2), **options)


async def test_a_worker_in_a_thread_plays_and_ends_with_its_block(harness):
    policy = SeededPolicy()
    async with trainer(policy) as pool:
        with thread_of(pool, make_context=no_sandboxes):
            episodes = await asyncio.gather(*play_all(pool, policy, specs(4)))
            assert [e.seed for e in episodes] == [spec.seed for spec in specs(4)]
        await until(lambda: not pool.workers)
        assert pool.losses == 1
        thread = thread_of(pool, make_context=no_sandboxes)
        thread.__enter__()
        await until(lambda: pool.workers)
    await asyncio.to_thread(thread.__exit__)
    assert pool.losses == 1, "the run has ended, and with it the worker"


async def test_a_worker_in_a_thread_that_fails_says_so(harness, caplog):
    policy = SeededPolicy()
    async with trainer(policy, local_episodes=1) as pool:
        with thread_of(pool, make_context=refuse):
            await until(lambda: "plays no more episodes: no sandboxes here" in caplog.text)
        assert len(await asyncio.gather(*play_all(pool, policy, specs(2)))) == 2


def test_a_worker_gives_up_without_a_trainer():
    async def main():
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await run_worker(WorkerOptions("127.0.0.1", port, TOKEN, patience_s=0.5), no_sandboxes)

    with pytest.raises(UserError, match="No trainer has answered"):
        asyncio.run(main())


async def test_all_interfaces_have_one_port(harness):
    """That of both families of addresses; the order of two sockets would be right by luck every other time."""
    for _ in range(10):
        async with trainer(SeededPolicy(), host="") as pool:
            ports = {listening.getsockname()[1] for listening in pool._server.sockets}
            assert ports == {pool.port}
            _, writer = await asyncio.open_connection("127.0.0.1", pool.port)
            writer.close()


def test_an_address_that_cannot_be_listened_on(harness):
    async def main():
        async with trainer(SeededPolicy()) as pool:
            async with trainer(SeededPolicy(), port=pool.port):
                raise AssertionError("two pools listen on one port")

    with pytest.raises(UserError, match="cannot be listened on"):
        asyncio.run(main())
