"""What people look at in a batch: who moves it, and whether it would move elsewhere without one organisation."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.realtime.batches.advantages import BatchNumbers
from composer_jax.realtime.batches.caps import effective_sample_size, largest_shares
from composer_jax.realtime.batches.selection import SelectedSession

KEPT = "keep"


def measure_batch(sessions: Sequence[SelectedSession], numbers: BatchNumbers) -> dict[str, Any]:
    """Returns what a batch's manifest says of it, as plain JSON.

    users, effective_users      users, and (sum w)^2 / sum w^2 with their weighted tokens w
    tokens, weighted_tokens     trained tokens, and their sum with the sessions' weights
    largest_shares              the largest share of a group in the weighted tokens, by cap
    mean_advantage              mean |weight * advantage| over the weighted tokens
    organisations               share of each in the traffic, in the weighted tokens, and in the sum of
                                |weight * advantage| over tokens ("" are sessions of none)
    direction                   see Direction
    """
    users = [session.candidate.record.user for session in sessions]
    moved = moved_by_session(sessions, numbers)
    weighted = numbers.weights * numbers.tokens
    organisations = np.array([session.candidate.record.organisation for session in sessions])
    shares = {
        name: {
            "traffic": _share(numbers.tokens, organisations == name),
            "tokens": _share(weighted, organisations == name),
            "advantages": _share(moved, organisations == name),
        }
        for name in sorted(set(organisations.tolist()))
    }
    return {
        "users": len(set(users)),
        "effective_users": effective_sample_size(numbers.tokens, numbers.weights, users),
        "tokens": int(numbers.tokens.sum()),
        "weighted_tokens": float(weighted.sum()),
        "largest_shares": dict(largest_shares(numbers.tokens, numbers.weights, numbers.caps)),
        "mean_advantage": float(moved.sum() / max(weighted.sum(), 1e-300)),
        "kappa": numbers.kappa,
        "explained_variance": numbers.explained_variance,
        "organisations": shares,
        "direction": dataclasses.asdict(direction(sessions, numbers)),
    }


def moved_by_session(sessions: Sequence[SelectedSession], numbers: BatchNumbers) -> np.ndarray:
    """Returns the sum over tokens of |weight * advantage| of each session, [N]; of an organisation it has a bound.

    See caps.py.
    """
    return np.array(
        [
            sum(abs(one.advantage) * turn.tokens for one, turn in zip(rows, session.turns, strict=True))
            for session, rows in zip(sessions, numbers.turns, strict=True)
        ]
    )


@dataclasses.dataclass(frozen=True)
class Direction:
    """Whether the batch makes answers likelier whose edits were kept: the mean over the sessions with kept lines of

        A_i (keep_i - mean keep)

    where A_i is the mean of weight * advantage over the session's tokens. Positive is towards kept edits."""

    all: float | None
    """Of all sessions; None with fewer than two of them."""
    without: Mapping[str, float | None]
    """Organisation -> the same without its sessions."""
    changes_sign: tuple[str, ...]
    """Organisations without which the sign is another one: a person should look before such a batch is trained."""


def direction(sessions: Sequence[SelectedSession], numbers: BatchNumbers) -> Direction:
    """Returns the direction of a batch, and what it would be without each organisation."""
    rows = [
        (session.candidate.record.organisation, _mean_advantage(session, turns), kept)
        for session, turns in zip(sessions, numbers.turns, strict=True)
        if (signal := session.candidate.label.signals.get(KEPT)) and (kept := signal.value) is not None
    ]
    organisations = np.array([name for name, _, _ in rows], object)
    advantages, kept = (np.array([row[i] for row in rows], np.float64) for i in (1, 2))
    total = _direction(advantages, kept)
    without = {
        name: _direction(advantages[organisations != name], kept[organisations != name])
        for name in sorted(set(organisations.tolist()))
        if name
    }
    changes = (name for name, value in without.items() if value and total and value * total < 0)
    return Direction(total, without, tuple(changes))


def _direction(advantages: np.ndarray, kept: np.ndarray) -> float | None:
    return float((advantages * (kept - kept.mean())).mean()) if len(kept) > 1 else None


def _mean_advantage(session: SelectedSession, turns: Sequence[Any]) -> float:
    total = sum(one.advantage * turn.tokens for one, turn in zip(turns, session.turns, strict=True))
    return total / session.tokens


def _share(values: np.ndarray, chosen: np.ndarray) -> float:
    return float(values[chosen].sum() / max(values.sum(), 1e-300))
