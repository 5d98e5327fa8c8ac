"""Judges of follow-ups: whether the user's next message says that the work before it is wrong."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Protocol

REPEATED = 0.6
"""Jaccard similarity of word 3-grams from which a message repeats an earlier demand."""
QUICK_S = 120.0
"""An undo or a regenerate within so many seconds of the answer rejects it."""

REJECTIONS = (
    r"\b(does|do|did|is|are|was|were|has|have|can|could|should|would)(n't| not) (work|compile|build|pass|run|fix|help)",
    r"\b(doesn'?t|didn'?t|don'?t|isn'?t|won'?t) (work|compile|build|pass|run|fix|help)",
    r"\bstill (fail|break|broken|wrong|not|the same|there|happen|crash|get|see)",
    r"\bnot what i (asked|want|meant|need)",
    r"\b(you|this|that|it) (broke|breaks|broken|deleted|removed|forgot|ignored|missed)\b",
    r"\b(that|this|it)('s| is) (wrong|incorrect|broken|not right|not correct|incomplete)",
    r"\b(revert|undo|roll back|put back|take back) (it|this|that|your|the|all|everything)",
    r"^(no|nope|wrong|stop)\b[,.! ]",
    r"\b(same|another|an?) (error|exception|failure|traceback)\b",
    r"\btry again\b",
    r"\bplease (change|fix|redo) (it|this|that)\b",
)
"""What users write of work that they reject, in English; a model judges other languages."""
_REJECTION = re.compile("|".join(REJECTIONS), re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class FollowUp:
    """A user's message after an answer of the agent."""

    text: str
    earlier: Sequence[str] = ()
    """Messages of the user before it."""
    answer: str = ""
    """What the agent had said."""
    has_secret: bool = False
    """Whether the answer has a secret, which must not be sent anywhere."""


class JudgeError(Exception):
    """A judge gave no vote: the message is censored in the signal."""


class JudgeUnavailable(JudgeError):
    """A judge could not be asked: the session is labelled later."""


class FollowUpJudge(Protocol):
    """Reads one message. A judge never decides alone what a session is worth: its vote is one bounded term."""

    @property
    def version(self) -> str:
        """Name and version, which every label carries."""
        ...

    def vote(self, follow_up: FollowUp) -> int:
        """Returns -1 (the work is wrong, incomplete or unwanted), +1 (something new, or thanks) or 0 (neither).

        Raises JudgeError if there is no answer.
        """
        ...


class RuleJudge:
    """The deterministic judge: -1 for a repeated demand or words of rejection; else 0.

    It has no network and follows no order in the text. It never votes +1, because no list of words shows content.
    """

    version = "rules-1"

    def vote(self, follow_up: FollowUp) -> int:
        repeats = any(repetition(follow_up.text, text) >= REPEATED for text in follow_up.earlier)
        return -1 if repeats or _REJECTION.search(follow_up.text.replace("’", "'")) else 0


def repetition(text: str, earlier: str) -> float:
    """Returns the Jaccard similarity of the sets of word 3-grams of two messages, from 0 to 1.

    A message of fewer than three words is one gram by itself.
    """
    one, other = word_grams(text), word_grams(earlier)
    return len(one & other) / len(one | other) if one and other else 0.0


def word_grams(text: str, size: int = 3) -> set[tuple[str, ...]]:
    """Returns the set of runs of `size` words of a text, in lower case."""
    words = re.findall(r"\w+", text.lower())
    if not words:
        return set()
    return {tuple(words[i : i + size]) for i in range(max(1, len(words) - size + 1))}
