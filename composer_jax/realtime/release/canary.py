"""Canary: which users have the candidate, what their labels say about it, and what follows.

A user's arm is a hash of the release's salt and the user, so it stays the same from request to request, and for as long
as the fraction does not fall. A step's looks test the labels of sessions that began in it: users who return get the
candidate when the fraction rises, and their earlier labels do not speak for it. The tests hold at all looks together
(statistics.py).
"""

import dataclasses
import hashlib
import json
import math
import urllib.request
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from composer_jax.errors import UserError
from composer_jax.realtime.release.statistics import (
    FIRST_LOOK,
    arm_sizes_half_width,
    confidence_sequence,
    effect_terms,
    tightest_at,
)

FRACTIONS = (0.01, 0.05, 0.25)
"""Shares of the users that have the candidate, one after another, before all have it."""
AA_FRACTIONS = (0.5,)
"""Of an A/A test, which compares two arms of equal weights."""
BUCKETS = 10_000
ARM_SIZES_ALPHA = 0.001
"""Probability that users who are assigned rightly are held for the sizes of their arms at any look of a step."""
ERROR_RATIO, ERROR_RATE, LATENCY_RATIO = 3.0, 0.01, 1.5
LEAST_ERRORS, LEAST_ANSWERED = 5, 1000
"""Failed requests of the candidate, and answered ones of each arm, before the rules of errors and latency apply: of a
hundred, p95 is the fifth largest, which is 1.5 times that of equal servers again and again."""
Arm = Literal["anchor", "candidate"]
Decision = Literal["wait", "advance", "hold", "roll back"]


class ServerNotReady(UserError):
    """A server does not have the candidate yet."""


class LabelRow(NamedTuple):
    """One label of a session, higher values being better."""

    user: str
    arm: Arm
    fraction: float
    """Of the candidate when the session began."""
    value: float
    metric: str = "reward"


class ServiceSample(NamedTuple):
    """What one arm's server did in the last minutes."""

    requests: int
    errors: int
    answered: int
    """Requests of the model (POST /v1/...) that it answered without an error, or whose client went away."""
    p95_s: float
    """Latency of those in seconds; 0 without any."""


@dataclasses.dataclass(frozen=True)
class CanaryRules:
    """When a canary goes on, and when it goes back.

    Raises UserError for a value out of range.
    """

    horizon_s: float = 3600.0
    """Age at which sessions are labelled; a step takes at least that long."""
    harm: float = 0.0
    """The candidate goes back when the interval of its effect lies below minus this."""
    alpha: float = 0.05
    """Probability that the labels of a candidate that does no harm take it back at any look, all steps and metrics
    together. The rules of errors and latency have no such level."""
    planned_users: int = 2000
    """Users of a step after which the intervals are tightest."""
    min_users: int = FIRST_LOOK
    """Users of each arm in a step before it ends, for every metric that any session has."""

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1 or self.planned_users < 1 or self.horizon_s <= 0 or self.harm < 0:
            raise UserError(
                f"alpha={self.alpha}, planned_users={self.planned_users}, horizon_s={self.horizon_s}, harm={self.harm} "
                "of a canary are out of range; use an alpha between 0 and 1, positive numbers, and no negative harm."
            )


def arm_of(salt: str, user: str, fraction: float) -> Arm:
    """Returns the arm of a user: the candidate for `fraction` of all users, the same ones and more as it rises."""
    digest = hashlib.sha256(f"{salt}:{user}".encode("utf-8", "surrogateescape")).digest()  # the bytes of a header
    return "candidate" if int.from_bytes(digest[:4]) % BUCKETS < round(fraction * BUCKETS) else "anchor"


def next_fraction(fraction: float, *, is_aa: bool) -> float | None:
    """Returns the share of users of the step after this one; None if all users have the candidate next."""
    steps = AA_FRACTIONS if is_aa else FRACTIONS
    return next((step for step in steps if step > fraction), None)


def look(
    rows: Iterable[LabelRow],
    rules: CanaryRules,
    *,
    is_aa: bool = False,
    service: Mapping[str, ServiceSample] | None = None,
    approved: Collection[str] = (),
) -> dict[str, Any]:
    """Returns what the labels and servers say about a step, and whether that is a reason to go back or to hold it.

    Args:
      rows: all labels of the step so far, in the order of their sessions' beginnings.
      service: "anchor" and "candidate", of the last five minutes.
      approved: names in "held_by" of earlier looks, which a person has approved; they do not hold it again.

    Returns:
      {"users", "candidates", "metrics": {name: {"effect", "half_width", "users", "candidates"}}, "decision": "roll
      back", "hold" or "wait", "reasons", "held_by": "arm sizes" or names of metrics} as plain JSON.
    """
    rows = list(rows)
    users: dict[str, LabelRow] = {}
    for row in rows:
        users.setdefault(row.user, row)
    candidates = sum(row.arm == "candidate" for row in users.values())
    names = sorted({row.metric for row in rows})
    tests = len(names) * len(AA_FRACTIONS if is_aa else FRACTIONS)
    metrics = {name: _effect(name, rows, users, rules, rules.alpha / tests) for name in names}
    back = [*_service_reasons(service or {})]
    hold = {}
    for name, row in metrics.items():
        if row["half_width"] is None:
            continue
        interval = f"{name}: effect {row['effect']:+.3f} +- {row['half_width']:.3f} over {row['users']} users"
        if is_aa and abs(row["effect"]) > row["half_width"]:
            hold[name] = f"{interval}, though both arms have the same weights"
        elif not is_aa and row["effect"] + row["half_width"] < -rules.harm:
            back.append(f"{interval}, below {-rules.harm}")
    if users:
        due = float(np.mean([row.fraction for row in users.values()]))
        width = float(arm_sizes_half_width(len(users), due, tightest_at(rules.planned_users, ARM_SIZES_ALPHA)))
        if abs(candidates / len(users) - due) > width:
            hold["arm sizes"] = (
                f"{candidates} of {len(users)} users have the candidate, not {due:.2%} +- {width:.2%}: assignment is "
                "broken"
            )
    hold = {name: reason for name, reason in hold.items() if name not in approved}
    return {
        "users": len(users),
        "candidates": candidates,
        "metrics": metrics,
        "decision": "roll back" if back else "hold" if hold else "wait",
        "reasons": back + list(hold.values()),
        "held_by": list(hold),
    }


