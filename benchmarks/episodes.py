"""Many episodes while sandboxes crash: `python -m benchmarks.episodes [--episodes=2000] [--crashes=0.05]`.

A scripted agent repairs a small repository with the repository tools: it searches, tests in the shell, edits, tests
again and finishes. Meanwhile processes that are sandboxes are killed from outside, at moments that have nothing to do
with what the agent does. Every episode must end in exactly one event, none may be scored for what a crash did, and
nothing may be left: no process, no mount, no folder. Prints progress on stderr and, as the last line of stdout, one
JSON object:
    episodes, events    asked for, and reported as done; each once, or it says which
    crashes             sandboxes killed
    infrastructure      episodes given up because their sandboxes died again and again (not scored)
    solved              episodes with reward 1
    stray               processes, mounts and folders that are left
    episodes_per_s
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from composer_jax.agent.episode import Episode, Limits
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat import ToolCall
from composer_jax.data.chat_compact import CompactFormat
from composer_jax.data.chat_format import ChatFormat
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.observe.progress import Progress
from composer_jax.rl.rollout import Environment, Job, roll_out
from composer_jax.sampler.policy import Sample, SamplingParams
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.result_cache import ResultCache
from composer_jax.tasks.task import Task

AT_ONCE = 16
FILES = {
    "shop/__init__.py": "",
    "shop/price.py": "def total(prices, discount=0):\n    return sum(prices) + discount\n",
    "shop/stock.py": "def left(stock, sold):\n    return {name: n - sold.get(name, 0) for name, n in stock.items()}\n",
    "check.py": "from shop.price import total\n\nassert total([1, 2], 1) == 2\n",
}
CASES = (Case("shop.price", "total", ([3, 4], 2), 5), Case("shop.stock", "left", ({"a": 3}, {"a": 1}), {"a": 2}))
SCRIPT = (
    ToolCall("semantic_search", {"query": "total of prices with a discount"}),
    ToolCall("shell", {"command": "cd shop && python -c 'import price; print(price.total([1], 1))'"}),
    ToolCall("edit_file", {"path": "shop/price.py", "old": "+ discount", "new": "- discount"}),
    ToolCall("shell", {"command": "cd /workspace && python check.py && echo passed > report.txt"}),
    ToolCall("read_file", {"path": "report.txt"}),
    ToolCall("finish", {}),
)


class Scripted:
    """A session that says the same messages in every episode."""

    capacity = 100_000

    def __init__(self, chat: ChatFormat):
        self.messages = iter([chat.render_assistant("", [call]) for call in SCRIPT])
        self.length = 0

    async def sample(self, delta: Sequence[int], params: SamplingParams) -> Sample:
        """The next message."""
        tokens = next(self.messages)
        self.length += len(delta) + len(tokens)
        return Sample(tokens, [0.0] * len(tokens), [0] * len(tokens), "stop")

    def reset(self) -> None:
        """Nothing is summarised here."""
        raise AssertionError("an episode was compacted")

    def close(self) -> None:
        """Whoever asks after the end gets nothing."""
        self.messages = iter(())


class ScriptedSampler:
    """Sessions for as many episodes at once as a sampler would have slots."""

    busy_seconds = 0.0
    decoded_tokens = 0

    def __init__(self, chat: ChatFormat, slots: int):
        self.chat, self.slots = chat, asyncio.Semaphore(slots)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """It is always ready."""
        yield

    async def open(self, seed: int) -> Scripted:
        """A session, when a slot is free."""
        await self.slots.acquire()
        session = Scripted(self.chat)
        session.close = self.slots.release
        return session


def workers_of(pool: LocalSandboxPool) -> list[int]:
    """The processes, on the host, that are sandboxes of the pool."""
    pid, words = pool._spawner._process.pid, b""
    while b"inside/start.py" not in words or b"--clearenv" in words:  # launcher, bubblewrap, bubblewrap, zygote
        pid = _children(pid)[0]
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    return _children(pid)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def crash(pool: LocalSandboxPool, rng: random.Random) -> int:
    """Kills one of the sandboxes, whatever it is doing; how many died."""
    try:
        os.kill(rng.choice(workers_of(pool)), signal.SIGKILL)
    except (IndexError, OSError):  # just now there is none, or it has ended
        return 0
    return 1


def left_behind(folder: Path, before: list[str]) -> list[str]:
    """What this process's sandboxes left: processes that came from here, mounts, folders."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    strays = [f"mount {line}" for line in mounts if line not in before and "composer" in line]
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                strays.append(f"process {entry.name}")
    return strays + [f"folder {path}" for path in folder.iterdir() if path.name != "repository"]


async def measure(episodes: int, share: float, folder: Path) -> dict[str, object]:
    """Plays all episodes. folder: an empty one, for everything that sandboxes need."""
    repository = folder / "repository"
    for path, text in FILES.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
    chat = CompactFormat(Tokenizer.train([json.dumps(call.arguments) for call in SCRIPT] * 50, 400))
    tasks = [
        Task(
            f"shop-{n}", "shop", "train", "Repair it.", {}, ("repository/*",), CaseGrader(CASES), repository=repository
        )
        for n in range(episodes)
    ]
    jobs = [Job(task, n, Compaction()) for n, task in enumerate(tasks)]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    rng, crashes, owed, events = random.Random(0), 0, 0.0, Counter()
    results: list[Episode] = []
    started = time.monotonic()
    async with LocalSandboxPool(size=AT_ONCE) as pool:
        with Progress(episodes, "episodes", "play") as progress:

            def done(episode: Episode) -> None:
                nonlocal owed
                events[episode.task_id] += 1
                owed += share
                results.append(episode)
                progress.update()

            async def break_things() -> None:
                nonlocal crashes, owed
                while True:
                    await asyncio.sleep(rng.uniform(0.001, 0.02))
                    if owed >= 1:
                        killed = crash(pool, rng)
                        crashes, owed = crashes + killed, owed - killed

            breaking = asyncio.create_task(break_things())
            limits = Limits(max_turns=len(SCRIPT) + 1, max_turn_tokens=2000, max_episode_tokens=100_000)
            environment = Environment(chat, pool, limits, ResultCache())
            try:
                await roll_out(jobs, ScriptedSampler(chat, AT_ONCE), environment, done)
            finally:
                breaking.cancel()
    seconds = time.monotonic() - started
    wrong = {task.id: events[task.id] for task in tasks if events[task.id] != 1}
    return {
        "episodes": episodes,
        "events": sum(events.values()),
        "not_once": wrong,
        "crashes": crashes,
        "infrastructure": sum(episode.reward is None for episode in results),
        "solved": sum(episode.reward == 1.0 for episode in results),
        "stray": left_behind(folder, mounts),
        "episodes_per_s": round(episodes / seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--crashes", type=float, default=0.05, help="sandboxes killed per episode")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="composer-episodes-") as folder:
        tempfile.tempdir = folder  # everything that pools make
        result = asyncio.run(measure(arguments.episodes, arguments.crashes, Path(folder)))
    print(json.dumps(result))
    sys.exit(bool(result["not_once"] or result["stray"]))


if __name__ == "__main__":
    main()
