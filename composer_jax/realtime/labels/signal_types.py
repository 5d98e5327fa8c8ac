"""A signal of a session and what its measure may use: the texts of the conversation and the judge of follow-ups."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.realtime.labels.judge import FollowUpJudge, RuleJudge

T = TypeVar("T")
SignalState = Literal["observed", "censored", "undefined"]
SIGNAL_STATES: tuple[SignalState, ...] = ("observed", "censored", "undefined")
"""observed: it has a value. censored: something may have happened that nobody could see. undefined: there was nothing
to measure, which is an outcome: a session without edits has no share of kept lines."""

SAMPLE_ANSWER = "answer of a tool"


@dataclasses.dataclass(frozen=True, slots=True)
class Signal:
    """One measure of a session, with its mask and the reasons for it."""

    value: float | None
    """None unless it was observed."""
    state: SignalState
    reasons: tuple[str, ...] = ()
    by_turn: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """`SampledTurn.answer` -> its part, of signals that belong to single answers."""

    def __post_init__(self) -> None:
        if (self.value is not None) != (self.state == "observed"):
            raise ValueError(f"a signal that is {self.state} has the value {self.value}")


def observed(value: float, *reasons: str, by_turn: Mapping[str, float] | None = None) -> Signal:
    """Returns a signal with a value."""
    return Signal(float(value), "observed", reasons, by_turn or {})


def censored(*reasons: str) -> Signal:
    """Returns a signal that nobody could see."""
    return Signal(None, "censored", reasons)


def undefined(*reasons: str) -> Signal:
    """Returns a signal of a session in which there was nothing to measure."""
    return Signal(None, "undefined", reasons)


class ConversationText(Protocol):
    """Reads token ids of turns. Its texts are used while a label is made and are stored nowhere."""

    @property
    def version(self) -> str:
        """Names the format that is read; every labeller's version follows from it."""
        ...

    def answer(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Returns what the agent said in a sampled answer, and the number of its tool calls."""
        ...

    def user(self, suffix: Sequence[int]) -> str | None:
        """Returns the last message of a user in the ids of a prompt; None if they hold none."""
        ...


class ChatText:
    """Reads the ids of one chat format, whose user messages have a beginning and an end of their own."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        one, other = list(chat.user(["a"])), list(chat.user(["b"]))
        head = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        tail = next((i for i, (a, b) in enumerate(zip(one[::-1], other[::-1], strict=False)) if a != b), len(one))
        self._head, self._tail = one[:head], one[len(one) - tail :]

        sample = list(chat.render_assistant("a", [ToolCall("a", {})]))
        parts = (chat.tokenizer.fingerprint, self._head, self._tail, sample)
        self.version = hashlib.sha256(repr(parts).encode()).hexdigest()[:8]

        # Many templates write the answer of a tool as a message of the user, in marks of their own.
        bridge = chat.bridge(sample, [SAMPLE_ANSWER])
        bodies = [body for piece in bridge for body in self._bodies(piece)]
        marks = next((body.partition(SAMPLE_ANSWER)[::2] for body in bodies if SAMPLE_ANSWER in body), ("", ""))
        self._tool_marks = marks if any(marks) else None

    def answer(self, tokens: Sequence[int]) -> tuple[str, int]:
        message = self._chat.parse(tokens)
        return message.content, len(message.calls)

    def user(self, suffix: Sequence[int]) -> str | None:
        return next((body for body in self._bodies(suffix) if not self._is_tool_answer(body)), None)

    def _is_tool_answer(self, body: str) -> bool:
        if self._tool_marks is None:
            return False
        begin, end = self._tool_marks
        return body.startswith(begin) and body.endswith(end)

    def _bodies(self, suffix: Sequence[int]) -> Iterator[str]:
        """Yields the text of every message that is written as a user's, the last one first."""
        ids, size, stop = list(suffix), len(self._head), len(suffix)
        for start in range(len(ids) - size, -1, -1):
            if size and ids[start] == self._head[0] and ids[start : start + size] == self._head:
                yield self._chat.tokenizer.decode(self._until_tail(ids[start + size : stop]))
                stop = start

    def _until_tail(self, body: list[int]) -> list[int]:
        width = len(self._tail)
        ends = (i for i in range(len(body)) if width and body[i : i + width] == self._tail)
        return body[: next(ends, len(body))]


class OnceDecoded:
    """Reads the ids of one session, each of them once: many signals ask for the same texts."""

    def __init__(self, text: ConversationText) -> None:
        self.version = text.version
        self._answer, self._user = _remember(text.answer), _remember(text.user)

    def answer(self, tokens: Sequence[int]) -> tuple[str, int]:
        return self._answer(tokens)

    def user(self, suffix: Sequence[int]) -> str | None:
        return self._user(suffix)


def _remember(read: Callable[[Sequence[int]], T]) -> Callable[[Sequence[int]], T]:
    results: dict[int, tuple[Sequence[int], T]] = {}  # holds the ids, so that no others get their address

    def remembered(ids: Sequence[int]) -> T:
        if id(ids) not in results:
            results[id(ids)] = ids, read(ids)
        return results[id(ids)][1]

    return remembered


@dataclasses.dataclass(frozen=True)
class LabelContext:
    """What signals may use beside the session itself."""

    text: ConversationText | None = None
    """Without one, signals that need a text are censored."""
    judge: FollowUpJudge = dataclasses.field(default_factory=RuleJudge)
