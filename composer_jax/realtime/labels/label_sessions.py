"""Labels all sessions that are old enough: traffic -> signals at one age -> rewards -> the table of labels."""

import dataclasses
import hashlib
import json
import math
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from composer_jax.errors import UserError
from composer_jax.observe.progress import Progress
from composer_jax.realtime.labels.judge import FollowUp, FollowUpJudge, JudgeError
from composer_jax.realtime.labels.reward import (
    BucketStatistics,
    RewardWeights,
    bucket_of,
    clip_reward,
    reward_terms,
)
from composer_jax.realtime.labels.signal_table import SignalFunction, measure_signals, resolve_signals
from composer_jax.realtime.labels.signal_types import LabelContext, Signal
from composer_jax.realtime.labels.store import Label, LabelStore
from composer_jax.realtime.labels.window import GRACE_S, label_window
from composer_jax.serve.traffic.records import SessionRecord, SessionTraffic

LABELLER_VERSION = 1
"""Raised when the meaning of a signal or of the reward changes."""
DAY_S = 86_400.0
AT_ONCE = 200
"""Labels of one transaction."""
JUDGE_FAILURES = 20
"""After so many failures of the judge in a row nothing is labelled, because labels are made once."""


class TrafficReader(Protocol):
    """A folder of traffic."""

    def sessions(self) -> list[SessionRecord]: ...

    def read(self, session: str) -> SessionTraffic: ...

    def is_forgotten(self, session: str) -> bool: ...


@dataclasses.dataclass(frozen=True)
class LabelRun:
    """What one call of `label_sessions` did."""

    labels: Sequence[Label]
    """The new ones."""
    waiting: int
    """Sessions that are not old enough yet."""
    forgotten: int
    """Sessions whose user withdrew, or that were deleted meanwhile."""
    labeller: str


@dataclasses.dataclass(frozen=True)
class _Measured:
    """A session between its signals and its reward."""

    session: str
    start: float
    late: int
    bucket: str
    versions: tuple[int, ...]
    signals: Mapping[str, Signal]


class _WatchedJudge:
    """A judge whose failures in a row end the run."""

    def __init__(self, judge: FollowUpJudge) -> None:
        self._judge, self._failures, self.version = judge, 0, judge.version

    def vote(self, follow_up: FollowUp) -> int:
        try:
            vote = self._judge.vote(follow_up)
        except JudgeError as error:
            self._failures += 1
            if self._failures >= JUDGE_FAILURES:
                raise UserError(
                    f"{error}, {JUDGE_FAILURES} times in a row; nothing was labelled, because labels are made once: "
                    "start the judge and label again, or use the rules."
                ) from error
            raise
        self._failures = 0
        return vote


def label_sessions(
    traffic: TrafficReader,
    database: sqlite3.Connection,
    horizon: float,
    *,
    context: LabelContext | None = None,
    weights: RewardWeights | None = None,
    own_signals: Mapping[str, str] | None = None,
    retention_days: float = math.inf,
    grace: float = GRACE_S,
    clock: Callable[[], float] = time.time,
) -> LabelRun:
    """Labels every session that is old enough and has no such label; returns what was done.

    A session is old enough `horizon + grace` after its last edit or answer, so that all labels of a horizon are made at
    one age and see the same hours of events. Rewards are relative to the buckets of these sessions and of those that
    this labeller has labelled before at this horizon. The next run after one that was killed makes the labels that are
    missing: the same ones, unless more sessions have become old enough.

    Args:
      traffic: where sessions are read from. database: where labels are stored.
      horizon: age in seconds.
      own_signals: name -> import path of a user's own signals.
      retention_days: after which the folder deletes a session.
      grace: seconds that events may arrive after the horizon.

    Raises UserError for a horizon that is no age or longer than the retention, and for a judge that never answers.
    """
    context, weights, own = context or LabelContext(), weights or RewardWeights(), own_signals or {}
    check_horizon(horizon, grace, retention_days)
    functions, store, now = resolve_signals(own), LabelStore(database), clock()
    if unknown := [name for name in weights.own if name not in functions]:
        raise UserError(f"the weight own.{unknown[0]} is of no signal; use one of {', '.join(functions)}.")
    labeller = labeller_version(context, weights, own, grace)
    done, earlier = store.labelled(horizon, labeller), store.read(horizon, labeller)
    records = [record for record in traffic.sessions() if record.session not in done]
    watched = dataclasses.replace(context, judge=_WatchedJudge(context.judge))
    measured: list[_Measured] = []
    forgotten = 0
    with Progress(len(records), "sessions", "signals") as progress:
        for record in records:
            if now < record.opened + horizon + grace:
                continue  # a session without any activity is the oldest that it can be
            if (session := _read(traffic, record.session)) is None:
                forgotten += 1
            elif one := _measure(session, functions, horizon, grace, watched, now):
                measured.append(one)
            progress.update(labelled=len(measured))
    statistics = BucketStatistics(
        [(one.bucket, one.signals) for one in earlier] + [(one.bucket, one.signals) for one in measured]
    )
    labels = [_reward(one, weights, statistics, horizon, labeller, context.judge.version, now) for one in measured]
    with Progress(len(labels), "labels", "rewards") as progress:
        for first in range(0, len(labels), AT_ONCE):
            batch = labels[first : first + AT_ONCE]
            store.insert(batch, traffic.is_forgotten)
            progress.update(len(batch))
    stored = store.labelled(horizon, labeller)
    new = [one for one in labels if one.session in stored]  # without those that were forgotten meanwhile
    waiting = len(records) - forgotten - len(measured)
    return LabelRun(new, waiting, forgotten + len(labels) - len(new), labeller)


