"""Reactions of a simulated user to an agent's work, as a client sends them: verdicts, reverts, measured lines, tests.

All of it follows from what the conversation left, the user's verdict and the draws of the session.
"""

import dataclasses
import difflib
import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_jax.agent.tools import select_tools
from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.turns import Turn
from composer_jax.data.chat.messages import MalformedToolCall
from composer_jax.demo.conversation import UserConversation
from composer_jax.demo.population import Population
from composer_jax.serve.traffic.records import EventKind
from composer_jax.stages.traffic_users import Reaction

AGES_S = (600.0, 3600.0, 86_400.0)
"""Ages at which the client measures what is left of the agent's lines."""
DAY_S = 86_400.0
VERDICT_S = 5.0
"""From the end of the work to the verdict on its hunks."""
TESTS_S = 10.0
CLOSED_S = 60.0
"""From the last answer until the client closes the session and sends what happened in it."""
LONGEST_DELAY_S = 30.0
"""Of a measurement on its way to the server."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the user thinks of the work."""

    accepts: bool
    good: bool
    """Whether the hidden tests pass."""
    stopped: tuple[int, ...] = ()
    """Answers at which the user stopped the agent."""
    replies: tuple[tuple[int, float], ...] = ()
    """(answer that a message followed, Unix seconds of the message)."""


@dataclasses.dataclass(frozen=True)
class DiffSize:
    """Lines of a session's final diff, and the other lines of the files that it touches."""

    added: int
    deleted: int
    others: int


def diff_size(before: Mapping[str, str], after: Mapping[str, str]) -> DiffSize:
    """Returns the size of what changed between two states of the same files."""
    added = deleted = others = 0
    for path, text in before.items():
        if text != after[path]:
            old, new = text.splitlines(), after[path].splitlines()
            for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
                deleted, added = deleted + (j - i) * (tag != "equal"), added + (m - k) * (tag != "equal")
                others += (j - i) * (tag == "equal")
    return DiffSize(added, deleted, others)


def invalid_calls(turn: Turn, tools: Sequence[str]) -> list[str]:
    """Returns the class of error of every call of an answer that no tool could execute. tools: those of the task."""
    available, errors = select_tools(tools), []
    for call in turn.message.calls:
        if isinstance(call, MalformedToolCall):
            errors.append("invalid_arguments")
        elif call.name not in available:
            errors.append("unknown_tool")
        else:
            try:
                available[call.name].check(call.arguments)
            except ToolError:
                errors.append("invalid_arguments")
    return errors


