"""Labels all sessions that are old enough: traffic -> signals at one age -> the table of labels."""

import dataclasses
import hashlib
import math
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from composer_jax.errors import UserError
from composer_jax.observe.progress import Progress
from composer_jax.realtime.labels.judge import FollowUp, FollowUpJudge, JudgeUnavailable
from composer_jax.realtime.labels.reward import bucket_of
from composer_jax.realtime.labels.signal_table import SignalFunction, measure_signals, resolve_signals
from composer_jax.realtime.labels.signal_types import LabelContext, OnceDecoded
from composer_jax.realtime.labels.store import Label, LabelStore
from composer_jax.realtime.labels.window import GRACE_S, label_window
from composer_jax.serve.traffic.records import SessionRecord, SessionTraffic

LABELLER_VERSION = 2
"""Raised when the meaning of a signal changes."""
DAY_S = 86_400.0
AT_ONCE = 50
"""Labels of one transaction: a run that is killed loses the judge's work on so many."""
THREADS = 8
"""Sessions whose judge is asked at once."""
JUDGE_FAILURES = 20
"""The run ends after so many sessions in a row whose judge cannot be asked."""
JUDGE_WAIT_S = DAY_S
"""A session whose judge cannot be asked is labelled without its votes so long after it was due."""


class TrafficReader(Protocol):
    """A folder of traffic."""

    def sessions(self) -> list[SessionRecord]: ...

    def read(self, session: str) -> SessionTraffic:
        """Raises UserError for one that is unknown or forgotten."""
        ...

    def is_forgotten(self, session: str) -> bool: ...


@dataclasses.dataclass(frozen=True)
class LabelRun:
    """What one call of `label_sessions` did."""

    labels: Sequence[Label]
    """The new ones, by session."""
    waiting: int
    """Sessions that are not old enough yet."""
    unjudged: int
    """Sessions that wait for a judge that could not be asked."""
    forgotten: int
    """Sessions whose user withdrew, or that were deleted meanwhile."""
    labeller: str


class _SessionJudge:
    """The judge of one session, which is not asked again after it could not be asked."""

    def __init__(self, judge: FollowUpJudge) -> None:
        self._judge, self.version = judge, judge.version
        self.answers = 0
        self.failure: JudgeUnavailable | None = None

    def vote(self, follow_up: FollowUp) -> int:
        if self.failure:
            raise self.failure
        try:
            vote = self._judge.vote(follow_up)
        except JudgeUnavailable as error:
            self.failure = error
            raise
        self.answers += 1
        return vote


@dataclasses.dataclass
class _JudgeOutage:
    """Counts the sessions that wait for a judge that cannot be asked."""

    unjudged: int = 0
    in_row: int = 0
    """Since the judge last answered."""
    failure: JudgeUnavailable | None = None
    """Of the last of JUDGE_FAILURES in a row."""

    def labels(self, results: Iterable[tuple[Label | None, _SessionJudge]]) -> list[Label]:
        """Returns the labels among the results of a labeller, up to the session with which the judge is given up."""
        labels: list[Label] = []
        for label, judge in results:
            labels += [label] if label else []
            if judge.failure and label is None:
                self.unjudged, self.in_row = self.unjudged + 1, self.in_row + 1
            elif judge.answers:
                self.in_row = 0
            if self.in_row >= JUDGE_FAILURES:
                self.failure = judge.failure
                break
        return labels


@dataclasses.dataclass(frozen=True)
class _Labeller:
    """Makes the label of one session."""

    functions: Mapping[str, SignalFunction]
    horizon: float
    grace: float
    context: LabelContext
    version: str
    now: float

    def label(self, traffic: SessionTraffic) -> tuple[Label | None, _SessionJudge]:
        """Returns the label, or None for a session that is not old enough or not judged, and the session's judge."""
        judge = _SessionJudge(self.context.judge)
        window = label_window(traffic, self.horizon, self.grace)
        if self.now < window.due:
            return None, judge
        text = OnceDecoded(self.context.text) if self.context.text else None
        context = dataclasses.replace(self.context, text=text, judge=judge)
        signals = measure_signals(self.functions, window.traffic, self.horizon, context)
        if judge.failure and self.now < window.due + JUDGE_WAIT_S:
            return None, judge
        versions = {version for turn in window.traffic.turns for version in turn.versions}
        label = Label(
            session=traffic.record.session,
            user=traffic.record.user,
            horizon=self.horizon,
            labeller=self.version,
            judge=judge.version,
            start=window.start,
            made=self.now,
            bucket=bucket_of(window.traffic, text),
            first_version=min(versions, default=None),
            last_version=max(versions, default=None),
            late=window.late,
            signals=signals,
        )
        return label, judge


