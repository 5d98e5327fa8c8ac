"""Scripted experts: policies that make the traces a model is first taught with.

They know the answer and use it with a deliberately imperfect strategy: they give up, do not verify, forget
what they will need, write more than they must. A model that imitates them can do every step, and has a
handful of decisions left that reinforcement learning can improve.

They also make slips, as a model does: a path that does not exist, a line copied wrong, a call cut short, a
repair that is none. A slip is in the trace but never a target, so a model learns to recover from it and not to
make it. An expert is a Session, so the traces come out of the very same run_episode as everything else.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

from composer_jax.agent import summary
from composer_jax.agent.episode import Episode, Limits, run_episode
from composer_jax.agent.summary import REQUESTS, Compaction
from composer_jax.data import chat
from composer_jax.data.chat import ToolCall
from composer_jax.data.chat_compact import CompactFormat
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.demo import bugfix, recall
from composer_jax.demo.functions import LARGEST, SMALLEST, statement
from composer_jax.demo.recall import fact_line
from composer_jax.demo.splits import constants, file_stems, function_names
from composer_jax.errors import UserError
from composer_jax.sampler.policy import Sample, SamplingParams
from composer_jax.sandbox import SandboxPool
from composer_jax.seeds import seeded_random
from composer_jax.tasks.grading.cases import is_submitted
from composer_jax.tasks.result_cache import ResultCache
from composer_jax.tasks.task import Task

BOILERPLATE = "This is what was read so far."


@dataclass(frozen=True)
class Turn:
    """What an expert says: a line of thought ("" for none) and one call. A slip is not to be imitated.

    cut: the message stops in the middle of the call.
    """

    thought: str
    call: ToolCall
    slip: bool = False
    cut: bool = False


Script = Generator[Turn, str, None]  # yields turns, is sent observations; ends with finish


@dataclass(frozen=True)
class BugfixRates:
    """How often the bug-fixing expert does what (probabilities).

    give_up_*: finishes at once, with nothing repaired. right_fix: the edit is the right one; another one is a
    slip. verify: runs the tests after an edit; retry: repairs what they still show to be wrong; reread: looks at
    the file before that. slip: how often a grep, a read or an edit goes wrong first, and then again.
    """

    give_up_after_failure: float = 0.35
    give_up_after_reading: float = 0.35
    right_fix: float = 0.80
    verify: float = 0.50
    retry: float = 0.80
    reread: float = 0.30
    slip: float = 0.12


@dataclass(frozen=True)
class RecallRates:
    """How often the recall expert does what (probabilities; counts where said).

    keep: the needed fact is in the summary of a context that shows the file, as its first fact. max_others:
    most other facts after it (the number is uniform in 0..max_others). boilerplate: the short summary starts
    with a sentence that says nothing. reread: reads the file again when the summary lacks the fact; otherwise
    it guesses. verify: runs the tests after the edit. slip: how often a read or an edit goes wrong first.
    """

    keep: float = 0.50
    max_others: int = 4
    boilerplate: float = 0.50
    reread: float = 0.50
    verify: float = 0.30
    slip: float = 0.08


@dataclass(frozen=True)
class Rates:
    """The strategies of all experts."""

    bugfix: BugfixRates = field(default_factory=BugfixRates)
    recall: RecallRates = field(default_factory=RecallRates)


def call(name: str, thought: str = "", **arguments: str) -> Turn:
    return Turn(thought, ToolCall(name, arguments))


def slips(turn: Turn, task: Task, rate: float, rng: random.Random) -> Script:
    """Some ways (often none) to get `turn` wrong, each of which leaves the workspace as it is.

    None of them shows a file: whoever asks for a summary after one has learned nothing new.
    """
    name = turn.call.name
    while rng.random() < rate:
        if name == "grep":
            slip = replace(turn, call=ToolCall(name, {"pattern": rng.choice(function_names(task.split))}))
        elif name == "read":
            missing = [stem for stem in rng.sample(file_stems(task.split), 3) if f"{stem}.py" not in task.files]
            slip = replace(turn, call=ToolCall(name, {"path": f"{missing[0]}.py"}))
        else:
            slip = rng.choice([replace(turn, cut=True), *_failing_edits(turn, task, rng)])
        yield replace(slip, slip=True)


def _failing_edits(turn: Turn, task: Task, rng: random.Random) -> list[Turn]:
    """Edits that are nearly `turn` and that the tool refuses."""
    right = turn.call.arguments
    others = [path for path in task.files if is_submitted(path) and path != right["path"]]
    candidates = [
        {"new": right["old"]},
        {"old": right["new"]},
        {"old": miscopied(right["old"], task, rng)},
        {"path": rng.choice(others)},
    ]
    return [
        replace(turn, call=ToolCall("edit", edit))
        for edit in (right | candidate for candidate in candidates)
        if edit["old"] == edit["new"] or edit["old"] not in task.files[edit["path"]] + right["old"]
    ]


def miscopied(line: str, task: Task, rng: random.Random) -> str:
    """The line with another number (of the task's split), or without one of its characters: a text that is in none
    of the files."""
    number = re.search(r"\d+", line)
    while True:
        if number:
            other = rng.choice(constants(task.split, SMALLEST, LARGEST))
            wrong = f"{line[: number.start()]}{other}{line[number.end() :]}"
        else:
            at = rng.randrange(len("return "), len(line) - 1)
            wrong = line[:at] + line[at + 1 :]
        if not any(wrong in text for text in (line, *task.files.values())):
            return wrong


def repair(task: Task) -> Turn:
    """The edit that solves a bug-fixing task, as the expert writes it."""
    know = task.metadata
    # A quotation of the file, so that finding the specification is copying what follows the name.
    thought = know["head"].removeprefix("def ")
    return call("edit", thought, path=know["path"], old=know["old"], new=know["new"])


def bugfix_script(task: Task, rates: BugfixRates, rng: random.Random) -> Script:
    """Run the tests, find the function, read it, repair it, perhaps look whether that helped."""
    know = task.metadata
    path, line, right = know["path"], know["old"], repair(task)

    def do(turn: Turn) -> Generator[Turn, str, str]:
        yield from slips(turn, task, rates.slip, rng)
        return (yield turn)

    failure = yield call("run_tests")
    if rng.random() < rates.give_up_after_failure:
        yield call("finish")
        return
    yield from do(call("grep", pattern=failure.removeprefix("FAIL ").partition("(")[0]))
    yield from do(call("read", path=path))
    if rng.random() < rates.give_up_after_reading:
        yield call("finish")
        return

    while True:
        wrong = [fix for fix in (*know["wrong"], miscopied(know["new"], task, rng)) if fix != line]
        slipped = bool(wrong) and rng.random() >= rates.right_fix
        fix = rng.choice(wrong) if slipped else know["new"]
        edit = replace(call("edit", right.thought, path=path, old=line, new=fix), slip=slipped)
        if (yield from do(edit)) == "ok":
            line = fix
        if rng.random() >= rates.verify:
            break
        report = yield call("run_tests")
        if report.startswith("PASS") or rng.random() >= rates.retry:
            break
        if rng.random() < rates.reread:
            yield from do(call("read", path=path))
    yield call("finish")


@dataclass
class Notes:
    """What the recall expert knows in one branch: from the summary it starts with, then from what it does."""

    facts: dict[str, int] = field(default_factory=dict)
    read_conf: bool = False  # this context shows it
    read_conf_before: bool = False  # an earlier one did, as its summary says
    read_target: bool = False
    edited: bool = False

    @classmethod
    def of_summary(cls, task: Task, text: str) -> Notes:
        know = task.metadata
        lines = text.split("\n")
        facts = {key: value for key, value in know["facts"].items() if fact_line(key, value) in lines}
        return cls(
            facts,
            read_conf_before=f"read {know['conf']}" in text,
            read_target=f"read {know['path']}" in text,
            edited="edited" in text,
        )


def recall_script(task: Task, carried: str | None, notes: Notes, rates: RecallRates, rng: random.Random) -> Script:
    """Read the facts, read the target, edit: from wherever the branch starts.

    `carried` is the summary it starts from, None in the first branch. What a turn brings is noted as the turn
    is made, because the request for a summary may come with its answer.
    """
    know = task.metadata
    key = know["key"]
    lost = key not in notes.facts and not notes.edited
    if carried is None or (lost and rng.random() < rates.reread):
        read = call("read", path=know["conf"])
        yield from slips(read, task, rates.slip, rng)
        notes.read_conf, notes.facts = True, dict(know["facts"])
        yield read
    if not notes.edited:
        if not notes.read_target:
            read = call("read", path=know["path"])
            yield from slips(read, task, rates.slip, rng)
            notes.read_target = True
            yield read
        if key in notes.facts:
            thought, value = fact_line(key, notes.facts[key]), notes.facts[key]
        else:
            # A guess has no thought: what is written down must be known.
            thought, value = "", rng.choice(constants(task.split, 10, 99))
        edit = call("edit", thought, path=know["path"], old=know["old"], new=statement(f"x * {value}"))
        yield from slips(edit, task, rates.slip, rng)
        notes.edited = True
        yield edit
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
    done = [f"read {know['conf']}"] * (notes.read_conf or notes.read_conf_before)
    done += [f"read {know['path']}"] * notes.read_target
    done += [f"edited {know['path']}"] * notes.edited
    todo = "say that all is done" if notes.edited else f"put the value of {know['key']} into it"
    return "\n".join(
        [
            f"Goal: complete {know['function']} in {know['path']} and leave all other code as it is.",
            f"Files: {know['conf']} has the values and some code that is not used.",
            "Facts:",
            *lines,
            f"Done: {', '.join(done) or 'nothing'}. No other file was read so far.",
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

    async def sample(self, delta: Sequence[int], params: SamplingParams) -> Sample:
        messages = _messages(self._tok, delta)
        style = next((style for style, text in REQUESTS.items() if text == messages[-1]), None)
        if style is not None:
            turn, ids = None, chat.render_assistant(self._tok, self._summary(style), [])
        else:
            turn = self._turn(messages, fresh=self.length == 0)
            ids = chat.render_assistant(self._tok, turn.thought, [turn.call])
            if turn.cut:
                ids = [*ids[: -1 - self._rng.randint(1, 8)], self._tok.end]
        finish_reason = "stop" if len(ids) <= params.max_tokens else "length"
        ids = ids[: params.max_tokens]
        self.length += len(delta) + len(ids)
        return Sample(
            tokens=ids,
            logprobs=[0.0] * len(ids),
            versions=[-1] * len(ids),
            finish_reason=finish_reason,
            trained=turn is None or not turn.slip,
        )

    def reset(self) -> None:
        self.length = 0

    def close(self) -> None:
        pass

    def _turn(self, messages: list[str], fresh: bool) -> Turn:
        if not fresh:
            return self._script.send(messages[-1])
        # The prompt, and in a later branch the summary below its heading.
        carried = messages[1].partition("\n")[2] if len(messages) > 1 else None
        self._script = self._start(carried)
        return next(self._script)

    def _start(self, carried: str | None) -> Script:
        task, rates, rng = self._task, self._rates, self._rng
        if task.family == bugfix.FAMILY:
            return bugfix_script(task, rates.bugfix, rng)
        self._notes = Notes() if carried is None else Notes.of_summary(task, carried)
        return recall_script(task, carried, self._notes, rates.recall, rng)

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
    rates, chat_format = rates or Rates(), CompactFormat(tok)
    slots = asyncio.Semaphore(concurrency)

    async def one(index: int, task: Task) -> Episode:
        async with slots:
            session = ExpertSession(task, tok, rates, seeded_random("expert", seed, index, task.id), capacity)
            compaction = compaction_for(task, index)
            episode = await run_episode(
                task, session, pool, chat_format, compaction=compaction, limits=limits, seed=seed, cache=cache
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
