"""Trees: workspaces that share files, snapshots, forks, and what is released."""

import asyncio
import gc
import hashlib
import os
import signal
import time
from pathlib import Path

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import LocalSandboxPool, SandboxDied, SandboxFileError
from tests.sandbox.fixtures import LIMITS, zygote_of


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def in_pool(pool: LocalSandboxPool, work) -> None:
    asyncio.run(work(pool))


def test_a_workspace_on_a_tree_shows_it_and_its_own_changes_and_changes_nothing_else(pool, folder):
    async def work(pool):
        tree = pool.tree(folder)
        before = contents(folder)
        async with await pool.acquire({"new.txt": "mine"}, tree) as one, await pool.acquire({}, tree) as other:
            result = await one.run(["sh", "-c", "./run.sh; python link.py; cat closed.txt; test -e pipe || echo none"])
            assert result.stdout == "ran\npristine\nfor its ownernone\n", result
            changes = "rm -r package/deep; echo 'print(1)' > package/code.py; chmod 000 run.sh; mv package moved"
            assert (await one.run(["sh", "-c", changes])).outcome == "ok"
            assert await one.list() == ["closed.txt", "moved/code.py", "new.txt", "run.sh"]
            assert (await one.run(["python", "moved/code.py"])).stdout == "1\n"
            everything = ["closed.txt", "package/code.py", "package/deep/data.bin", "run.sh"]
            assert await other.list() == everything
            assert await other.read("package/deep/data.bin") == bytes(range(256))
            async with await pool.acquire({}, tree) as late:
                assert await late.list() == everything
                assert (await late.run(["python", "package/code.py"])).stdout == "pristine\n"
        assert contents(folder) == before

    in_pool(pool, work)


def test_a_snapshot_is_what_the_workspace_was_and_never_changes(pool, folder):
    async def work(pool):
        async with await pool.acquire({}, pool.tree(folder)) as sandbox:
            await sandbox.write("package/code.py", "print('first')\n")
            first = await sandbox.snapshot()
            await sandbox.delete("package/code.py")
            await sandbox.write("second.txt", "2")
            second = await sandbox.snapshot()
            assert (len(first.layers), len(second.layers)) == (1, 2)
            await sandbox.restore(first)
            assert (await sandbox.run(["python", "package/code.py"])).stdout == "first\n"
            assert "second.txt" not in await sandbox.list()
            await sandbox.write("third.txt", "3")
            async with await pool.acquire({}, second) as other:
                assert "package/code.py" not in await other.list()
                assert await other.read("second.txt") == b"2"
            await sandbox.restore(second)
            assert "third.txt" not in await sandbox.list()

    in_pool(pool, work)


@pytest.mark.parametrize("on_a_tree", [True, False])
def test_a_fork_goes_its_own_way(pool, folder, on_a_tree):
    async def work(pool):
        tree = pool.tree(folder) if on_a_tree else None
        async with await pool.acquire({"common.txt": "c"}, tree) as one, await one.fork() as other:
            await one.write("one.txt", "1")
            await other.write("common.txt", "other")
            assert await one.read("common.txt") == b"c" and await other.read("common.txt") == b"other"
            assert "one.txt" not in await other.list()
            assert (await one.run(["cat", "common.txt"])).stdout == "c"

    in_pool(pool, work)


def test_a_long_chain_of_forks_keeps_every_change(pool, folder):
    async def work(pool):
        sandbox = await pool.acquire({}, pool.tree(folder))
        for number in range(40):
            await sandbox.write(f"many/file{number}", str(number))
            if number % 4 == 3:
                await sandbox.delete(f"many/file{number - 3}")
            other = await sandbox.fork()
            await sandbox.close()
            sandbox = other
        assert len(sandbox.plan.tree.layers) == 40
        left = sorted(f"many/file{number}" for number in range(40) if number % 4)
        assert [path for path in await sandbox.list() if path.startswith("many/")] == left
        assert (await sandbox.run(["sh", "-c", "rm -r many && mkdir many && ls many"])).stdout == ""
        await sandbox.close()

    in_pool(pool, work)


def layers_of(pool: LocalSandboxPool) -> int:
    """The largest number of mounted layers that a process of the pool sees: the zygote, or a sandbox, which keeps the
    mounts of its fork."""
    mine, found = {pool.launcher_pid}, 0
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent in mine:
                mine.add(pid)
                lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
                found = max(found, sum("/opt/composer/hidden/layers/" in line for line in lines))
        except OSError:
            continue
    return found


def test_what_snapshots_hold_is_given_back(folder):
    async def work():
        async with LocalSandboxPool(LIMITS, size=3) as pool:
            async with await pool.acquire({}, pool.tree(folder)) as sandbox:
                resting = layers_of(pool)
                trees = []
                for number in range(10):
                    await sandbox.write(f"file{number}", "x")
                    trees.append(await sandbox.snapshot())
                async with await pool.acquire({}) as witness:  # was forked when all layers were there
                    assert layers_of(pool) >= 10 > resting + 4
                    await sandbox.restore(trees[2])
                    del trees
                    gc.collect()
                    deadline = time.monotonic() + 10
                    # Three snapshots are below the workspace; two layers are of the sandboxes.
                    while layers_of(pool) > resting + 4:
                        assert time.monotonic() < deadline, layers_of(pool)
                        await asyncio.sleep(0.01)
                    assert await sandbox.read("file2") == b"x"
                    assert await witness.list() == []

    asyncio.run(work())


