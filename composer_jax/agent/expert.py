"""Scripted experts: policies that make the traces a model is first taught with.

They know the answer and use it with a deliberately imperfect strategy: they give up, do not verify, forget
what they will need, write more than they must. A model that imitates them can do every step, and has a
handful of decisions left that reinforcement learning can improve. An expert is a Session, so the traces come
out of the very same run_episode as everything else.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from composer_jax.agent import summary
from composer_jax.agent.episode import Episode, Limits, run_episode
from composer_jax.agent.summary import REQUESTS, Compaction
from composer_jax.data import chat
from composer_jax.data.chat import ToolCall
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from composer_jax.sampler.session import Sample
from composer_jax.sandbox import SandboxPool
from composer_jax.tasks import bugfix, recall
from composer_jax.tasks.cache import ResultCache
from composer_jax.tasks.functions import statement
from composer_jax.tasks.recall import fact_line
from composer_jax.tasks.splits import constants, seeded
from composer_jax.tasks.task import Task

BOILERPLATE = "This is what was read so far."
Turn = tuple[str, ToolCall]  # what an expert says: a line of thought ("" for none) and one call
Script = Generator[Turn, str, None]  # yields turns, is sent observations; ends with finish


@dataclass(frozen=True)
class BugfixRates:
    """How often the bug-fixing expert does what (probabilities).

    give_up_*: finishes at once, with nothing repaired. wrong_file: reads the other module first;
    give_up_wrong_file: and then gives up. no_op: edits a line into itself. right_fix: the edit is the right
    one. verify: runs the tests after the edit; retry: repairs what the tests still show to be wrong.
    """

    give_up_after_failure: float = 0.25
    give_up_after_reading: float = 0.25
    wrong_file: float = 0.15
    give_up_wrong_file: float = 0.50
    no_op: float = 0.03
    right_fix: float = 0.95
    verify: float = 0.50
    retry: float = 0.70


@dataclass(frozen=True)
class RecallRates:
    """How often the recall expert does what (probabilities; counts where said).

    keep: the needed fact is in the summary of a context that shows the file, as its first fact. max_others:
    most other facts after it (the number is uniform in 0..max_others). boilerplate: the short summary starts
    with a sentence that says nothing. reread: reads the file again when the summary lacks the fact; otherwise
    it guesses. verify: runs the tests after the edit.
    """

    keep: float = 0.50
    max_others: int = 4
    boilerplate: float = 0.50
    reread: float = 0.50
    verify: float = 0.30


@dataclass(frozen=True)
class Rates:
    """The strategies of all experts."""

    bugfix: BugfixRates = field(default_factory=BugfixRates)
    recall: RecallRates = field(default_factory=RecallRates)


def call(name: str, thought: str = "", **arguments: str) -> Turn:
    return thought, ToolCall(name, arguments)


def bugfix_script(task: Task, rates: BugfixRates, rng: random.Random) -> Script:
    """Run the tests, find the function, read it, repair it, perhaps look whether that helped."""
    know = task.metadata
    path, line = know["path"], know["old"]
    thought = f"{know['function']}: {know['comment']}"

    failure = yield call("run_tests")
    if rng.random() < rates.give_up_after_failure:
        yield call("finish")
        return
    yield call("grep", pattern=failure.removeprefix("FAIL ").partition("(")[0])
    if rng.random() < rates.wrong_file:
        yield call("read", path=know["other_path"])
        if rng.random() < rates.give_up_wrong_file:
            yield call("finish")
            return
    yield call("read", path=path)
    if rng.random() < rates.give_up_after_reading:
        yield call("finish")
        return

    fix = know["new"] if rng.random() < rates.right_fix else rng.choice(know["wrong"])
    if rng.random() < rates.no_op:
        fix = line
    if (yield call("edit", thought, path=path, old=line, new=fix)) == "ok":
        line = fix
    if rng.random() < rates.verify:
        report = yield call("run_tests")
        if report.startswith("FAIL") and rng.random() < rates.retry:
            yield call("edit", thought, path=path, old=line, new=know["new"])
            if rng.random() < rates.verify:
                yield call("run_tests")
    yield call("finish")


@dataclass
class Notes:
    """What the recall expert knows in one branch: from the summary it starts with, then from what it does."""

    facts: dict[str, int] = field(default_factory=dict)
    read_conf: bool = False
    read_target: bool = False
    edited: bool = False

    @classmethod
    def of_summary(cls, task: Task, text: str) -> Notes:
        know = task.metadata
        lines = text.split("\n")
        facts = {key: value for key, value in know["facts"].items() if fact_line(key, value) in lines}
        return cls(facts, read_target=f"read {know['path']}" in text, edited="edited" in text)


def recall_script(task: Task, carried: str | None, notes: Notes, rates: RecallRates, rng: random.Random) -> Script:
    """Read the facts, read the target, edit: from wherever the branch starts.

    `carried` is the summary it starts from, None in the first branch. What a turn brings is noted as the turn
    is made, because the request for a summary may come with its answer.
    """
    know = task.metadata
    key = know["key"]
    lost = key not in notes.facts and not notes.edited
    if carried is None or (lost and rng.random() < rates.reread):
        notes.read_conf, notes.facts = True, dict(know["facts"])
        yield call("read", path=know["conf"])
    if not notes.edited:
        if not notes.read_target:
            notes.read_target = True
            yield call("read", path=know["path"])
        notes.edited = True
        if key in notes.facts:
            thought, value = fact_line(key, notes.facts[key]), notes.facts[key]
        else:
            # A guess has no thought: what is written down must be known.
            thought, value = "", rng.choice(constants(task.split, 10, 99))
        yield call("edit", thought, path=know["path"], old=know["old"], new=statement(f"x * {value}"))
        if rng.random() < rates.verify:
            yield call("run_tests")
    yield call("finish")


def recall_summary(task: Task, notes: Notes, style: summary.Style, rates: RecallRates, rng: random.Random) -> str:
    """What the recall expert writes when it is asked for a summary."""
    key = task.metadata["key"]
    kept = [key] if key in notes.facts else []
    if notes.read_conf:
        kept = [key] if rng.random() < rates.keep else []
        others = [k for k in notes.facts if k != key]
        some = rng.sample(others, rng.randint(0, min(rates.max_others, len(others))))
        kept += [k for k in others if k in some]  # in the order of the file
    lines = [fact_line(k, notes.facts[k]) for k in kept]
    return _long_report(task, notes, lines) if style == "long" else _short_summary(notes, lines, rates, rng)


def _short_summary(notes: Notes, lines: list[str], rates: RecallRates, rng: random.Random) -> str:
    if notes.edited:
        lines = ["edited"]  # the facts have served
    if rng.random() < rates.boilerplate or not lines:
        lines = [BOILERPLATE, *lines]
    return "\n".join(lines)


def _long_report(task: Task, notes: Notes, lines: list[str]) -> str:
    know = task.metadata
    done = [f"read {know['conf']}"] + [f"read {know['path']}"] * notes.read_target
    done += [f"edited {know['path']}"] * notes.edited
    todo = "say that all is done" if notes.edited else f"put the value of {know['key']} into it"
    return "\n".join(
        [
            f"Goal: complete {know['function']} in {know['path']} and leave all other code as it is.",
            f"Files: {know['conf']} has the values and some code that is not used.",
            "Facts:",
            *lines,
            f"Done: {', '.join(done)}. No other file was read so far.",
            f"Next: {todo}, and look at the result of each step.",
        ]
    )


class ExpertSession:
    """A scripted policy behind the interface of a sampler: it reads token ids and says token ids.

    Log-probabilities are 0 and versions -1: no weights said this.
    """

    def __init__(self, task: Task, tok: Tokenizer, rates: Rates, rng: random.Random, capacity: int) -> None:
        if task.family not in (bugfix.FAMILY, recall.FAMILY):
            raise UserError(
                f"there is no expert for task family {task.family!r}; use {bugfix.FAMILY} or {recall.FAMILY}"
            )
        self.length = 0
        self.capacity = capacity
        self._task, self._tok, self._rates, self._rng = task, tok, rates, rng
        self._script: Script | None = None
        self._notes = Notes()

    async def sample(self, delta: Sequence[int], *, max_tokens: int) -> Sample:
        content, calls = self._reply(_messages(self._tok, delta), fresh=self.length == 0)
        ids = chat.render_assistant(self._tok, content, calls)
        stop = "end" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        self.length += len(delta) + len(ids)
        return Sample(tokens=ids, logprobs=[0.0] * len(ids), versions=[-1] * len(ids), stop=stop)

    def reset(self) -> None:
        self.length = 0

    def close(self) -> None:
        pass

    def _reply(self, messages: list[str], fresh: bool) -> tuple[str, list[ToolCall]]:
        if fresh:
            # The prompt, and in a later branch the summary below its heading.
            carried = messages[1].partition("\n")[2] if len(messages) > 1 else None
            self._script = self._start(carried)
            thought, tool_call = next(self._script)
            return thought, [tool_call]
        style = next((style for style, text in REQUESTS.items() if text == messages[-1]), None)
        if style is not None:
            return self._summary(style), []
        thought, tool_call = self._script.send(messages[-1])
        return thought, [tool_call]

    def _start(self, carried: str | None) -> Script:
        if self._task.family == bugfix.FAMILY:
            return bugfix_script(self._task, self._rates.bugfix, self._rng)
        self._notes = Notes() if carried is None else Notes.of_summary(self._task, carried)
        return recall_script(self._task, carried, self._notes, self._rates.recall, self._rng)

    def _summary(self, style: summary.Style) -> str:
        if self._task.family == bugfix.FAMILY:
            raise UserError("the bugfix expert writes no summaries; make its traces with compaction.trigger=None")
        return recall_summary(self._task, self._notes, style, self._rates.recall, self._rng)


def _messages(tok: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The texts of the messages in `ids`, without their roles."""
    texts, body = [], []
    for token in ids:
        if token == tok.end:
            texts.append(tok.decode(body))
            body = []
        elif token not in (tok.bos, tok.user, tok.tool, tok.assistant):
            body.append(token)
    return texts


