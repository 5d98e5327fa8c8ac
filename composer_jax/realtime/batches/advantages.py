"""The numbers of a batch: returns, baselines, weights and the advantage of every turn that is trained."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from composer_jax.realtime.batches.baselines import (
    SessionFacts,
    earlier_means,
    explained_variance,
    mean_by_session,
    ridge,
    shrinkage,
    standardised,
)
from composer_jax.realtime.batches.caps import Cap, cap_weights
from composer_jax.realtime.batches.credit import answer_returns
from composer_jax.realtime.batches.features import AnswerFacts, resolve_features
from composer_jax.realtime.batches.rules import BatchRules
from composer_jax.realtime.batches.selection import SelectedSession, SelectedTurn
from composer_jax.realtime.labels.reward import Reward, compute_rewards
from composer_jax.rl.algorithm import GroupAdvantage


@dataclasses.dataclass(frozen=True)
class TurnNumbers:
    """What a turn is trained with, and why."""

    advantage: float
    """Clipped, and times the session's weight."""
    value: float | None = None
    """The return of an answer or a summary; None for one that was rejected."""
    baseline: float | None = None
    preference: float = 0.0
    """Of the group of answers to one prompt: reward 1 for the one with which the user went on, 0 for the others, minus
    their mean. It is a part of the advantage."""


@dataclasses.dataclass(frozen=True)
class BatchNumbers:
    """The numbers of a batch of N sessions."""

    rewards: Mapping[str, Reward]
    """Session -> reward, relative to the batch."""
    turns: Sequence[Sequence[TurnNumbers]]
    """Of each session, those of its turns."""
    weights: np.ndarray
    """[N], from 0 to 1."""
    tokens: np.ndarray
    """Trained tokens, [N]."""
    caps: Sequence[Cap]
    kappa: float | None
    """Of the baseline "shrinkage"."""
    explained_variance: float | None
    """The part of the variance of the returns that the baseline takes away."""


def weigh_sessions(sessions: Sequence[SelectedSession], rules: BatchRules) -> BatchNumbers:
    """Returns the numbers of a batch, a function of these sessions and rules.

    Raises UserError for fewer than two sessions, for a feature that does not resolve, and for caps that leave nothing.
    """
    labels = [session.candidate.label for session in sessions]
    rewards = compute_rewards(labels, rules.weights)
    returns, session_of = _returns(sessions, rewards, rules)
    facts = SessionFacts(
        users=[label.user for label in labels],
        buckets=[label.bucket for label in labels],
        opened=np.array([session.candidate.record.opened for session in sessions], np.float64),
        due=np.array([label.start + label.horizon for label in labels], np.float64),
    )
    means = mean_by_session(returns, session_of, len(sessions))
    by_session, kappa = shrinkage(means, facts)
    baseline = by_session[session_of]
    if rules.baseline == "ridge":
        columns = _columns(sessions, rules.features, earlier_means(means, facts))
        baseline, kappa = ridge(returns, columns, session_of, facts), None
    tokens = np.array([session.tokens for session in sessions], np.float64)
    caps = session_caps(sessions, rules)
    weights = cap_weights(tokens, caps)
    standard = standardised(returns - baseline)
    numbers = iter(zip(returns.tolist(), baseline.tolist(), standard.tolist(), strict=True))
    turns = []
    for session, weight in zip(sessions, weights.tolist(), strict=True):
        preferences = preference_advantages(session.turns)
        turns.append([])
        for turn in session.turns:
            value, base, advantage = next(numbers) if turn.place else (None, None, 0.0)
            preference = preferences.get(turn.id, 0.0)
            limited = max(-rules.advantage_limit, min(rules.advantage_limit, advantage + preference))
            turns[-1].append(TurnNumbers(weight * limited, value, base, preference))
    explained = explained_variance(returns, baseline)
    return BatchNumbers(rewards, turns, weights, tokens, caps, _finite(kappa), explained)


def session_caps(sessions: Sequence[SelectedSession], rules: BatchRules) -> list[Cap]:
    """Returns the caps of the rules with the groups of these sessions."""
    records = [session.candidate.record for session in sessions]
    return [
        Cap.of("cap_user", rules.cap_user, [record.user for record in records]),
        Cap.of("cap_repository", rules.cap_repository, [record.repository for record in records]),
        Cap.of("cap_organisation", rules.cap_organisation, [record.organisation for record in records]),
    ]


def preference_advantages(turns: Sequence[SelectedTurn]) -> dict[str, float]:
    """Returns turn -> advantage in its group of answers to one prompt, by RL's usual algorithm; rewards are 1 and 0."""
    rejected: dict[str, list[str]] = {}
    for turn in turns:
        if turn.chosen:
            rejected.setdefault(turn.chosen, []).append(turn.id)
    advantages: dict[str, float] = {}
    for chosen, others in rejected.items():
        values = GroupAdvantage()([1.0, *(0.0 for _ in others)]).tolist()
        advantages |= dict(zip((chosen, *others), values, strict=True))
    return advantages


def _returns(
    sessions: Sequence[SelectedSession], rewards: Mapping[str, Reward], rules: BatchRules
) -> tuple[np.ndarray, np.ndarray]:
    """(returns, number of the session), [A] each, of the turns with a place."""
    returns: list[float] = []
    session_of: list[int] = []
    for number, session in enumerate(sessions):
        label = session.candidate.label
        places = [turn.place for turn in session.turns if turn.place]
        returns += answer_returns(label, rewards[label.session], places, rules.weights, rules.gamma)
        session_of += [number] * len(places)
    return np.array(returns, np.float64), np.array(session_of, int)


def _columns(sessions: Sequence[SelectedSession], names: Sequence[str], user_means: np.ndarray) -> np.ndarray:
    """The features of the turns with a place, float64 [A, P]."""
    features = resolve_features(names)
    rows = []
    for session, user_mean in zip(sessions, user_means.tolist(), strict=True):
        for turn in session.turns:
            if turn.place:
                facts = AnswerFacts(
                    bucket=session.candidate.label.bucket,
                    request_tokens=turn.request_tokens,
                    prompt_tokens=turn.prompt_tokens,
                    number=turn.number,
                    began=turn.began,
                    user_mean=user_mean,
                )
                rows.append([float(value) for feature in features for value in feature(facts)])
    return np.array(rows, np.float64)


def _finite(value: float | None) -> float | None:
    return None if value is None or np.isinf(value) else value
