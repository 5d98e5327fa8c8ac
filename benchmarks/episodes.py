"""Many episodes while sandboxes crash: `python -m benchmarks.episodes [--episodes=2000] [--crashes=0.05]`.

A scripted agent repairs a small repository with the repository tools: it searches, tests in the shell, edits, tests
again and finishes. At random moments the benchmark kills worker processes of sandboxes. Every episode must end in
exactly one event, one crash under a command may not affect a score, and no process, mount or folder may be left. Prints
progress on stderr and, as the last line of stdout, one JSON object:
    episodes, events    number requested, and number of events
    not_once            {task id: events} of tasks with another number of events than one
    crashes             sandboxes killed
    infrastructure      episodes given up because their sandboxes died in every attempt (not scored)
    killed_sandbox      episodes in which crashes hit the same command twice, which is taken for their doing (reward 0)
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
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.observe.progress import Progress
from composer_jax.rl.rollout import roll_out
from composer_jax.sampler.policy import Sample
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


class ScriptedSession:
    """A session that samples the messages of SCRIPT, whatever its context is."""

    max_model_len = 100_000

    def __init__(self, chat: ChatFormat, free_slot: Callable[[], None]):
        self.messages = iter([chat.render_assistant("", [call]) for call in SCRIPT])
        self.free_slot = free_slot

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        assert not branch, "an episode was compacted, although its limits leave room for every message"
        tokens = next(self.messages)
        return Sample(tokens, [0.0] * len(tokens), [0] * len(tokens), "stop")

    def close(self) -> None:
        self.free_slot()


class ScriptedPolicy:
    """A policy with a limited number of open sessions."""

    def __init__(self, chat: ChatFormat, slots: int):
        self.chat, self.slots = chat, asyncio.Semaphore(slots)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def open(self, seed: int) -> ScriptedSession:
        await self.slots.acquire()
        return ScriptedSession(self.chat, self.slots.release)


def sandbox_workers(pid: int | None = None) -> list[int]:
    """Process ids, on the host, of all sandboxes of a process (None: this one)."""
    workers: list[int] = []
    for child in _children(os.getpid() if pid is None else pid):
        with contextlib.suppress(OSError):  # the process has ended
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            is_zygote = b"inside/start.py" in command and b"--clearenv" not in command  # not bubblewrap around it
            workers += _children(child) if is_zygote else sandbox_workers(child)
    return workers


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


def kill_worker(rng: random.Random) -> bool:
    """Kills the worker of a random sandbox; False if there was none, or it had ended."""
    try:
        os.kill(rng.choice(sandbox_workers()), signal.SIGKILL)
    except (IndexError, OSError):
        return False
    return True


def left_behind(folder: Path, before: list[str]) -> list[str]:
    """Processes and mounts that the sandboxes of `folder` left, and what is in it besides the repository.

    before: the lines of /proc/self/mounts before the run.
    """
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    leftovers = [f"mount {line}" for line in mounts if line not in before and "composer" in line]
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # the process has ended
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                leftovers.append(f"process {entry.name}")
    return leftovers + [f"folder {path}" for path in folder.iterdir() if path.name != "repository"]


async def measure(episodes: int, crashes_per_episode: float, folder: Path) -> dict[str, object]:
    """Plays all episodes and returns the printed object. folder: an empty one, for the repository and the sandboxes."""
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
    jobs = [EpisodeSpec(task, n, Compaction()) for n, task in enumerate(tasks)]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    rng, crashes, owed, events = random.Random(0), 0, 0.0, Counter()
    results: list[Episode] = []
    started = time.monotonic()
    async with LocalSandboxPool(size=AT_ONCE) as pool:
        with Progress(episodes, "episodes", "play") as progress:

            def done(episode: Episode) -> None:
                nonlocal owed
                events[episode.task_id] += 1
                owed += crashes_per_episode
                results.append(episode)
                progress.update()

            async def crash_sandboxes() -> None:
                nonlocal crashes, owed
                while True:
                    await asyncio.sleep(rng.uniform(0.001, 0.02))
                    if owed >= 1:
                        killed = kill_worker(rng)
                        crashes, owed = crashes + killed, owed - killed

            crashing = asyncio.create_task(crash_sandboxes())
            limits = EpisodeLimits(max_turns=len(SCRIPT) + 1, max_turn_tokens=2000, max_episode_tokens=100_000)
            context = EpisodeContext(chat, pool, EpisodeSettings(limits), ResultCache())
            try:
                await roll_out(jobs, ScriptedPolicy(chat, AT_ONCE), context, done)
            finally:
                crashing.cancel()
    seconds = time.monotonic() - started
    not_once = {task.id: events[task.id] for task in tasks if events[task.id] != 1}
    return {
        "episodes": episodes,
        "events": sum(events.values()),
        "not_once": not_once,
        "crashes": crashes,
        "infrastructure": sum(episode.reward is None for episode in results),
        "killed_sandbox": sum(episode.outcome == "killed_sandbox" for episode in results),
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
        tempfile.tempdir = folder  # pools make their folders there
        result = asyncio.run(measure(arguments.episodes, arguments.crashes, Path(folder)))
    print(json.dumps(result))
    sys.exit(bool(result["not_once"] or result["stray"]))


if __name__ == "__main__":
    main()
