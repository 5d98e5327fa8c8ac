"""Labels in numbers: signals by version of the weights, with intervals over users, and what nobody could see."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from composer_jax.observe.findings import Table, TableRow
from composer_jax.realtime.labels.label_sessions import LabelRun
from composer_jax.realtime.labels.store import Label
from composer_jax.serve.traffic.records import SessionRecord

Z_95 = 1.959964
REWARD = "reward"
FEW_USERS = 2
"""An interval needs so many users."""
SHORT_S, LONG_S = 600.0, 86_400.0
RANK_DROP = 0.1
"""A rank correlation that has fallen so far below its baseline says that the short label no longer stands for the
long one."""


@dataclasses.dataclass(frozen=True)
class SignalSummary:
    """One signal of the sessions of one version."""

    version: str
    signal: str
    """A name of SIGNALS, or "reward"."""
    sessions: int
    users: int
    effective_users: float
    """(sum n)^2 / sum n^2 over users with n observed sessions each: users who count alike."""
    mean: float | None
    """Over observed sessions; None without any."""
    low: float | None
    """95 % interval of the mean, with sessions of one user as one cluster; None for fewer than two users."""
    high: float | None
    censored: float
    """Share of the sessions in which nobody could see it."""
    censored_low: float
    """Its 95 % interval (Wilson) for so many effective users."""
    censored_high: float
    undefined: float
    """Share of the sessions in which there was nothing to see."""


def summarize_labels(labels: Sequence[Label], records: Iterable[SessionRecord]) -> list[SignalSummary]:
    """Returns a row for each version and signal, the reward first. Labels of sessions without a record are left out.

    records: of the traffic folder, which say whose sessions they are; a forgotten session has none.
    """
    users = {record.session: record.user for record in records}
    by_version: dict[str, list[Label]] = {}
    for label in labels:
        if label.session in users:
            by_version.setdefault(label.version, []).append(label)
    rows = []
    for version in sorted(by_version, key=_version_order):
        chosen = by_version[version]
        names = dict.fromkeys(name for label in chosen for name in label.signals)
        for name in (REWARD, *names):
            rows.append(_summarize_signal(version, name, chosen, users))
    return rows


def _version_order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("-")) if version != "none" else (-1,)


def _summarize_signal(version: str, name: str, labels: Sequence[Label], users: Mapping[str, str]) -> SignalSummary:
    values, owners, states = [], [], []
    for label in labels:
        signal = label.signals.get(name)
        value = label.reward if name == REWARD else signal.value if signal else None
        states.append("observed" if name == REWARD else signal.state if signal else "censored")
        if value is not None:
            values.append(value)
            owners.append(users[label.session])
    mean, low, high = clustered_interval(values, owners)
    censored = states.count("censored") / len(states)
    low_censored, high_censored = wilson(censored, effective_users([users[label.session] for label in labels]))
    return SignalSummary(
        version,
        name,
        len(labels),
        len({users[label.session] for label in labels}),
        effective_users(owners),
        mean,
        low,
        high,
        censored,
        low_censored,
        high_censored,
        states.count("undefined") / len(states),
    )


def effective_users(owners: Sequence[str]) -> float:
    """Returns (sum n)^2 / sum n^2 over users, where n is how often each of them occurs; 0 without users."""
    counts: dict[str, int] = {}
    for owner in owners:
        counts[owner] = counts.get(owner, 0) + 1
    return len(owners) ** 2 / sum(count * count for count in counts.values()) if counts else 0.0


def clustered_interval(
    values: Sequence[float], owners: Sequence[str]
) -> tuple[float | None, float | None, float | None]:
    """Returns (mean, low, high): the mean over sessions and its 95 % interval, whose units are users.

    The variance of a ratio of sums over users (linearised), so that many sessions of one user count once.
    """
    if not values:
        return None, None, None
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for value, owner in zip(values, owners, strict=True):
        sums[owner] = sums.get(owner, 0.0) + value
        counts[owner] = counts.get(owner, 0) + 1
    total, number = len(values), len(sums)
    mean = math.fsum(values) / total
    if number < FEW_USERS:
        return mean, None, None
    squares = math.fsum((sums[owner] - mean * counts[owner]) ** 2 for owner in sums)
    half = Z_95 * math.sqrt(squares * number / (number - 1)) / total
    return mean, mean - half, mean + half


def wilson(share: float, n: float) -> tuple[float, float]:
    """Returns the 95 % interval of a share of n independent units (Wilson 1927); (0, 1) without units."""
    if n <= 0:
        return 0.0, 1.0
    centre = (share + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n * n)) / (1 + Z_95**2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def format_run(run: LabelRun, rows: Sequence[SignalSummary]) -> str:
    """Returns what `label_sessions` did as lines to print: what was labelled and left out, and a table of the signals.

    rows: of `summarize_labels`.
    """
    late = sum(one.late for one in run.labels)
    head = (
        f"{len(run.labels)} sessions labelled by {run.labeller}; {run.waiting} are not old enough, "
        f"{run.forgotten} were forgotten; {late} events came too late"
    )
    return "\n".join([head, *_align(format_summary(rows))])


def format_summary(rows: Sequence[SignalSummary]) -> list[tuple[str, ...]]:
    """Returns a table as text, its head first: version, signal, mean, users, and what is missing."""
    head = ("version", "signal", "mean, 95% interval", "sessions", "effective users", "censored, 95%", "undefined")
    return [
        head,
        *(
            (
                row.version,
                row.signal,
                _format_mean(row),
                str(row.sessions),
                f"{row.effective_users:.0f} of {row.users}",
                _format_censored(row),
                f"{row.undefined:.0%}",
            )
            for row in rows
        ),
    ]


def summary_tables(rows: Sequence[SignalSummary]) -> list[Table]:
    """Returns the tables of the report's page: a row for each signal, two columns for each version."""
    versions = list(dict.fromkeys(row.version for row in rows))
    by_place = {(row.version, row.signal): row for row in rows}
    names = list(dict.fromkeys(row.signal for row in rows))

    def cells(name: str, form: Callable[[SignalSummary], str]) -> tuple[str, ...]:
        return tuple(form(by_place[version, name]) if (version, name) in by_place else "" for version in versions)

    def table(title: str, form: Callable[[SignalSummary], str], chosen: Sequence[str]) -> list[Table]:
        columns = tuple(f"version {version}" for version in versions)
        lines = [TableRow(name.replace("_", " "), "", cells(name, form), "") for name in chosen]
        return [Table(title, columns, "", lines)] if lines else []

    missing = [name for name in names if any(row.censored for row in rows if row.signal == name)]
    return [
        *table("Signals, mean and 95% interval over users", _format_mean, names),
        *table("Effective users", lambda row: f"{row.effective_users:.0f} of {row.users}", names[:1]),
        *table("Sessions in which nobody could see it", _format_censored, missing),
    ]


