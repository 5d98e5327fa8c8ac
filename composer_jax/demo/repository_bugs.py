"""Bugs of the bug-fixing family, played with the tools of repositories: for published models, which know such tools.

The workspace is that of composer_jax/demo/bugfix.py. The agent runs `python run_tests.py` in the shell, reads files
with line numbers and edits them by replacement. `RepositoryBugTraces` is an SFT source of an expert without planted
weaknesses, which plays training tasks in sandboxes; its traces are conversations of any chat format.
"""

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_context import EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.demo import bugfix
from composer_jax.demo.played_traces import PlayedTraces, play_with_progress
from composer_jax.errors import UserError
from composer_jax.sampler.policy import Sample
from composer_jax.seeds import hash_seed, seeded_random
from composer_jax.stages.trace_sources import SourceContext
from composer_jax.tasks import visible_cases
from composer_jax.tasks.task import Split, Task

FAMILY = "bugs"
TOOLS = tuple(f"repository/{name}" for name in ("read_file", "edit_file", "shell", "finish"))
INSTRUCTIONS = {
    1: "A function in this folder does not do what the comment below its name says. Find it with `python run_tests.py` "
    "and correct its code.",
    2: "Two functions in this folder do not do what the comments below their names say. Find them with "
    "`python run_tests.py`, which stops at the first, and correct their code.",
}
"""By the number of wrong functions."""
INSTRUCTION_BY_VALUE = (
    "A function in this folder does not do what the comment below its name says. `python run_tests.py` prints a wrong "
    "value and the right one. Find the function and correct its code."
)
RUN_TESTS = "python run_tests.py"
RUN_TESTS_BY_VALUE = visible_cases.RUN_TESTS.replace("{shown} is ", "").replace("{shown} ", "")
"""Text of a run_tests.py that prints values, and not of which call they are."""


class RepositoryBugs:
    """A task family: one function is wrong."""

    name = FAMILY
    bugs = 1

    def generate(self, split: Split, seed: int, index: int) -> Task:
        task = bugfix.generate(split, hash_seed(self.name, seed) % 2**31, index, bugs=self.bugs)
        return dataclasses.replace(
            task,
            id=f"{self.name}-{split}-{seed}-{index}",
            family=self.name,
            tools=TOOLS,
            instruction=INSTRUCTIONS[len(task.metadata["bugs"])],
        )


class TwoRepositoryBugs(RepositoryBugs):
    """A task family: two functions are wrong, of the split "unseen" one. The expert does not play it."""

    name = "two_bugs"
    bugs = 2


class UnnamedRepositoryBugs(RepositoryBugs):
    """A task family: one function is wrong, and the tests do not say which. The expert does not play it."""

    name = "unnamed_bugs"

    def generate(self, split: Split, seed: int, index: int) -> Task:
        task = super().generate(split, seed, index)
        files = {**task.files, "run_tests.py": RUN_TESTS_BY_VALUE}
        return dataclasses.replace(task, files=files, instruction=INSTRUCTION_BY_VALUE)


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


class RepositoryBugTraces(PlayedTraces):
    """A ConversationSource (stages/trace_sources.py): expert episodes, played once per run and kept in DIR/data.

    count: number of training tasks, none of which RL sees. first: number of the first of them in their stream.
    """

    def __init__(self, context: SourceContext, count: int, first: int = 0):
        super().__init__(context, "repository_bugs.npz")
        self.numbers = range(first, first + count)

    def report(self) -> Mapping[str, Any]:
        """Returns {"expert_reward": {"bugs": mean reward}}."""
        with np.load(self.path) as file:
            return {"expert_reward": {FAMILY: float(file["reward"])}}

    @property
    def system_prompt(self) -> str:
        """The system message of the episodes."""
        return self.context.agent.system_prompt

    def play(self) -> list[tuple[Task, Episode]]:
        """See PlayedTraces.play."""
        agent, seed, chat, family = self.context.agent, self.context.seed, self.context.chat, RepositoryBugs()
        limits = dataclasses.replace(agent.limits, max_episode_tokens=1 << 20, max_turn_tokens=1 << 20, max_turns=100)
        compaction = agent.compaction("none", "agent.compactions")
        tasks = [family.generate("train", hash_seed("sft", seed) % 2**31, i) for i in self.numbers]
        scripts = [expert_turns(task, seeded_random("expert", seed, task.id)) for task in tasks]
        jobs = [
            (EpisodeSpec(task, 0, compaction), ScriptedSession(turns, chat, max_model_len=1 << 20))
            for task, turns in zip(tasks, scripts, strict=True)
        ]
        episodes = play_with_progress(jobs, chat, EpisodeSettings(limits, self.system_prompt), agent.concurrency)
        return list(zip(tasks, episodes, strict=True))

    def mean_rewards(self, episodes: list[Episode]) -> dict[str, np.float32]:
        """See PlayedTraces.mean_rewards."""
        return {"reward": np.float32(np.mean([e.reward for e in episodes if e.reward is not None]))}
