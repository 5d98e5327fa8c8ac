"""Trees: workspaces that share files, snapshots, forks, and what is given back."""

import asyncio
import gc
import hashlib
import os
import signal
import time
from pathlib import Path

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import Limits, SandboxDied, SandboxFileError, SandboxPool
from tests.sandbox.conftest import LIMITS


@pytest.fixture
def folder(tmp_path) -> Path:
    """A small repository with everything that is special about files."""
    folder = tmp_path / "repository"
    (folder / "package" / "deep").mkdir(parents=True)
    (folder / "package" / "code.py").write_text("print('pristine')\n")
    (folder / "package" / "deep" / "data.bin").write_bytes(bytes(range(256)))
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o700)
    (folder / "closed.txt").write_text("for its owner")
    (folder / "closed.txt").chmod(0o400)
    (folder / "link.py").symlink_to("package/code.py")
    os.mkfifo(folder / "pipe")
    return folder


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def in_pool(pool: SandboxPool, work) -> None:
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
            assert (first.depth, second.depth) == (1, 2)
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
        assert sandbox.tree.depth == 40
        left = sorted(f"many/file{number}" for number in range(40) if number % 4)
        assert [path for path in await sandbox.list() if path.startswith("many/")] == left
        assert (await sandbox.run(["sh", "-c", "rm -r many && mkdir many && ls many"])).stdout == ""
        await sandbox.close()

    in_pool(pool, work)


def zygote_layers(pool: SandboxPool) -> int:
    """File systems that the pool's zygote holds for layers: it is the oldest Python of the pool inside bubblewrap."""
    mine, found = {pool._spawner._process.pid}, []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if parent in mine:
            mine.add(pid)
            if command.startswith(b"/opt/bin/python"):
                found.append(pid)
    lines = Path(f"/proc/{found[0]}/mountinfo").read_text().splitlines()
    return sum("/opt/composer/hidden/layers/" in line for line in lines)


def test_what_snapshots_hold_is_given_back(folder):
    async def work():
        async with SandboxPool(LIMITS, size=2) as pool:
            async with await pool.acquire({}, pool.tree(folder)) as sandbox:
                resting = zygote_layers(pool)
                trees = []
                for number in range(10):
                    await sandbox.write(f"file{number}", "x")
                    trees.append(await sandbox.snapshot())
                assert zygote_layers(pool) >= resting + 10
                await sandbox.restore(trees[2])
                del trees
                gc.collect()
                deadline = time.monotonic() + 10
                # Three snapshots are below the workspace; one layer is its own.
                while zygote_layers(pool) > resting + 3:
                    assert time.monotonic() < deadline, zygote_layers(pool)
                    await asyncio.sleep(0.01)
                assert await sandbox.read("file2") == b"x"

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
                    "import ctypes, os\n"
                    "libc = ctypes.CDLL(None)\n"
                    "place = '/opt/composer/hidden'\n"
                    "print(os.listdir(place), libc.umount2(place.encode(), 2), os.access(place, os.W_OK))\n"
                    "print(libc.umount2(b'/workspace', 2), os.listdir('/workspace'))\n"
                )
                result = await other.run(["python", "-c", look])
                assert result.stdout == "[] -1 False\n-1 []\n", result
                found = await other.run(["grep", "-rl", "of this one", "/opt/composer", "/tmp", "/workspace"])
                assert found.stdout == ""

    in_pool(pool, work)


def test_a_snapshot_of_a_sandbox_that_died_is_its_death(folder):
    async def work():
        async with SandboxPool(LIMITS, size=2) as pool:
            tree = pool.tree(folder)
            sandbox = await pool.acquire({}, tree)
            snapshot = await sandbox.snapshot()
            await sandbox.close()
            for call in (sandbox.snapshot, sandbox.fork, lambda: sandbox.restore(snapshot)):
                with pytest.raises(SandboxDied):
                    await call()
            # With the zygote go the layers; the pristine trees stay.
            os.kill(pool._spawner._process.pid, signal.SIGKILL)
            pool._spawner._process.wait()
            with pytest.raises(SandboxDied):
                await pool.acquire({}, snapshot)
            async with await pool.acquire({}, tree) as other:
                assert (await other.run(["./run.sh"])).stdout == "ran\n"

    asyncio.run(work())


def test_folders_that_cannot_be_trees_are_named(pool, tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "missing"):
        with pytest.raises(UserError, match=f"{path} is not a folder"):
            pool.tree(path)


def test_without_isolation_trees_are_copied(folder):
    async def work():
        with pytest.warns(RuntimeWarning, match="ISOLATES NOTHING"):
            pool = SandboxPool(Limits(), backend="subprocess", size=2)
        async with pool:
            tree = pool.tree(folder)
            async with await pool.acquire({"new.txt": "n"}, tree) as one:
                await one.delete("package/code.py")
                async with await one.fork() as other:
                    await other.write("new.txt", "o")
                    assert await one.read("new.txt") == b"n"
                    assert "package/code.py" not in await other.list()
                await one.restore(tree)
                assert "package/code.py" in await one.list() and "new.txt" not in await one.list()

    asyncio.run(work())
