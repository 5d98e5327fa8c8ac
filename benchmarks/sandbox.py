"""Speed and memory of local sandboxes: `python -m benchmarks.sandbox`.

Prints progress on stderr and, as the last line of stdout, one JSON object:
    ready_ms            from the request for a sandbox to its ready worker, none prepared (median)
    command_ms          `ls` in the shell of a running sandbox, measured on the host (median)
    commands_per_s      the same at once in as many sandboxes as there are cores
    fork_server_per_s   a small Python test file, at once in as many sandboxes as there are cores
    overlay_ms          from the request for a sandbox on a tree of 1,400 files to its first written file (median)
    fork_depth20_ms     a fork of a sandbox whose tree has 20 snapshots (median)
    mb_at_256           memory of 256 sandboxes at once, each with a file of its own
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from composer_jax.sandbox import LocalSandbox, LocalSandboxPool, RunResult, Tree
from composer_jax.sandbox.tree import MountPlan

ROUNDS = 5  # rates are the median of this many rounds
SECONDS = 1.0  # length of a round
FILES = {
    "stack.py": "class Stack(list):\n    push = list.append\n    def peek(self):\n        return self[-1]\n",
    "test_stack.py": (
        "from stack import Stack\n\n"
        "def test_peek():\n    s = Stack()\n    s.push(1)\n    s.push(2)\n"
        "    assert s.peek() == 2\n    assert len(s) == 2\n\n"
        "test_peek()\nprint('1 passed')\n"
    ),
}


Command = Callable[[LocalSandbox], Awaitable[RunResult]]


def in_shell(sandbox: LocalSandbox) -> Awaitable[RunResult]:
    """A small program, started by the shell."""
    return sandbox.shell("ls")


def forked(sandbox: LocalSandbox) -> Awaitable[RunResult]:
    """A small Python program, which needs no interpreter start."""
    return sandbox.run(["python", "test_stack.py"])


def plain_ms(count: int = 200) -> float:
    """Median milliseconds of the same program as a child of this process: what the machine can do."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        subprocess.run(["ls"], stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def say(text: str, end: str = "\n") -> None:
    """Prints progress to stderr."""
    print(text, file=sys.stderr, flush=True, end=end)


async def ready_ms(pool: LocalSandboxPool, count: int = 60) -> float:
    """Median milliseconds from the request for a sandbox to its ready worker, one at a time."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        sandbox = pool._start_sandbox(MountPlan(Tree(pool)))  # private: acquire() would return a prepared one
        await sandbox.wait_ready(20.0)
        times.append(time.perf_counter() - started)
        await sandbox.close()
        await asyncio.sleep(0.005)  # so that its end does not overlap the next start
    return 1000 * statistics.median(times)


async def command_ms(pool: LocalSandboxPool, command: Command, count: int = 200) -> float:
    """Median milliseconds of one command."""
    times = []
    async with await pool.acquire(FILES) as sandbox:
        for _ in range(count):
            started = time.perf_counter()
            result = await command(sandbox)
            times.append(time.perf_counter() - started)
            assert result.outcome == "ok", result
    return 1000 * statistics.median(times)


async def per_second(pool: LocalSandboxPool, command: Command, at_once: int) -> float:
    """Commands per second in `at_once` sandboxes: median over rounds."""

    async def work(sandbox: LocalSandbox, end: float) -> int:
        done = 0
        while time.perf_counter() < end:
            result = await command(sandbox)
            assert result.outcome == "ok", result
            done += 1
        return done

    sandboxes = [await pool.acquire(FILES) for _ in range(at_once)]
    rates = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        done = await asyncio.gather(*(work(sandbox, started + SECONDS) for sandbox in sandboxes))
        rates.append(sum(done) / (time.perf_counter() - started))
    for sandbox in sandboxes:
        await sandbox.close()
    return statistics.median(rates)


def tree_of_many_files(pool: LocalSandboxPool, count: int = 1400) -> Tree:
    """A tree like that of a repository."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            path = Path(folder, f"package{number % 40}", f"module{number}.py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"VALUE = {number}\n" * 50)
        return pool.tree(Path(folder))


async def overlay_ms(pool: LocalSandboxPool, tree: Tree, count: int = 60) -> float:
    """Median milliseconds of a workspace on a tree, and its first change."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        sandbox = await pool.acquire({}, tree)
        await sandbox.write("package1/module1.py", "VALUE = 0\n")
        times.append(time.perf_counter() - started)
        await sandbox.close()
        await asyncio.sleep(0.005)
    return 1000 * statistics.median(times)


async def fork_depth20_ms(pool: LocalSandboxPool, tree: Tree, count: int = 40) -> float:
    """Median milliseconds of a fork where the tree is twenty snapshots deep."""
    times = []
    async with await pool.acquire({}, tree) as sandbox:
        for number in range(20):
            await sandbox.write(f"package1/new{number}.py", "VALUE = 1\n")
            deep = await sandbox.snapshot()
        for _ in range(count):
            await sandbox.restore(deep)
            await sandbox.write("package2/module2.py", "VALUE = 2\n")
            started = time.perf_counter()
            other = await sandbox.fork()
            times.append(time.perf_counter() - started)
            await other.close()
            await asyncio.sleep(0.005)
    return 1000 * statistics.median(times)


async def mb_at_256(count: int = 256) -> float:
    """MiB that the whole machine has less of while so many sandboxes are there."""
    async with LocalSandboxPool(size=count) as pool:
        before = _available_mb()
        sandboxes = await asyncio.gather(*(pool.acquire({"own.txt": "x" * 10_000}) for _ in range(count)))
        for sandbox in sandboxes:
            assert (await sandbox.run(["true"])).outcome == "ok"
        return before - _available_mb()


def _available_mb() -> float:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) / 1024


async def measure() -> dict[str, float]:
    """All numbers of the contract."""
    cores = len(os.sched_getaffinity(0))
    async with LocalSandboxPool(size=cores) as pool:
        say(f"backend {pool.backend}, {cores} cores")
        results = {"ready_ms": await ready_ms(pool)}
        say(f"ready in {results['ready_ms']:.2f} ms")
        say(f"`ls` started by this process, for comparison: {plain_ms():.2f} ms")
        results["command_ms"] = await command_ms(pool, in_shell)
        say(f"command in {results['command_ms']:.2f} ms; ", end="")
        say(f"one of the shell's own in {await command_ms(pool, lambda sandbox: sandbox.shell('true')):.2f} ms")
        results["commands_per_s"] = await per_second(pool, in_shell, cores)
        say(f"{results['commands_per_s']:.0f} commands/s")
        results["fork_server_per_s"] = await per_second(pool, forked, cores)
        say(f"{results['fork_server_per_s']:.0f} Python test files/s")
        tree = tree_of_many_files(pool)
        results["overlay_ms"] = await overlay_ms(pool, tree)
        say(f"on a tree of 1,400 files in {results['overlay_ms']:.2f} ms")
        results["fork_depth20_ms"] = await fork_depth20_ms(pool, tree)
        say(f"forked in {results['fork_depth20_ms']:.2f} ms, 20 snapshots deep")
    results["mb_at_256"] = await mb_at_256()
    say(f"256 sandboxes take {results['mb_at_256']:.0f} MiB")
    return {name: round(value, 3) for name, value in results.items()}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure())))
