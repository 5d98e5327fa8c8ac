"""Does a loss divided by each episode's length make failures longer? `python -m benchmarks.length_normalisation`.

GRPO (arXiv 2402.03300) divides the loss of every episode by its length. Dr. GRPO (arXiv 2503.20783, section 3.1) says
that failures then grow longer, because a long one is punished less per token. Composer 2 and this project divide all
episodes by one constant. Here the run "rl" of benchmarks.controls (the same --workdir, so that it is not trained twice)
is compared with the same RL whose loss is divided by the length (control_algorithms.LengthNormalised), in tasks whose
length has no price. A stopped run is continued, and a finished one is a row of --rows.

Prints progress on stderr and, as the last line of stdout, one JSON object: "seeds", and suite -> {"constant",
"by_length": {"pass_at_1", "failed_tokens" (sampled tokens of failed attempts, mean over the tasks that both policies
fail at least once), "tasks" (their number)}, "longer": [by_length minus constant in failed_tokens, paired by task, and
its 95 % interval], "solved": [the same of pass@1, over all tasks]}; "all" is all suites together.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.controls import RL, Seed, compare_variants
from benchmarks.seeded_runs import Row, runs_of_common_seeds
from composer_jax.errors import UserError
from composer_jax.evals.interval import interval
from composer_jax.stages.controls import final_suites

CONSTANT, BY_LENGTH = "constant", "by_length"
VARIANTS = (CONSTANT, BY_LENGTH)
SUITES = ("one_bug", "two_bugs", "three_bugs")
ALL = "all"
Values = Mapping[tuple[int, str], float]
"""(seed, task) -> a number."""


def measure(folder: Path, size: str, base: Path | None, seed: int, variant: str) -> Row:
    """Returns the row of a run: seed, variant, and suite -> {"solved", "failed_tokens"}, both by task."""
    runs = Seed(folder, size, seed, base)
    if variant == CONSTANT:
        workdir = runs.makers["rl"]("rl")
    else:
        algorithm = {"rl__algorithm__name": "benchmarks.control_algorithms:LengthNormalised"}
        start = runs.start() / "checkpoints" / "sft"
        workdir = runs.run("rl_length_normalised", base=start, **RL, **algorithm)
    suites = final_suites(workdir)
    measures = {name: {key: suites[name][key] for key in ("solved", "failed_tokens")} for name in SUITES}
    return {"seed": seed, "variant": variant, "suites": measures}


def values(runs: Mapping[int, Row], suite: str, measure: str) -> Values:
    """Returns a measure of a suite, or of ALL, by seed and task."""
    names = SUITES if suite == ALL else (suite,)
    return {
        (seed, task): value
        for seed, row in runs.items()
        for name in names
        for task, value in row["suites"][name][measure].items()
    }


def failures_of_both(runs: Mapping[str, Mapping[int, Row]], suite: str) -> dict[str, Values]:
    """Returns variant -> sampled tokens of failed attempts, at the tasks that both policies fail at least once."""
    failed = {name: values(of, suite, "failed_tokens") for name, of in runs.items()}
    both = sorted(failed[CONSTANT].keys() & failed[BY_LENGTH].keys())
    return {name: {task: of[task] for task in both} for name, of in failed.items()}


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object.

    Raises:
      UserError: the two were measured on other tasks.
    """
    runs = runs_of_common_seeds(rows, VARIANTS)
    seeds = list(runs[CONSTANT])
    return {"seeds": seeds, **{name: _summarize_suite(runs, name) for name in (*SUITES, ALL) if seeds}}


def _summarize_suite(runs: Mapping[str, Mapping[int, Row]], suite: str) -> dict[str, Any]:
    solved, failed = {name: values(of, suite, "solved") for name, of in runs.items()}, failures_of_both(runs, suite)
    if solved[CONSTANT].keys() != solved[BY_LENGTH].keys():
        raise UserError(f"the two runs were measured on other tasks of {suite!r}; delete their rows and run again.")
    both = sorted(failed[CONSTANT])
    return {
        **{
            name: {
                "pass_at_1": round(statistics.fmean(solved[name].values()), 4),
                "failed_tokens": round(statistics.fmean(failed[name].values()), 2) if both else None,
                "tasks": len(both),
            }
            for name in VARIANTS
        },
        "longer": _difference(failed, both),
        "solved": _difference(solved, sorted(solved[CONSTANT])),
    }


def _difference(measures: Mapping[str, Values], tasks: Sequence[tuple[int, str]]) -> list[float] | None:
    """Returns by_length minus constant over these tasks, with its interval; None without a task."""
    differences = [measures[BY_LENGTH][task] - measures[CONSTANT][task] for task in tasks]
    return [round(x, 4) for x in (statistics.fmean(differences), *interval(differences))] if tasks else None


def main(argv: Sequence[str] | None = None) -> None:
    compare_variants(argv, __doc__, "length_normalisation.json", VARIANTS, measure, summarize)


if __name__ == "__main__":
    main()
