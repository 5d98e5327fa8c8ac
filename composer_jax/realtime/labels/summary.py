"""Labels in numbers: signals by version of the weights, with intervals over users, and what nobody could see."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from composer_jax.observe.findings import Table, TableRow
from composer_jax.realtime.labels.label_sessions import LabelRun
from composer_jax.realtime.labels.reward import RewardWeights, compute_rewards
from composer_jax.realtime.labels.signal_types import Signal, censored, observed
from composer_jax.realtime.labels.store import Label
from composer_jax.realtime.quantiles import t_quantile, z_quantile

Z_95 = z_quantile(0.975)
REWARD = "reward"
INTERVAL_USERS = 5
"""An interval needs so many users."""


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
    """95 % interval of the mean, with sessions of one user as one cluster; None for fewer than INTERVAL_USERS."""
    high: float | None
    censored: float
    """Share of the sessions in which nobody could see the signal."""
    censored_low: float
    """Its 95 % interval (Wilson) for so many effective users."""
    censored_high: float
    undefined: float
    """Share of the sessions in which there was nothing to measure."""


def summarize_labels(labels: Sequence[Label], weights: RewardWeights | None = None) -> list[SignalSummary]:
    """Returns a row for each version and signal, the reward first. Rewards are relative to all of these labels.

    labels: of one horizon and labeller.
    """
    rewards = compute_rewards(labels, weights)
    by_version: dict[str, list[Label]] = {}
    for label in labels:
        by_version.setdefault(label.version, []).append(label)
    rows = []
    for version in sorted(by_version, key=_version_order):
        of_version = by_version[version]
        values = [observed(rewards[label.session].value) for label in of_version]
        rows.append(_summarize_signal(version, REWARD, of_version, values))
        for name in dict.fromkeys(name for label in of_version for name in label.signals):
            signals = [label.signals.get(name) or censored("not measured") for label in of_version]
            rows.append(_summarize_signal(version, name, of_version, signals))
    return rows


def _version_order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("-")) if version != "none" else (-1,)


def _summarize_signal(version: str, name: str, labels: Sequence[Label], signals: Sequence[Signal]) -> SignalSummary:
    values = [signal.value for signal in signals if signal.value is not None]
    owners = [label.user for label, signal in zip(labels, signals, strict=True) if signal.value is not None]
    states = [signal.state for signal in signals]
    mean, low, high = clustered_interval(values, owners)
    share = states.count("censored") / len(states)
    low_censored, high_censored = wilson(share, effective_users([label.user for label in labels]))
    return SignalSummary(
        version,
        name,
        len(labels),
        len({label.user for label in labels}),
        effective_users(owners),
        mean,
        low,
        high,
        share,
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

    The variance of a ratio of sums over users (linearised), so that many sessions of one user count once, and Student's
    t with users - 1 degrees of freedom.
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
    if number < INTERVAL_USERS:
        return mean, None, None
    squares = math.fsum((sums[owner] - mean * counts[owner]) ** 2 for owner in sums)
    half = t_quantile(0.975, number - 1) * math.sqrt(squares * number / (number - 1)) / total
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
        f"{run.unjudged} wait for the judge, {run.forgotten} were forgotten; {late} events came too late"
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

    def table(title: str, form: Callable[[SignalSummary], str], signals: Sequence[str]) -> list[Table]:
        columns = tuple(f"version {version}" for version in versions)
        lines = [TableRow(name.replace("_", " "), "", cells(name, form), "") for name in signals]
        return [Table(title, columns, "", lines)] if lines else []

    missing = [name for name in names if any(row.censored for row in rows if row.signal == name)]
    return [
        *table("Signals, mean and 95% interval over users", _format_mean, names),
        *table("Effective users", lambda row: f"{row.effective_users:.0f} of {row.users}", names[:1]),
        *table("Censored sessions", _format_censored, missing),
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


@dataclasses.dataclass(frozen=True)
class RankCorrelation:
    """How a signal at one age stands for the same signal at another."""

    correlation: float
    """Spearman's."""
    sessions: int
    """Those that are compared."""
    left_out: int
    """Sessions with both labels of which one starts at another edit, so that they are about two diffs."""


def rank_correlations(
    short: Sequence[Label], long: Sequence[Label], signal: str = "keep"
) -> dict[str, RankCorrelation]:
    """Returns version -> rank correlation of a signal at two ages, of sessions whose labels start at the same edit.

    Versions with fewer than three such sessions, or with one value for all of them, are left out.
    """
    later = {label.session: label for label in long}
    pairs: dict[str, list[tuple[float, float]]] = {}
    left_out: dict[str, int] = {}
    for first in short:
        if (second := later.get(first.session)) is None:
            continue
        one, other = (label.signals[signal].value if signal in label.signals else None for label in (first, second))
        if first.start != second.start:
            left_out[first.version] = left_out.get(first.version, 0) + 1
        elif one is not None and other is not None:
            pairs.setdefault(first.version, []).append((one, other))
    correlations = {}
    for version, values in pairs.items():
        one, other = (_ranks(np.array(column)) for column in zip(*values, strict=True))
        if len(values) > 2 and one.std() > 0 and other.std() > 0:
            correlation = float(np.corrcoef(one, other)[0, 1])
            correlations[version] = RankCorrelation(correlation, len(values), left_out.get(version, 0))
    return correlations


def _ranks(values: np.ndarray) -> np.ndarray:
    """Returns ranks from 0; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[inverse]
