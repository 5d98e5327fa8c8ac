"""Gate: whether a candidate may meet users, decided from two stored evaluations of the same suites.

A suite passes if the candidate is not worse than the anchor by the margin, paired by task (`noninferiority`). All
suites must pass; the level then stays what it is for one suite, because a candidate that is worse in any suite has to
get through that one. Monitors are measures that must stay within a band around the anchor, whatever they mean.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from composer_jax.errors import UserError
from composer_jax.realtime.release.statistics import noninferiority, required_tasks, suite_power

Verdict = Literal["pass", "hold", "fail"]
MONITORS = ("attempted", "turns", "calls_per_turn", "sampled_tokens", "summaries")
"""Measures of a suite (evals/suite.py: SuiteResult) that a gate compares: the share of episodes that changed a file,
turns and sampled tokens per episode, calls per turn, and summaries per episode."""
HOLD_BAND, FAIL_BAND = 0.15, 0.30
"""Relative distance from the anchor beyond which a person decides, and beyond which nobody needs to."""
UNPAIRED = 0.05
"""Largest share of tasks that one of the two evaluations may lack, for example to failures of sandboxes. One that only
the candidate lacks counts as unsolved."""


@dataclasses.dataclass(frozen=True)
class GateRules:
    """What a gate asks of a candidate.

    Raises UserError for a value out of range.
    """

    margin: float = 0.03
    """Of the share of solved tasks, by which the candidate may not be worse in any suite."""
    level: float = 0.05
    """Probability that a candidate passes that is worse by the margin in one suite."""
    power: float = 0.9
    """Probability that an equal candidate passes all suites together."""
    monitors: tuple[str, ...] = MONITORS
    """Measures of a suite that must stay near the anchor's."""

    def __post_init__(self) -> None:
        for name in ("margin", "level", "power"):
            if not 0 < (value := getattr(self, name)) < 1:
                raise UserError(f"{name}={value} of a gate is not between 0 and 1; use a share such as 0.05.")


def gate(anchor: Mapping[str, Any], candidate: Mapping[str, Any], rules: GateRules) -> dict[str, Any]:
    """Returns the verdict on a candidate with the table that it rests on, as plain JSON.

    Args:
      anchor, candidate: "suites" of an evaluation (`read_evaluation`).

    Raises:
      UserError: the evaluations have other suites, attempts or tasks, or a suite has too few tasks for the margin.
    """
    if anchor.keys() != candidate.keys() or not anchor:
        raise UserError(
            f"the anchor was evaluated on {', '.join(sorted(anchor)) or 'no suite'} and the candidate on "
            f"{', '.join(sorted(candidate)) or 'no suite'}; evaluate both with one config."
        )
    suites, monitors = {}, []
    for name in sorted(anchor):
        suites[name] = _test_suite(name, anchor[name], candidate[name], rules, len(anchor))
        monitors += [
            {"suite": name, "metric": metric, **compare_monitor(anchor[name].get(metric), candidate[name].get(metric))}
            for metric in rules.monitors
        ]
    _require_tasks(suites, rules)
    failed = [name for name, row in suites.items() if not row["passed"]]
    verdicts = {row["verdict"] for row in monitors}
    verdict = "fail" if failed or "fail" in verdicts else "hold" if "hold" in verdicts else "pass"
    return {
        "verdict": verdict,
        "reasons": [f"{name}: worse than the margin allows" for name in failed]
        + [_monitor_reason(row) for row in monitors if row["verdict"] != "pass"],
        "joint": {
            "level": rules.level,
            "power": rules.power,
            "power_per_suite": suite_power(rules.power, len(suites)),
            "margin": rules.margin,
            "promised_margin": max(row["promised_margin"] for row in suites.values()),
        },
        "suites": suites,
        "monitors": monitors,
    }


def compare_monitor(anchor: float | None, candidate: float | None) -> dict[str, Any]:
    """Returns a measure of both arms, their relative difference, and the verdict of the bands around the anchor.

    A measure that only one of them has, or that leaves 0, is held: no band can be laid around 0.
    """
    row: dict[str, Any] = {"anchor": anchor, "candidate": candidate, "difference": None}
    if anchor == candidate:
        return row | {"difference": 0.0, "verdict": "pass"}
    if not anchor or candidate is None:
        return row | {"verdict": "hold"}
    difference = candidate / anchor - 1
    distance = abs(difference)
    verdict = "pass" if distance <= HOLD_BAND else "hold" if distance <= FAIL_BAND else "fail"
    return row | {"difference": difference, "verdict": verdict}


