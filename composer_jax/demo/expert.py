"""Scripted experts: policies that play the traces of SFT.

An expert acts as well as it can with what it knows; no weakness is planted. What is left to reinforcement learning is
what no expert knows: whose notes are right, what the end of a memory chain asks for, and what a message costs. An
expert is a Session, so run_episode plays its traces like every other episode.
"""

import random
from collections.abc import Sequence

from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.demo import bugfix, memory_chain
from composer_jax.demo.bugfix_expert import bugfix_script, notes_script
from composer_jax.demo.lookups import ANSWER_FILE, LOOKUPS, UNKNOWN
from composer_jax.demo.memory_chain import quoted
from composer_jax.demo.memory_chain_expert import ChainNotes, chain_script, chain_summary
from composer_jax.demo.notes import OneBug, ThreeBugs, TwoBugs
from composer_jax.demo.played_traces import Job
from composer_jax.demo.prompts import REQUESTS, Style
from composer_jax.demo.slips import ExpertTurn, Script
from composer_jax.errors import UserError
from composer_jax.sampler.policy import Sample
from composer_jax.seeds import seeded_random
from composer_jax.tasks.task import Task

WITH_NOTES = (OneBug.FAMILY, TwoBugs.FAMILY, ThreeBugs.FAMILY)
FAMILIES = (bugfix.FAMILY, *WITH_NOTES, memory_chain.FAMILY, *LOOKUPS)
"""Task families that have an expert."""
SIDE_BY_SIDE = 0.5
"""Probability that the expert of lookups reads a file in the message of the file before it."""


class ExpertSession:
    """A scripted policy behind the interface of a sampler: token ids in, token ids out.

    Log-probabilities are 0 and versions -1, because no weights sampled these tokens.
    """

    max_model_len = 1 << 20

    def __init__(self, task: Task, tok: Tokenizer, rng: random.Random) -> None:
        if task.family not in FAMILIES:
            raise UserError(f"there is no expert for task family {task.family!r}; use {' or '.join(FAMILIES)}")
        self._task, self._tok, self._rng = task, tok, rng
        self._script: Script | None = None
        self._branch = 0
        self._chain_notes = ChainNotes()

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        if branch != self._branch:
            self._script, self._branch = None, branch
        messages = message_texts(self._tok, context)
        style: Style | None = next((style for style, text in REQUESTS.items() if text == messages[-1]), None)
        if style is not None:
            turn, ids = None, CompactFormat(self._tok).render_assistant(self._summary(style), [])
        else:
            turn = self._turn(messages)
            ids = CompactFormat(self._tok).render_assistant(turn.thought, [turn.call, *turn.more])
            if turn.cut:
                ids = [*ids[: -1 - self._rng.randint(1, 8)], self._tok.end]
        finish_reason = "stop" if len(ids) <= params.max_tokens else "length"
        ids = ids[: params.max_tokens]
        return Sample(
            tokens=ids,
            logprobs=[0.0] * len(ids),
            versions=[-1] * len(ids),
            finish_reason=finish_reason,
            trained=turn is None or not turn.slip,
        )

    def close(self) -> None:
        pass

    def _turn(self, messages: list[str]) -> ExpertTurn:
        if self._script is not None:
            return self._script.send(messages[-1])
        # The messages are the prompt and, in a later branch, the summary below its heading.
        carried = messages[1].partition("\n")[2] if len(messages) > 1 else None
        self._script = self._start(carried)
        return next(self._script)

    def _start(self, carried: str | None) -> Script:
        if self._task.family == bugfix.FAMILY:
            return bugfix_script(self._task, self._rng)
        if self._task.family in WITH_NOTES:
            return notes_script(self._task, self._rng)
        if self._task.family in LOOKUPS:
            return _lookup_script(self._task, self._rng)
        self._chain_notes = ChainNotes.of_summary(self._task, carried)
        return chain_script(self._task, self._chain_notes, self._rng)

    def _summary(self, style: Style) -> str:
        if self._task.family != memory_chain.FAMILY:
            raise UserError(
                f"the expert of {self._task.family} writes no summaries; make its traces with compaction.trigger=None"
            )
        return chain_summary(self._task, self._chain_notes, style, self._rng)


def _lookup_script(task: Task, rng: random.Random) -> Script:
    """Reads the files in the order of the instruction, and answers. A message costs this expert nothing."""
    messages: list[list[ToolCall]] = []
    for path in task.metadata["paths"]:
        if not messages or rng.random() >= SIDE_BY_SIDE:
            messages.append([])
        messages[-1].append(ToolCall("read", {"path": path}))
    for first, *more in messages:
        yield ExpertTurn("", first, more=tuple(more))
    edit = ToolCall("edit", {"path": ANSWER_FILE, "old": UNKNOWN, "new": quoted(task.metadata["answer"])})
    yield ExpertTurn("", edit, more=(ToolCall("finish", {}),))


def message_texts(tok: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns the texts of the messages in `ids`, without their roles."""
    texts, body = [], []
    for token in ids:
        if token == tok.end:
            texts.append(tok.decode(body))
            body = []
        elif token not in (tok.bos, tok.user, tok.tool, tok.assistant):
            body.append(token)
    return texts


def expert_jobs(tasks: Sequence[Task], compactions: Sequence[Compaction], tok: Tokenizer, seed: int) -> list[Job]:
    """Returns one job per task, which the expert plays with the compaction at the same index."""
    return [
        (
            EpisodeSpec(task, seed, compaction),
            ExpertSession(task, tok, seeded_random("expert", seed, index, task.id)),
        )
        for index, (task, compaction) in enumerate(zip(tasks, compactions, strict=True))
    ]
