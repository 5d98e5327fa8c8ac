"""Adds a tool that tasks name by import path, and plays an episode that uses it: `python -m examples.add_tool`.

A tool is a name, a description, a JSON schema and an async function of the workspace that returns what the model sees.
The episode is played by a script in place of a model, so the example needs no weights.
"""

import asyncio
from collections.abc import Sequence

from composer_jax.agent.episode import Episode, run_episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.agent.tools import Tool, object_schema
from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.workspace import Workspace
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.sampler.policy import Sample
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.task import Task


async def count_lines(workspace: Workspace, path: str) -> str:
    if path not in workspace.files:
        raise ToolError(f"no such file {path}")  # the model sees the sentence; the episode goes on
    return f"{len(workspace.files[path].splitlines())} lines"


COUNT_LINES = Tool(
    "count_lines",
    "Count the lines of a file.",
    object_schema(("path",), path={"type": "string", "description": "relative path of a file in the workspace"}),
    count_lines,
    read_only=True,
)

TASK = Task(
    id="count-0",
    family="count",
    split="train",
    instruction="Make lines() in answer.py return the number of lines of notes.txt.",
    files={"notes.txt": "one\ntwo\nthree\n", "answer.py": "def lines():\n    return 0\n"},
    tools=("examples.add_tool:COUNT_LINES", "edit", "finish"),
    grader=CaseGrader((Case("answer", "lines", (), 3),)),
)
CALLS = (
    ToolCall("count_lines", {"path": "notes.txt"}),
    ToolCall("edit", {"path": "answer.py", "old": "return 0", "new": "return 3"}),
    ToolCall("finish", {}),
)


class ScriptedSession:
    """A session that samples the same messages, whatever its context is."""

    max_model_len = 10_000

    def __init__(self, messages: Sequence[list[int]]):
        self.messages = iter(messages)

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        tokens = next(self.messages)
        return Sample(tokens, [0.0] * len(tokens), [0] * len(tokens), "stop")

    def close(self) -> None:
        self.messages = iter(())


async def play() -> Episode:
    chat = CompactFormat(Tokenizer.train([TASK.instruction, *TASK.files.values()] * 20, 300))
    session = ScriptedSession([chat.render_assistant("", [call]) for call in CALLS])
    settings = EpisodeSettings(EpisodeLimits(max_turns=4, max_turn_tokens=500, max_episode_tokens=10_000))
    async with LocalSandboxPool(size=1) as pool:
        episode = await run_episode(EpisodeSpec(TASK, 0, Compaction()), session, EpisodeContext(chat, pool, settings))
    for node in episode.transcript.nodes_of_kind("tool"):
        print(chat.text(node.tokens.tolist()).strip())
    print(f"{episode.outcome}, reward {episode.reward}")
    return episode


if __name__ == "__main__":
    asyncio.run(play())