def check_horizon(horizon: float, grace: float, retention_days: float) -> None:
    """Raises UserError for a horizon that is no age, or that sessions do not reach before they are deleted."""
    if not (math.isfinite(horizon) and horizon > 0 and math.isfinite(grace) and grace >= 0):
        raise UserError(f"a horizon of {horizon} s with a grace of {grace} s is no age; use positive numbers.")
    if horizon + grace >= retention_days * DAY_S:
        raise UserError(
            f"a horizon of {horizon / DAY_S:.3g} days and a grace of {grace / DAY_S:.3g} are longer than the retention "
            f"of {retention_days:g} days, which deletes sessions before; shorten the horizon or keep sessions longer."
        )


def labeller_version(context: LabelContext, weights: RewardWeights, own: Mapping[str, str], grace: float) -> str:
    """Returns a labeller's version, which follows from weights, own signals, judge, grace, and whether it has text."""
    parts = (dataclasses.asdict(weights), dict(own), context.judge.version, grace, context.text is not None)
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{LABELLER_VERSION}-{digest[:8]}"


def _read(traffic: TrafficReader, session: str) -> SessionTraffic | None:
    """Returns a session; None for one that is forgotten, or that was deleted since the sessions were listed."""
    if traffic.is_forgotten(session):
        return None
    try:
        return traffic.read(session)
    except UserError:
        if any(record.session == session for record in traffic.sessions()):
            raise
        return None


def _measure(
    traffic: SessionTraffic,
    functions: Mapping[str, SignalFunction],
    horizon: float,
    grace: float,
    context: LabelContext,
    now: float,
) -> _Measured | None:
    """Returns the signals of a session; None if it is not old enough."""
    window = label_window(traffic, horizon, grace)
    if now < window.due:
        return None
    seen = window.traffic
    return _Measured(
        seen.record.session,
        window.start,
        window.late,
        bucket_of(seen, context.text),
        tuple(sorted({version for turn in seen.turns for version in turn.versions})),
        measure_signals(functions, seen, horizon, context),
    )


def _reward(
    one: _Measured,
    weights: RewardWeights,
    statistics: BucketStatistics,
    horizon: float,
    labeller: str,
    judge: str,
    now: float,
) -> Label:
    terms = reward_terms(weights, one.signals, one.bucket, statistics)
    return Label(
        session=one.session,
        horizon=horizon,
        labeller=labeller,
        judge=judge,
        start=one.start,
        made=now,
        bucket=one.bucket,
        first_version=one.versions[0] if one.versions else None,
        last_version=one.versions[-1] if one.versions else None,
        late=one.late,
        reward=clip_reward(terms, weights.limit),
        terms=terms,
        signals=one.signals,
    )
