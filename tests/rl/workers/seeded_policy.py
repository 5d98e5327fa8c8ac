"""A Policy whose messages are functions of seed, branch and length of the context, and episodes that it plays."""

import asyncio
import contextlib
import random

from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.demo import bugfix
from composer_jax.rl.workers.worker_setup import WorkerSetup
from composer_jax.sampler.policy import Sample
from composer_jax.seeds import hash_seed

TASK = bugfix.generate("train", 0, 5, bugs=1)
(BUG,) = TASK.metadata["bugs"]
CALLS = [
    ToolCall("run_tests", {}),
    ToolCall("read", {"path": BUG["path"]}),
    ToolCall("edit", {"path": BUG["path"], "old": BUG["old"], "new": BUG["new"]}),
    ToolCall("finish", {}),
]
TOKENIZER = Tokenizer.train(
    [TASK.instruction, *TASK.files.values(), "edit read finish run_tests path old new"] * 20, 400
)
CHAT = CompactFormat(TOKENIZER)


def specs(n: int) -> list[EpisodeSpec]:
    """n episodes of one task; about half of them summarize their context on the way."""
    return [
        EpisodeSpec(TASK, 1000 + i, Compaction(260, max_segments=3) if i % 2 else Compaction(None)) for i in range(n)
    ]


def worker_setup(folder, **options) -> WorkerSetup:
    """What workers need for these episodes; the tokenizer travels through a file in `folder`."""
    path = folder / "tokenizer.json"
    TOKENIZER.save(path)
    return WorkerSetup({"tokenizer.json": path.read_text(encoding="utf-8")}, "compact", **options)


class SeededSession:
    def __init__(self, policy, seed):
        self.policy, self.seed, self.max_model_len, self.closed = policy, seed, 4096, False

    async def sample(self, context, params, branch=0):
        assert not self.closed
        self.policy.samples.append((self.seed, branch, len(context)))
        if len(context) > self.policy.pause_after:
            self.policy.waiting += 1
            try:
                await self.policy.gate.wait()
            finally:
                self.policy.waiting -= 1
        if self.policy.error is not None:
            raise self.policy.error
        rng = random.Random(hash_seed(self.seed, branch, list(context)))
        tokens = CHAT.render_assistant("", [rng.choice(CALLS)])[: params.max_tokens]
        logprobs = [-rng.expovariate(1.0) for _ in tokens]
        return Sample(tokens, logprobs, [rng.randrange(5) for _ in tokens], "stop", cached=len(context) // 2)

    def close(self):
        assert not self.closed
        self.closed = True
        self.policy.open_sessions -= 1
        self.policy.free.release()


class SeededPolicy:
    """Samples of contexts longer than `pause_after` wait until `gate` is set; then `error`, if any, is raised.

    waiting: number of samples that wait.
    """

    def __init__(self, pause_after=1 << 20, slots=1000):
        self.pause_after, self.slots, self.error = pause_after, slots, None
        self.busy_seconds, self.decoded_tokens, self.open_sessions = 0.0, 0, 0
        self.waiting = 0
        self.seeds, self.samples = [], []

    @contextlib.asynccontextmanager
    async def serving(self):
        self.gate, self.free = asyncio.Event(), asyncio.Semaphore(self.slots)
        yield self
        assert self.open_sessions == 0, "an episode has left its session open"

    async def open(self, seed):
        await self.free.acquire()
        self.open_sessions += 1
        self.seeds.append(seed)
        return SeededSession(self, seed)


async def until(condition, seconds=60.0):
    """Waits until condition() holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
