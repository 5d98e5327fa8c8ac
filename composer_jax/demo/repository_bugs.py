"""Bugs of the bug-fixing family, played with the tools of repositories: for published models, which know such tools.

The workspace is that of composer_jax/demo/bugfix.py. The agent runs `python run_tests.py` in the shell, reads files
with line numbers and edits them by replacement. `RepositoryBugTraces` is an SFT source of an expert without planted
weaknesses, which plays training tasks in sandboxes; its traces are conversations of any chat format.
"""

import asyncio
import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.agent.episode import Episode, run_episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.atomic_write import open_atomically
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.token_source import Trace
from composer_jax.demo import bugfix
from composer_jax.errors import UserError
from composer_jax.event_loop import EventLoop
from composer_jax.observe.progress import Progress
from composer_jax.sampler.policy import Sample
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.seeds import hash_seed, seeded_random
from composer_jax.stages.trace_sources import SourceContext
from composer_jax.tasks.task import Split, Task

FAMILY = "bugs"
TOOLS = tuple(f"repository/{name}" for name in ("read_file", "edit_file", "shell", "finish"))
INSTRUCTION = (
    "A function in this folder does not do what the comment below its name says. Find it with `python run_tests.py` "
    "and correct its code."
)
RUN_TESTS = "python run_tests.py"


class RepositoryBugs:
    """The task family of this file."""

    def generate(self, split: Split, seed: int, index: int) -> Task:
        task = bugfix.generate(split, hash_seed(FAMILY, seed) % 2**31, index, bugs=1)
        return dataclasses.replace(
            task, id=f"{FAMILY}-{split}-{seed}-{index}", family=FAMILY, tools=TOOLS, instruction=INSTRUCTION
        )


def expert_turns(task: Task, rng: random.Random) -> Iterator[tuple[str, ToolCall]]:
    """Yields the text and the call of every turn of a complete repair; the wording varies with `rng`."""
    know = task.metadata["bugs"][0]
    path, name, comment = know["path"], know["function"], know["head"].partition("# ")[2].strip()
    yield rng.choice(("I run the tests.", "First I run the tests.")), ToolCall("shell", {"command": RUN_TESTS})
    yield f"{name} is wrong. I look for it.", ToolCall("shell", {"command": f"grep -n 'def {name}' *.py"})
    yield f"It is in {path}.", ToolCall("read_file", {"path": path})
    yield (
        f"{name} should return: {comment}. I correct its code.",
        ToolCall("edit_file", {"path": path, "old": know["old"], "new": know["new"]}),
    )
    yield "I run the tests again.", ToolCall("shell", {"command": RUN_TESTS})
    yield rng.choice(("All tests pass.", "The tests pass now.")), ToolCall("finish", {})


class ScriptedSession:
    """A Session (sampler/policy.py) that says the turns of a script, whatever the observations are.

    Log-probabilities are 0 and versions -1, because no weights sampled these tokens.
    """

    def __init__(self, turns: Iterator[tuple[str, ToolCall]], chat: ChatFormat, max_model_len: int):
        self.max_model_len = max_model_len
        self._turns, self._chat, self._calls = turns, chat, 0

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        if branch:
            raise UserError("the expert of repository bugs writes no summaries; make its traces without compaction.")
        content, call = next(self._turns)
        ids = self._chat.render_assistant(content, [call], calls_before=self._calls)[: params.max_tokens]
        self._calls += 1
        reason = "stop" if ids[-1] in self._chat.end_tokens else "length"
        return Sample(ids, [0.0] * len(ids), [-1] * len(ids), reason)

    def close(self) -> None:
        self._turns = iter(())


class RepositoryBugTraces:
    """A ConversationSource (stages/trace_sources.py): expert episodes, played once per run and kept in DIR/data.

    count: number of training tasks, none of which RL sees.
    """

    def __init__(self, context: SourceContext, count: int):
        self.context, self.count = context, count
        self.path = context.folder / "repository_bugs.npz"

    def traces(self) -> list[Trace]:
        """Returns (tokens int32 [n], trained bool [n]) of every episode. Process 0 plays them."""
        with np.load(self.context.make_shared(self._write)) as file:
            ends = np.cumsum(file["lengths"])[:-1]
            return list(zip(np.split(file["tokens"], ends), np.split(file["trained"], ends), strict=True))

    def report(self) -> Mapping[str, Any]:
        """Returns {"expert_reward": {"bugs": mean reward}}."""
        with np.load(self.path) as file:
            return {"expert_reward": {FAMILY: float(file["reward"])}}

    @property
    def system_prompt(self) -> str:
        """The system message of the episodes."""
        return self.context.agent.system_prompt

    def play(self) -> list[tuple[Task, Episode]]:
        """Plays the expert on `count` tasks, in sandboxes, with a progress bar; returns tasks and their episodes."""
        agent, seed, family = self.context.agent, self.context.seed, RepositoryBugs()
        limits = dataclasses.replace(agent.limits, max_episode_tokens=1 << 20, max_turn_tokens=1 << 20, max_turns=100)
        settings = EpisodeSettings(limits, self.system_prompt)
        compaction = agent.compaction("none", "agent.compactions")
        tasks = [family.generate("train", hash_seed("sft", seed) % 2**31, i) for i in range(self.count)]

        async def play_all(progress: Progress) -> list[tuple[Task, Episode]]:
            slots = asyncio.Semaphore(agent.concurrency)

            async def one(task: Task, context: EpisodeContext) -> Episode:
                async with slots:
                    turns = expert_turns(task, seeded_random("expert", seed, task.id))
                    session = ScriptedSession(turns, context.chat, max_model_len=1 << 20)
                    episode = await run_episode(EpisodeSpec(task, 0, compaction), session, context)
                progress.update(1)
                return episode

            async with LocalSandboxPool(size=agent.concurrency) as pool, asyncio.TaskGroup() as group:
                context = EpisodeContext(self.context.chat, pool, settings)
                running = [group.create_task(one(task, context)) for task in tasks]
            return [(task, episode.result()) for task, episode in zip(tasks, running, strict=True)]

        with EventLoop() as loop, Progress(self.count, "trace", "expert traces") as progress:
            return loop.run(play_all(progress))

    def _write(self) -> Path:
        if self.path.exists():
            return self.path
        episodes = [episode for _, episode in self.play()]
        rows = [row for episode in episodes for row in episode.transcript.rows()]
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        with open_atomically(self.path) as file:
            np.savez_compressed(
                file,
                tokens=np.concatenate([row.tokens for row in rows]),
                trained=np.concatenate([row.trained for row in rows]),
                lengths=np.array([len(row.tokens) for row in rows], np.int32),
                reward=np.float32(np.mean(rewards)),
            )
        return self.path
