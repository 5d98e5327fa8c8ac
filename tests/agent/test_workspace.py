"""The workspace: the sandbox holds what we think it holds, comes late, and may die."""

import asyncio

import pytest

from composer_jax.agent.workspace import ATTEMPTS, Workspace
from composer_jax.sandbox import SandboxDied
from composer_jax.tasks.cache import ResultCache
from tests.agent.conftest import task_of

SHOW = "import pathlib; print(*sorted(f'{p}={p.read_text()}' for p in pathlib.Path('.').glob('*.txt')), sep=',')"
FILES = {"show.py": SHOW, "a.txt": "1"}
SHOW_THEM = ["python", "show.py"]


def test_no_sandbox_is_taken_before_something_runs(dying_pool):
    async def check():
        pool = dying_pool(set())
        workspace = Workspace(task_of(FILES), pool)
        workspace.write("b.txt", b"2")
        await workspace.close()
        assert pool.acquired == 0

    asyncio.run(check())


def test_edits_reach_the_sandbox_before_and_after_it_is_taken(dying_pool):
    async def check():
        pool = dying_pool(set())
        workspace = Workspace(task_of(FILES), pool)
        workspace.write("b.txt", b"2")
        assert (await workspace.run(SHOW_THEM, 5)).stdout == "a.txt=1,b.txt=2\n"
        workspace.write("a.txt", b"3")
        assert (await workspace.run(SHOW_THEM, 5)).stdout == "a.txt=3,b.txt=2\n"
        await workspace.close()
        await workspace.close()
        assert pool.acquired == 1

    asyncio.run(check())


def test_what_a_command_writes_is_seen(pool):
    async def check():
        workspace = Workspace(task_of({"make.py": "open('made.txt', 'w').write('x')"}), pool)
        await workspace.run(["python", "make.py"], 5)
        assert workspace.files == {"make.py": b"open('made.txt', 'w').write('x')", "made.txt": b"x"}
        await workspace.close()

    asyncio.run(check())


@pytest.mark.parametrize("deaths", [{0}, {0, 1}])
def test_a_dead_sandbox_is_set_up_again_as_it_was(dying_pool, deaths):
    async def check():
        pool = dying_pool(deaths)
        workspace = Workspace(task_of(FILES), pool)
        workspace.write("a.txt", b"9")
        assert (await workspace.run(SHOW_THEM, 5)).stdout == "a.txt=9\n"
        workspace.write("b.txt", b"2")
        workspace._sandbox.end("a test ended it")
        assert (await workspace.run(SHOW_THEM, 5)).stdout == "a.txt=9,b.txt=2\n"
        await workspace.close()

    asyncio.run(check())


def test_an_outage_is_raised(dying_pool):
    async def check():
        pool = dying_pool(range(99))
        workspace = Workspace(task_of(FILES), pool)
        with pytest.raises(SandboxDied):
            await workspace.run(SHOW_THEM, 5)
        assert pool.acquired == ATTEMPTS
        await workspace.close()

    asyncio.run(check())


def test_the_same_files_and_command_run_once(dying_pool):
    async def check():
        pool, cache = dying_pool(set()), ResultCache()
        said = []
        for text in (b"1", b"1", b"2"):
            workspace = Workspace(task_of(FILES), pool, cache)
            workspace.write("a.txt", text)
            said.append((await workspace.run(SHOW_THEM, 5)).stdout)
            await workspace.close()
        assert said == ["a.txt=1\n", "a.txt=1\n", "a.txt=2\n"]
        assert (cache.hits, cache.runs, pool.acquired) == (1, 2, 2)

    asyncio.run(check())


def test_a_command_that_leaves_traces_is_run_each_time(pool):
    async def check():
        cache = ResultCache()
        for _ in range(2):
            workspace = Workspace(task_of({"make.py": "open('made.txt', 'w').write('x')"}), pool, cache)
            await workspace.run(["python", "make.py"], 5)
            assert "made.txt" in workspace.files
            await workspace.close()
        assert (cache.hits, cache.runs) == (0, 2)

    asyncio.run(check())
