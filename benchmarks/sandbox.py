"""How fast sandboxes are: `python -m benchmarks.sandbox`.

Prints progress on stderr and, as the last line of stdout, one JSON object:
    ready_ms            making one sandbox, from the order to the worker's first word, nothing prepared (median)
    command_ms          one `true` in a sandbox that is there, seen from the host (median)
    commands_per_s      `true` in as many sandboxes as there are cores, at once
    fork_server_per_s   a small Python test file in as many sandboxes as there are cores, at once
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence

from composer_jax.sandbox import Sandbox, SandboxPool

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


def say(text: str) -> None:
    """Progress for people."""
    print(text, file=sys.stderr, flush=True)


async def ready_ms(pool: SandboxPool, count: int = 60) -> float:
    """Median milliseconds from ordering a sandbox to its first word, one at a time."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        sandbox = pool._order()  # past the ones that wait ready
        await sandbox.ready(20.0)
        times.append(time.perf_counter() - started)
        await sandbox.close()
        await asyncio.sleep(0.005)  # its end is not a part of the next one's beginning
    return 1000 * statistics.median(times)


async def command_ms(pool: SandboxPool, argv: Sequence[str], count: int = 200) -> float:
    """Median milliseconds of one command."""
    times = []
    async with await pool.acquire(FILES) as sandbox:
        for _ in range(count):
            started = time.perf_counter()
            result = await sandbox.run(argv)
            times.append(time.perf_counter() - started)
            assert result.outcome == "ok", result
    return 1000 * statistics.median(times)


async def per_second(pool: SandboxPool, argv: Sequence[str], at_once: int) -> float:
    """Commands per second in `at_once` sandboxes: median over rounds."""

    async def work(sandbox: Sandbox, end: float) -> int:
        done = 0
        while time.perf_counter() < end:
            result = await sandbox.run(argv)
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


async def measure() -> dict[str, float]:
    """All numbers of the contract."""
    cores = len(os.sched_getaffinity(0))
    async with SandboxPool(size=cores) as pool:
        say(f"backend {pool.backend}, {cores} cores")
        results = {"ready_ms": await ready_ms(pool)}
        say(f"ready in {results['ready_ms']:.2f} ms")
        results["command_ms"] = await command_ms(pool, ["true"])
        say(f"command in {results['command_ms']:.2f} ms")
        results["commands_per_s"] = await per_second(pool, ["true"], cores)
        say(f"{results['commands_per_s']:.0f} commands/s")
        results["fork_server_per_s"] = await per_second(pool, ["python", "test_stack.py"], cores)
        say(f"{results['fork_server_per_s']:.0f} Python test files/s")
    return {name: round(value, 3) for name, value in results.items()}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure())))