def test_a_workspace_has_its_limit_whatever_it_stands_on(pool, folder):
    async def work(pool):
        tree = pool.tree(folder)
        async with await pool.acquire({}, tree) as one, await pool.acquire({}, tree) as other:
            fill = (
                "import os\nfor n in range(100): os.write(os.open(f'f{n}', os.O_CREAT | os.O_WRONLY), bytes(1 << 20))"
            )
            result = await one.run(["python", "-c", fill])
            assert "No space left" in result.stderr
            with pytest.raises(SandboxFileError, match="no space left"):
                await one.write("more", bytes(1 << 20))
            await other.write("more", bytes(1 << 20))

    in_pool(pool, work)


def test_a_sandbox_sees_neither_layers_nor_trees_of_others(pool, folder):
    async def work(pool):
        async with await pool.acquire({}, pool.tree(folder)) as one:
            await one.write("secret.txt", "of this one")
            await one.snapshot()
            async with await pool.acquire({}) as other:
                look = (
                    "import os; hidden = '/opt/composer/hidden'; print(os.listdir(hidden), os.access(hidden, os.W_OK))"
                )
                result = await other.run(["python", "-c", look])
                assert result.stdout == "[] False\n", result
                found = await other.run(["grep", "-rl", "of this one", "/opt/composer", "/tmp", "/workspace"])
                assert found.stdout == ""

    in_pool(pool, work)


def test_a_snapshot_of_a_sandbox_that_died_is_its_death(folder):
    async def work():
        async with LocalSandboxPool(LIMITS, size=2) as pool:
            tree = pool.tree(folder)
            sandbox = await pool.acquire({}, tree)
            snapshot = await sandbox.snapshot()
            await sandbox.close()
            for call in (sandbox.snapshot, sandbox.fork, lambda: sandbox.restore(snapshot)):
                with pytest.raises(SandboxDied):
                    await call()
            # The layers end with the zygote; the pristine trees stay.
            os.kill(pool.launcher_pid, signal.SIGKILL)
            os.waitid(os.P_PID, pool.launcher_pid, os.WEXITED | os.WNOWAIT)
            with pytest.raises(SandboxDied, match="were lost with the process that held them"):
                await pool.acquire({}, snapshot)
            async with await pool.acquire({"a": "b"}, tree) as alive:
                with pytest.raises(SandboxDied, match="were lost with the process"):
                    await alive.restore(snapshot)
                assert await alive.read("a") == b"b", "and nothing is lost by asking"
            async with await pool.acquire({}, tree) as other:
                assert (await other.run(["./run.sh"])).stdout == "ran\n"

    asyncio.run(work())


def test_folders_that_cannot_be_trees_are_named(pool, tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "missing"):
        with pytest.raises(UserError, match=f"{path} is not a folder"):
            pool.tree(path)


def test_a_refused_tree_leaves_its_place_to_the_next_who_waits(folder):
    async def work():
        async with LocalSandboxPool(LIMITS, size=1) as pool, LocalSandboxPool(LIMITS, size=1) as other:
            first, foreign = await pool.acquire({}), other.tree(folder)
            refused, served = (asyncio.create_task(pool.acquire({"a": "b"}, tree)) for tree in (foreign, None))
            await asyncio.sleep(0.05)
            await first.close()
            with pytest.raises(UserError, match="of another sandbox pool"):
                await asyncio.wait_for(refused, 10)
            async with await asyncio.wait_for(served, 10) as sandbox:
                assert await sandbox.list() == ["a"]

    asyncio.run(work())


def test_a_pool_of_one_has_no_room_for_a_fork():
    async def work():
        async with LocalSandboxPool(LIMITS, size=1) as pool, await pool.acquire({}) as sandbox:
            with pytest.raises(UserError, match="size 1 has no room for a fork"):
                await sandbox.fork()
            await sandbox.write("still", b"alive")

    asyncio.run(work())


def test_a_chain_of_snapshots_has_an_end(pool, monkeypatch):
    monkeypatch.setattr("composer_jax.sandbox.local_pool.MAX_DEPTH", 3)

    async def work(pool):
        async with await pool.acquire({"a": "b"}) as sandbox:
            for _ in range(3):
                await sandbox.snapshot()
            with pytest.raises(UserError, match="3 snapshots on top of each other, which is the most"):
                await sandbox.snapshot()
            assert await sandbox.read("a") == b"b"

    in_pool(pool, work)


@pytest.mark.slow
def test_two_hundred_snapshots_fit_into_the_kernels_page(pool):
    async def work(pool):
        async with await pool.acquire({}) as sandbox:
            for number in range(200):
                await sandbox.write(str(number), b"x")
                await sandbox.snapshot()
            assert len(await sandbox.list()) == 200

    in_pool(pool, work)


def test_a_cancelled_snapshot_ends_the_sandbox(folder):
    async def work():
        async with LocalSandboxPool(LIMITS, size=1) as pool:
            sandbox = await pool.acquire({})
            os.kill(zygote_of(pool), signal.SIGSTOP)  # or the snapshot may be taken before it is cancelled
            waiting = asyncio.create_task(sandbox.snapshot())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            os.kill(zygote_of(pool), signal.SIGCONT)
            with pytest.raises(SandboxDied, match="cancelled"):
                await sandbox.list()
            async with await asyncio.wait_for(pool.acquire({"a": "b"}), 10) as other:  # its place is free
                assert await other.list() == ["a"]

    asyncio.run(work())
