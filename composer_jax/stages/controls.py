"""Controls: other policies, measured on the tasks of a run, that its final policy is compared with.

A control is a run of its own in DIR/controls/NAME, such as the policy before RL sampled greedily, or rejection-sampling
fine-tuning on as many sampled tokens as RL used. A gain that a control has as well is not one of RL.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_jax.errors import UserError
from composer_jax.evals.interval import interval

POLICIES = ("after", "before", "base")
"""Evaluations in the order in which one is taken to be that of a run's final policy."""


def final_suites(workdir: Path, policies: Sequence[str] = POLICIES) -> dict[str, dict[str, Any]]:
    """Returns the measures of every suite for the final policy of a run folder; {} if none was evaluated.

    policies: the evaluations to look for, the first of which is taken.
    """
    for which in policies:
        file = workdir / "stages" / f"evaluate_{which}.json"
        if file.exists():
            return json.loads(file.read_bytes())["suites"]
    return {}


def control_suites(workdir: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns name -> the measures of every suite, of the controls in a run folder that were evaluated."""
    folders = sorted(path for path in (workdir / "controls").glob("*") if path.is_dir())
    return {path.name: suites for path in folders if (suites := final_suites(path))}


def compare_by_task(
    ours: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Mapping[str, Any]], name: str
) -> dict[str, Any]:
    """Returns {"difference", "low", "high", "tasks"}: our pass@1 minus theirs, and its 95 % interval, paired by task.

    Raises UserError if they were measured on other tasks.

    Args:
      ours, theirs: suite -> its measures, with `solved`: task -> the fraction of attempts that solved it.
      name: of the control, for error messages.
    """
    mine, other = _solved(ours), _solved(theirs)
    if mine.keys() != other.keys():
        raise UserError(
            f"the control {name!r} was measured on {len(other)} tasks, of which {len(mine.keys() & other.keys())} are "
            f"among the {len(mine)} of this run; evaluate it with the suites and the seed of this run's config."
        )
    return paired_difference(mine, other)


def paired_difference(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> dict[str, Any]:
    """Returns what `compare_by_task` does of the tasks that both have: task -> the fraction of attempts that solved it.
    Raises ValueError if they share no task."""
    differences = [ours[task] - theirs[task] for task in sorted(ours.keys() & theirs.keys())]
    low, high = interval(differences)
    return {"difference": sum(differences) / len(differences), "low": low, "high": high, "tasks": len(differences)}


def _solved(suites: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    return {(suite, task): rate for suite, measures in suites.items() for task, rate in measures["solved"].items()}
