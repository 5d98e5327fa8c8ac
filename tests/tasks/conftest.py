"""What the tests of tasks share: real sandboxes, and ones that die."""

import pytest

from composer_jax.sandbox import Limits, SandboxPool


@pytest.fixture(scope="session")
def pool():
    pool = SandboxPool(Limits(timeout_s=10), size=8)
    yield pool
    pool.kill()


class DyingPool:
    """Hands out real sandboxes, of which the first `deaths` are dead on arrival."""

    def __init__(self, pool, deaths):
        self.pool = pool
        self.deaths = deaths
        self.acquired = 0

    async def acquire(self, files):
        sandbox = await self.pool.acquire(files)
        self.acquired += 1
        if self.acquired <= self.deaths:
            sandbox.end("a test ended it")
        return sandbox


@pytest.fixture
def dying_pool(pool):
    return lambda deaths: DyingPool(pool, deaths)
