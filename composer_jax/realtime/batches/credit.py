"""Credit: what each answer of a session was worth, of what became of the session.

    R_j = own terms of answer j + gamma^(J - j) * (m_j * term of kept lines + the session's other terms)

clipped to the limit of the reward, for j = 1 ... J, the answers with which the user went on. The terms are those of
labels/reward.py, relative to sessions of the same bucket. A signal with parts by answer (Signal.by_turn) is a term of
its answers: with the session's value v, the part v_j, and the signal's weight w, the answer's own term is the session's
term + w (v_j - v), so that a session of one answer gets exactly its reward. A signal without parts is one of the
session. A summary has no own terms.

Blame by hunks: m_j is the part of the hunks that answer j showed which the agent itself did not overwrite. A hunk is
overwritten if a later answer showed it again, or if it was rejected or undone before a later answer showed hunks. The
session's kept lines are those of its last diff, so what is overwritten is none of them and says nothing about answer j.
An answer that showed no hunks has m_j = 1.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from composer_jax.realtime.labels.reward import Reward, RewardWeights
from composer_jax.realtime.labels.store import Label
from composer_jax.realtime.labels.window import events_of
from composer_jax.serve.traffic.records import SampledTurn, SessionTraffic

KEPT_LINES = "keep_corrected"
OF_ANSWERS: Mapping[str, tuple[str, float, float | None]] = {
    "follow_up": ("follow_up", 1.0, None),
    "accept_share": ("accept_share", 1.0, None),
    "undo": ("undo", -1.0, 0.0),
    "invalid_calls": ("invalid_calls", -1.0, 0.0),
    "needless_question": ("needless_question", -1.0, 0.0),
}
"""Signal that may have parts by answer -> (field of RewardWeights, its sign, the part of an answer that by_turn leaves
out); None says that nothing is known of such an answer, and its own term is 0."""


@dataclasses.dataclass(frozen=True)
class AnswerPlace:
    """Where an answer stands in its session."""

    answer: str
    """By which events and signals name it; "" for a summary."""
    later: int
    """J - j: continued answers after it."""
    not_overwritten: float = 1.0
    """m_j."""


def answer_returns(
    label: Label, reward: Reward, places: Sequence[AnswerPlace], weights: RewardWeights, gamma: float
) -> list[float]:
    """Returns the return of each answer.

    reward: of the label, relative to those of its batch.
    """
    by_answer = {name: one for name, one in OF_ANSWERS.items() if label.signals[name].by_turn}
    session = sum(term for name, term in reward.terms.items() if name not in by_answer and name != KEPT_LINES)
    kept, returns = reward.terms[KEPT_LINES], []
    for place in places:
        own = sum(_own_term(label, reward, name, place.answer, weights) for name in by_answer)
        value = own + gamma**place.later * (place.not_overwritten * kept + session)
        returns.append(max(-weights.limit, min(weights.limit, value)))
    return returns


def _own_term(label: Label, reward: Reward, name: str, answer: str, weights: RewardWeights) -> float:
    field, sign, default = OF_ANSWERS[name]
    signal = label.signals[name]
    part = signal.by_turn.get(answer, default) if answer else None
    if part is None or signal.value is None:
        return 0.0
    return reward.terms[name] + sign * getattr(weights, field) * (part - signal.value)


def not_overwritten(traffic: SessionTraffic, answers: Sequence[SampledTurn]) -> list[float]:
    """Returns m_j of each answer.

    traffic: what the label saw. answers: the continued ones, by time.
    """
    shown: dict[str, set[str]] = {turn.answer: set() for turn in answers}
    last_shown: dict[str, float] = {}
    for event in events_of(traffic, "shown"):
        before = [turn.answer for turn in answers if turn.time <= event.time]
        answer = event.turn or (before[-1] if before else "")
        if answer in shown:
            shown[answer].update(event.payload["hunks"])
            last_shown[answer] = event.time
    removed: dict[str, float] = {}
    for event in events_of(traffic, "accepted", "rejected", "undo"):
        for hunk in event.payload["hunks"]:
            if event.kind == "accepted":
                removed.pop(hunk, None)
            else:
                removed.setdefault(hunk, event.time)
    shares = []
    for i, turn in enumerate(answers):
        hunks = shown[turn.answer]
        later = [one.answer for one in answers[i + 1 :] if shown[one.answer] and one.answer != turn.answer]
        again = {hunk for answer in later for hunk in shown[answer]}
        until = max((last_shown[answer] for answer in later), default=float("-inf"))
        overwritten = sum(hunk in again or removed.get(hunk, float("inf")) <= until for hunk in hunks)
        shares.append(1 - overwritten / len(hunks) if hunks else 1.0)
    return shares