def decide(seen: Mapping[str, Any], rules: CanaryRules, seconds: float) -> tuple[Decision, str]:
    """Returns what follows from a look, and why.

    seconds: since the step began.
    """
    if seen["decision"] != "wait":
        return seen["decision"], "; ".join(seen["reasons"])
    if seconds < rules.horizon_s:
        return "wait", f"the step is {seconds:.0f} s old, of at least {rules.horizon_s:.0f} s"
    fewest = min(seen["candidates"], seen["users"] - seen["candidates"])
    if fewest < rules.min_users:
        return "wait", f"an arm has {fewest} users, of at least {rules.min_users}"
    for name, row in seen["metrics"].items():  # no harm was seen in a metric only where it was tested
        users, arm = min((row["candidates"], "candidate"), (row["users"] - row["candidates"], "anchor"))
        if users < rules.min_users:
            return "wait", f"{name} has {users} users of the {arm}, of at least {rules.min_users}"
    return "advance", f"{seen['users']} users, no harm seen"


def read_rows(file: str | Path) -> list[LabelRow]:
    """Returns the labels in a file of JSON lines with the fields of LabelRow.

    Raises:
      UserError: the file cannot be read, or a line is not a label; the sentence names it.
    """
    rows, path = [], Path(file).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the labels {path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, 1):
        try:
            row = LabelRow(**json.loads(line))
            is_label = row.arm in ("anchor", "candidate") and 0 < row.fraction < 1 and math.isfinite(row.value)
        except (ValueError, TypeError):
            is_label = False
        if not is_label:
            raise UserError(
                f'line {number} of {path} is not a label; use {{"user", "arm": "anchor" or "candidate", "fraction" '
                'between 0 and 1, "value": a number, "metric"}.'
            )
        rows.append(row)
    return rows


def read_service(router: str, timeout_s: float = 10.0) -> dict[str, ServiceSample]:
    """Returns what the router saw of both arms in the last minutes. Raises a UserError if it does not answer."""
    url = f"{router.rstrip('/')}/arms"
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return {arm: ServiceSample(**sample) for arm, sample in json.loads(answer.read())["arms"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{url} is not the router of `launch.traffic route` ({error}); start it first.") from error


def require_version(servers: Sequence[str], version: int, timeout_s: float = 10.0) -> None:
    """Raises ServerNotReady unless all servers answer GET /health with this version of the weights."""
    for server in servers:
        url = f"{server.rstrip('/')}/health"
        try:
            with urllib.request.urlopen(url, timeout=timeout_s) as answer:
                health = json.loads(answer.read())
            served = health["weight_version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            sentence = f"{url} does not say which weights it serves ({error}); start the server first."
            raise ServerNotReady(sentence) from error
        if served != version:
            refusal = f" ({health['refused']})" if health.get("refused") else ""
            raise ServerNotReady(
                f"{server} serves version {served}, not {version}{refusal}; the canary starts when every server of its "
                "arm has the version."
            )


def _effect(
    name: str, rows: Sequence[LabelRow], users: Mapping[str, LabelRow], rules: CanaryRules, alpha: float
) -> dict[str, Any]:
    """Returns the candidate's effect on a metric, of one mean per user: requests of one user are not independent.

    A user who has labels of both arms counts with those of the first one.
    """
    values: dict[str, list[float]] = {}
    for row in rows:
        if row.metric == name and row.arm == users[row.user].arm:
            values.setdefault(row.user, []).append(row.value)
    known = [users[user] for user in values]
    terms = effect_terms(
        np.array([np.mean(values[row.user]) for row in known]),
        is_candidate := np.array([row.arm == "candidate" for row in known]),
        np.array([row.fraction for row in known]),
    )
    rho = tightest_at(rules.planned_users, alpha)
    means, half_widths = confidence_sequence(terms, rho, alpha, is_candidate)
    half_width = float(half_widths[-1])
    return {
        "effect": float(means[-1]),
        "half_width": half_width if math.isfinite(half_width) else None,
        "users": len(known),
        "candidates": int(is_candidate.sum()),
    }


def _service_reasons(service: Mapping[str, ServiceSample]) -> list[str]:
    """Returns why the candidate's server is worse than the anchor's beyond what is allowed."""
    if not {"anchor", "candidate"} <= service.keys():
        return []
    anchor, candidate = service["anchor"], service["candidate"]
    rate, baseline = candidate.errors / max(candidate.requests, 1), anchor.errors / max(anchor.requests, 1)
    reasons = []
    if candidate.errors >= LEAST_ERRORS and rate > ERROR_RATE and rate > ERROR_RATIO * baseline:
        reasons.append(f"{rate:.1%} of the candidate's requests failed, and {baseline:.1%} of the anchor's")
    enough = min(anchor.answered, candidate.answered) >= LEAST_ANSWERED
    if enough and candidate.p95_s > LATENCY_RATIO * anchor.p95_s:
        reasons.append(f"the candidate's p95 latency is {candidate.p95_s:.3g} s, and the anchor's {anchor.p95_s:.3g} s")
    return reasons