async def make_traces(
    tasks: Sequence[Task],
    compaction_for: Callable[[Task, int], Compaction],
    pool: SandboxPool,
    tok: Tokenizer,
    *,
    limits: Limits,
    seed: int = 0,
    rates: Rates | None = None,
    concurrency: int = 16,
    capacity: int = 1 << 20,
    cache: ResultCache | None = None,
    on_done: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """One expert episode per task, in the order of the tasks: a function of the arguments, not of the timing.

    compaction_for: given the task and its index, how that episode is compacted.
    concurrency: episodes in flight. capacity: tokens a context may hold.
    on_done: called with each episode as it ends, in no particular order.
    """
    rates = rates or Rates()
    slots = asyncio.Semaphore(concurrency)

    async def one(index: int, task: Task) -> Episode:
        async with slots:
            session = ExpertSession(task, tok, rates, seeded("expert", seed, index, task.id), capacity)
            compaction = compaction_for(task, index)
            episode = await run_episode(
                task, session, pool, tok, compaction=compaction, limits=limits, seed=seed, cache=cache
            )
        if on_done is not None:
            on_done(episode)
        return episode

    running = [asyncio.create_task(one(index, task)) for index, task in enumerate(tasks)]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for episode in running:  # when one failed, the others must not go on in the background
            episode.cancel()