def label_sessions(
    traffic: TrafficReader,
    database: sqlite3.Connection,
    horizon: float,
    *,
    context: LabelContext | None = None,
    own_signals: Mapping[str, str] | None = None,
    retention_days: float = math.inf,
    grace: float = GRACE_S,
    clock: Callable[[], float] = time.time,
) -> LabelRun:
    """Labels every session that is old enough and has no such label; returns what was done.

    A session is old enough `horizon + grace` after its last edit or answer, so that all labels of a horizon are made at
    one age and see the same hours of events. The next run after one that was killed makes the labels that are missing.

    Args:
      traffic: where sessions are read from. database: where labels are stored.
      horizon: age in seconds.
      own_signals: name -> import path of a user's own signals, which several threads call.
      retention_days: after which the folder deletes a session.
      grace: seconds that events may arrive after the horizon.

    Raises UserError for a horizon that is not positive or longer than the retention, and for a judge that cannot be
    asked for JUDGE_FAILURES sessions in a row; labels of earlier sessions are stored then.
    """
    context, own, now = context or LabelContext(), own_signals or {}, clock()
    check_horizon(horizon, grace, retention_days)
    functions, store = resolve_signals(own), LabelStore(database)
    labeller = _Labeller(functions, horizon, grace, context, labeller_version(context, own, grace), now)
    labelled = store.labelled(horizon, labeller.version)
    records = [record for record in traffic.sessions() if record.session not in labelled]
    # A session without any activity is the oldest that it can be.
    candidates = [record.session for record in records if now >= record.opened + horizon + grace]
    made: list[Label] = []
    forgotten, outage = 0, _JudgeOutage()
    with Progress(len(candidates), "sessions", "labels") as progress, ThreadPoolExecutor(THREADS) as pool:
        for first in range(0, len(candidates), AT_ONCE):
            chunk = candidates[first : first + AT_ONCE]
            sessions = [session for name in chunk if (session := _read(traffic, name))]
            forgotten += len(chunk) - len(sessions)
            labels = outage.labels(pool.map(labeller.label, sessions))
            store.insert(labels, traffic.is_forgotten)
            made += labels
            progress.update(len(chunk), labelled=len(made))
            if outage.failure:
                raise UserError(
                    f"{outage.failure}, {outage.in_row} sessions in a row; start the judge and label again, or use the "
                    f"rules. {len(made)} sessions were labelled before."
                ) from outage.failure
    stored = store.labelled(horizon, labeller.version)
    new = sorted((label for label in made if label.session in stored), key=lambda label: label.session)
    waiting = len(records) - forgotten - outage.unjudged - len(made)
    return LabelRun(new, waiting, outage.unjudged, forgotten + len(made) - len(new), labeller.version)


def check_horizon(horizon: float, grace: float, retention_days: float) -> None:
    """Raises UserError for a horizon that is not positive, or that sessions do not reach before they are deleted."""
    if not (math.isfinite(horizon) and horizon > 0 and math.isfinite(grace) and grace >= 0):
        raise UserError(f"a horizon of {horizon} s with a grace of {grace} s is out of range; use positive numbers.")
    if horizon + grace >= retention_days * DAY_S:
        raise UserError(
            f"a horizon of {horizon / DAY_S:.3g} days and a grace of {grace / DAY_S:.3g} are longer than the retention "
            f"of {retention_days:g} days, which deletes sessions before; shorten the horizon or keep sessions longer."
        )


def labeller_version(context: LabelContext, own: Mapping[str, str], grace: float) -> str:
    """Returns a labeller's version, which follows from own signals and their files, judge, text's format, and grace."""
    text = context.text.version if context.text else None
    functions = resolve_signals(own)
    signals = [(name, path, _file_hash(functions[name])) for name, path in sorted(own.items())]
    digest = hashlib.sha256(repr((signals, context.judge.version, grace, text)).encode()).hexdigest()
    return f"{LABELLER_VERSION}-{digest[:8]}"


def _file_hash(function: SignalFunction) -> str:
    """Returns a hash of the file of a user's signal; empty for one that is built in."""
    file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _read(traffic: TrafficReader, session: str) -> SessionTraffic | None:
    """Returns a session; None for one that is forgotten, or that was deleted since the sessions were listed."""
    try:
        return traffic.read(session)  # which opens the database once; a session with a tombstone is an error
    except UserError:
        if not traffic.is_forgotten(session) and any(record.session == session for record in traffic.sessions()):
            raise
        return None
