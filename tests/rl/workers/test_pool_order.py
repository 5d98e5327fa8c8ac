"""WorkerPool: an episode of a suite does not wait behind those of training."""

import asyncio

from tests.rl.workers.seeded_policy import SeededPolicy, specs, until
from tests.rl.workers.test_pool import harness, play_all, trainer

__all__ = ["harness"]  # a fixture


def test_an_episode_that_goes_ahead_gets_the_next_place(harness):
    async def main():
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

    asyncio.run(main())