def read_evaluation(file: str | Path) -> dict[str, Any]:
    """Returns {"suites", "sha256" of the file} of an evaluation: RUN/stages/evaluate_WHICH.json of launch.evaluate.

    Raises:
      UserError: there is no such file, or it has no suites with `solved` by task.
    """
    path = Path(file).expanduser()
    try:
        stored = path.read_bytes()
        content = json.loads(stored)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a stored evaluation ({error}); give RUN/stages/evaluate_WHICH.json, which launch.evaluate "
            "writes."
        ) from error
    suites = content.get("suites") if isinstance(content, dict) else None
    if not isinstance(suites, dict) or not suites or not all(_is_suite(suite) for suite in suites.values()):
        raise UserError(f"{path} has no suites with `solved` by task; give RUN/stages/evaluate_WHICH.json.")
    return {"suites": suites, "sha256": hashlib.sha256(stored).hexdigest()}


def _is_suite(suite: Any) -> bool:
    solved = suite.get("solved") if isinstance(suite, dict) else None
    return (
        isinstance(solved, dict)
        and len(solved) > 0
        and all(isinstance(share, int | float) and 0 <= share <= 1 for share in solved.values())
    )


def _test_suite(
    name: str, anchor: Mapping[str, Any], candidate: Mapping[str, Any], rules: GateRules, suites: int
) -> dict[str, Any]:
    if anchor.get("attempts") != candidate.get("attempts"):
        raise UserError(
            f"suite {name!r} has {anchor.get('attempts')} attempts of the anchor and {candidate.get('attempts')} of "
            "the candidate at each task; evaluate both with one config."
        )
    tasks = anchor["solved"].keys()
    both = len(tasks & candidate["solved"].keys())
    unpaired = len(tasks) + len(candidate["solved"]) - 2 * both
    if unpaired > UNPAIRED * (both + unpaired):
        raise UserError(
            f"suite {name!r} has {unpaired} tasks that only one evaluation has, and {both} that both have; evaluate "
            "both with one config, and again where sandboxes failed."
        )
    if len(tasks) < 2:
        raise UserError(f"suite {name!r} has {len(tasks)} task, from which no margin follows; give it more tasks.")
    differences = np.array([candidate["solved"].get(task, 0.0) - anchor["solved"][task] for task in tasks])
    power = suite_power(rules.power, suites)
    result = noninferiority(differences, rules.margin, level=rules.level, power=power)
    row = dataclasses.asdict(result) | {"unpaired": unpaired}
    return row | {"differences": dict(zip(tasks, differences.tolist(), strict=True))}


def _require_tasks(suites: Mapping[str, Mapping[str, Any]], rules: GateRules) -> None:
    """Raises a UserError if a suite has too few tasks for the margin; it names the one that can promise least.

    A suite that passes has enough of them, whatever it could promise: its level does not rest on the promise.
    """
    few = {
        name: row["promised_margin"]
        for name, row in suites.items()
        if 3 / row["tasks"] > rules.margin or not row["passed"] and row["promised_margin"] > rules.margin
    }
    if not few:
        return
    name = max(few, key=lambda name: few[name])
    row = suites[name]
    promise = math.ceil(row["promised_margin"] * 1000) / 1000  # rounded up: this margin must be met
    needed = required_tasks(row["sd"], rules.margin, suites=len(suites), level=rules.level, power=rules.power)
    raise UserError(
        f"suite {name!r} has {row['tasks']} tasks, whose differences have a standard deviation of {row['sd']:.2f}: "
        f"they can promise a margin of {promise}, not {rules.margin}; give it {needed} tasks, or use "
        f"--margin={promise}."
    )


def _monitor_reason(row: Mapping[str, Any]) -> str:
    change = "from a measure that is 0 or missing" if row["difference"] is None else f"{row['difference']:+.0%}"
    return f"{row['suite']}: {row['metric']} {row['anchor']} -> {row['candidate']} ({change})"