class SessionReactions:
    """The events of one session.

    Attributes:
      reactions: all of them, by time.
      kept: age in seconds -> share of the final diff's lines that are left; empty without edits.
    """

    def __init__(
        self,
        name: str,
        talk: UserConversation,
        verdict: Verdict,
        answers: Sequence[str],
        answered: Sequence[float],
        population: Population,
        draw: Callable[[str], random.Random],
    ) -> None:
        """
        Args:
          name: X-Session-ID.
          answers, answered: ids of the answers, and when each of them ended.
          draw: random numbers of the session for a purpose.
        """
        self._name, self._talk, self._verdict, self._population, self._draw = name, talk, verdict, population, draw
        self._answers, self._answered = answers, answered
        self._events: list[Reaction] = []
        self._closed = answered[-1] + CLOSED_S
        self.kept: dict[float, float] = {}
        self._size = diff_size(talk.task.files, talk.files)
        self._answer_events()
        self._user_events()
        self._later_events()
        self.reactions = sorted(self._events, key=lambda event: (event.arrival, event.time))

    def _add(
        self, kind: EventKind, answer: int | None, time: float, payload: Mapping[str, Any], arrival: float | None = None
    ) -> None:
        count = sum(event.kind == kind for event in self._events)
        turn = "" if answer is None else self._answers[answer]
        when = max(time, self._closed) if arrival is None else arrival
        self._events.append(Reaction(f"{kind}-{count}", kind, turn, time, when, dict(payload)))

    def _hunk(self, path: str, line: int) -> str:
        return hashlib.sha256(f"{self._name}/{path}/{line}".encode()).hexdigest()[:16]

    def _answer_events(self) -> None:
        """What the harness reports of each answer: hunks that it shows, and calls that no tool could execute."""
        tools = self._talk.task.tools
        for number, (turn, time) in enumerate(zip(self._talk.turns, self._answered, strict=True)):
            for error in invalid_calls(turn, tools):
                self._add("tool_error", number, time, {"error": error})
            hunks = dict.fromkeys(self._hunk(e.path, e.line) for e in self._talk.edits if e.answer == number)
            if hunks:
                self._add("shown", number, time, {"hunks": list(hunks)})

    def _user_events(self) -> None:
        """What the user does in the session: stops, messages, tests, and the verdict on the hunks that are left."""
        end = self._answered[-1]
        for number in self._verdict.stopped:
            self._add("stop_pressed", number, self._answered[number], {})
        for number, time in self._verdict.replies:
            self._add("follow_up", number, time, {})
        if self._draw("tests").random() < self._population.tests:
            self._add("tests_run", None, self._answered[0], {"exit_code": 1, "phase": "before"})
            passed = int(not self._verdict.good)
            self._add("tests_run", None, end + TESTS_S, {"exit_code": passed, "phase": "after"})
        last = {self._hunk(edit.path, edit.line): edit.answer for edit in self._talk.edits}
        for number in dict.fromkeys(last.values()):
            hunks = [hunk for hunk, answer in last.items() if answer == number]
            self._add("accepted" if self._verdict.accepts else "rejected", number, end + VERDICT_S, {"hunks": hunks})
        reason = "timeout" if self._verdict.stopped else "user"
        self._add("session_closed", None, self._closed, {"reason": reason})

    def _later_events(self) -> None:
        """The revert, if there is one, and what is measured at each age of the last edit."""
        edits = self._talk.edits
        last_edit = self._answered[edits[-1].answer if edits else -1]
        undone = self._undone_after() if edits else math.inf
        if math.isfinite(undone):
            hunks = list(dict.fromkeys(self._hunk(edit.path, edit.line) for edit in edits))
            time = self._answered[-1] + undone
            self._add("undo", edits[-1].answer, time, {"hunks": hunks}, arrival=max(time, self._closed))
        size = self._size
        alive = {"added": size.added, "deleted": size.deleted, "others": size.others}
        rng, before = self._draw("churn"), 0.0
        for age in AGES_S:
            survival = math.exp((before - age) / self._population.churn_s)
            alive = {name: sum(rng.random() < survival for _ in range(count)) for name, count in alive.items()}
            before, lost, delay = age, rng.random(), rng.random()
            time = last_edit + age + 1.0
            is_undone = self._answered[-1] + undone <= time
            left = {name: 0 if is_undone else alive[name] for name in ("added", "deleted")}
            if lines := size.added + size.deleted:
                self.kept[age] = (left["added"] + left["deleted"]) / lines
            if lost >= self._population.lost:
                payload = {
                    "horizon": age,
                    "added": size.added,
                    "added_kept": left["added"],
                    "deleted": size.deleted,
                    "deleted_kept": left["deleted"],
                    "censored": 0,
                    "others": size.others,
                    "others_kept": alive["others"],
                }
                self._add("edited_after", None, time, payload, arrival=time + delay * LONGEST_DELAY_S)

    def _undone_after(self) -> float:
        """Returns the seconds from the last answer to the revert; infinite without one."""
        rng = self._draw("undo")
        if not self._verdict.accepts:
            return VERDICT_S + rng.expovariate(1 / self._population.revert_s)
        return rng.uniform(0, DAY_S) if rng.random() < self._population.undone_later else math.inf