def _format_mean(row: SignalSummary) -> str:
    if row.mean is None:
        return "?"
    return f"{row.mean:.3g}" + (f" ({row.low:.3g} to {row.high:.3g})" if row.low is not None else "")


def _format_censored(row: SignalSummary) -> str:
    return f"{row.censored:.0%} ({row.censored_low:.0%} to {row.censored_high:.0%})"


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def rank_correlations(
    short: Sequence[Label], long: Sequence[Label], signal: str = "keep"
) -> dict[str, tuple[float, int]]:
    """Returns version -> (Spearman's rank correlation of a signal at two ages, sessions that have both).

    Versions with fewer than three such sessions, or with one value for all of them, are left out. A monitor: where the
    correlation is RANK_DROP below that of a released version, the short label is being gamed.
    """
    later = {label.session: label.signals[signal].value for label in long if signal in label.signals}
    pairs: dict[str, list[tuple[float, float]]] = {}
    for label in short:
        first = label.signals[signal].value if signal in label.signals else None
        second = later.get(label.session)
        if first is not None and second is not None:
            pairs.setdefault(label.version, []).append((first, second))
    correlations = {}
    for version, values in pairs.items():
        one, other = (_ranks(np.array(column)) for column in zip(*values, strict=True))
        if len(values) > 2 and one.std() > 0 and other.std() > 0:
            correlations[version] = (float(np.corrcoef(one, other)[0, 1]), len(values))
    return correlations


def _ranks(values: np.ndarray) -> np.ndarray:
    """Returns ranks from 0; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[inverse]
