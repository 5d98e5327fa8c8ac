"""The paired test of two evaluations: `python -m benchmarks.compare A B [--suites=two_bugs,chain]`.

A and B are run folders, of which the last evaluation counts (after RL, before it, or of the base), or files of one
evaluation, such as RUN/stages/evaluate_before.json; or several of them with commas between, runs of other seeds, whose
tasks are put together. Both must have measured the same tasks. Prints a table on stderr and, as the last line of
stdout, one JSON object:
    suites    name -> pass_at_1 (of A and of B), difference (that of A minus that of B), low and high (95 % interval by
              bootstrap over tasks, paired by task), tasks, gained and lost: ids of the tasks that changed sides, which
              more than half of the attempts of one solve and at most half of the other's, with the solved fractions
              [B, A]
    all       the same of all suites together, without the ids
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_jax.errors import UserError
from composer_jax.stages.controls import compare_by_task, final_suites

Suites = Mapping[str, Mapping[str, Any]]


def read_runs(text: str) -> Suites:
    """Returns suite -> {"solved": task -> the fraction of attempts that solved it} of runs with commas between; of the
    suites that all of them have.

    Raises:
      UserError: one has no evaluation, or two have measured the same task.
    """
    runs = [read_suites(Path(path)) for path in text.split(",")]
    merged: dict[str, dict[str, Any]] = {}
    for name in runs[0]:
        if any(name not in run for run in runs):
            continue
        merged[name] = {"solved": {task: rate for run in runs for task, rate in run[name]["solved"].items()}}
        if len(merged[name]["solved"]) < sum(len(run[name]["solved"]) for run in runs):
            raise UserError(f"{text} names runs that measured the same tasks of {name}; use runs of different seeds.")
    return merged


def read_suites(path: Path) -> Suites:
    """Returns suite -> its measures, of a run folder or a file of one evaluation.

    Raises:
      UserError: there is no evaluation.
    """
    if path.is_dir():
        suites = final_suites(path)
        if not suites:
            raise UserError(f"{path} has no evaluation yet; run launch.evaluate on it.")
        return suites
    try:
        return json.loads(path.read_bytes())["suites"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is neither a run folder nor the file of an evaluation ({error}).") from error


def compare(a: Suites, b: Suites, name: str, chosen: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the printed object.

    Args:
      name: of B, for error messages.
      chosen: names of suites; none: all that both have.

    Raises:
      UserError: a suite that one of the two lacks, or other tasks.
    """
    shared = [suite for suite in a if suite in b]
    there = ", ".join(shared) or "none"
    if missing := [suite for suite in chosen if suite not in shared]:
        raise UserError(f"the suite {missing[0]!r} was not measured in both; these were: {there}.")
    names = list(chosen) or shared
    if not names:
        raise UserError(f"no suite was measured in both: A has {', '.join(a)}, and B has {', '.join(b)}.")
    return {
        "suites": {suite: _compare_suite(a[suite], b[suite], suite, name) for suite in names},
        "all": compare_by_task({s: a[s] for s in names}, {s: b[s] for s in names}, name),
    }


def _compare_suite(a: Mapping[str, Any], b: Mapping[str, Any], suite: str, name: str) -> dict[str, Any]:
    compared = compare_by_task({suite: a}, {suite: b}, name)
    pairs = {task: [b["solved"][task], rate] for task, rate in a["solved"].items()}
    gained = {task: pair for task, pair in pairs.items() if pair[0] <= 0.5 < pair[1]}
    lost = {task: pair for task, pair in pairs.items() if pair[1] <= 0.5 < pair[0]}
    means = [statistics.fmean(side["solved"].values()) for side in (a, b)]
    return {"pass_at_1": means, **compared, "gained": gained, "lost": lost}


def table(result: Mapping[str, Any]) -> str:
    """Returns the comparison as text, a line for each suite."""
    rows = [(name, one) for name, one in result["suites"].items()]
    if len(rows) > 1:
        rows.append(("all", result["all"]))
    width = max(len(name) for name, _ in rows)
    lines = [f"{'':{width}}  A      B      A minus B   95 % interval      tasks  gained  lost"]
    for name, one in rows:
        means = "  ".join(f"{mean:.3f}" for mean in one["pass_at_1"]) if "pass_at_1" in one else " " * 12
        sides = f"  {len(one['gained']):6}  {len(one['lost']):4}" if "gained" in one else ""
        interval = f"[{one['low']:+.3f}, {one['high']:+.3f}]"
        lines.append(f"{name:{width}}  {means}  {one['difference']:+9.3f}   {interval:17}  {one['tasks']:5}{sides}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A", help="run folders or files of evaluations, with commas between")
    parser.add_argument("b", metavar="B", help="what A is compared with")
    parser.add_argument("--suites", default="", help="comma-separated names (default: all that both have)")
    o = parser.parse_args(argv)
    try:
        result = compare(read_runs(o.a), read_runs(o.b), o.b, [name for name in o.suites.split(",") if name])
    except UserError as error:
        parser.exit(1, f"{error}\n")
    print(table(result), file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
