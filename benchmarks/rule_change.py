"""What is left of a policy when a rule changes after training: `python -m benchmarks.rule_change [--seeds=0,1,2]`.

Chu et al. 2025 (arXiv 2501.17161) find that SFT memorises a rule and RL generalises. Here the policies of
benchmarks/controls.py (the same --workdir, so that none is trained twice) play held-out tasks with one bug in which the
same person as in training is right, and these tasks again after the notes of two people have changed places
(rule_change_config.py). There are messages for everybody's notes, so a policy that reads further notes when the tests
still fail loses nothing. A stopped run is continued, and a finished one is a row of --rows.

    sft     the policy before RL, in whose tasks anybody was right
    rft     SFT on the solved episodes of the tasks of RL: it has seen the old rule and no failure
    rl      RL under the old rule

Prints progress on stderr and, as the last line of stdout, one JSON object: "seeds", and policy -> {"same_rule",
"changed_rule": [pass@1, low, high], "loss": [the difference, paired by task, low, high]}, and "half_of_sft_minus_rl":
half of the loss of rft minus the loss of rl, with its interval, which lies above zero if RL loses at most half of what
SFT does.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.controls import Seed, compare_variants
from benchmarks.rule_change_config import FAMILIES, ChangedRule, SameRule
from benchmarks.seeded_runs import Row, run_pipeline
from composer_jax.errors import UserError
from composer_jax.evals.interval import interval
from composer_jax.stages.controls import final_suites

CONFIG = "benchmarks/rule_change_config.py"
POLICIES: Mapping[str, str] = {"sft": "sft", "rft": "rl", "rl": "rl"}
"""Policy -> name of its checkpoint."""
Rates = Mapping[tuple[int, str], float]
"""(seed, task) -> a rate of its attempts."""


def measure(folder: Path, size: str, base: Path | None, seed: int, variant: str) -> Row:
    """Returns the row of a policy: seed, variant, and the rates of the suites."""
    runs = Seed(folder, size, seed, base)
    policy = runs.makers[variant](variant) / "checkpoints" / POLICIES[variant]
    workdir = runs.folder / f"rule_change_{variant}"
    run_pipeline(workdir, size, seed, config=CONFIG, base=policy)
    suites = final_suites(workdir)
    return {
        "seed": seed,
        "variant": variant,
        "suites": {of.FAMILY: {name: suites[of.FAMILY][name] for name in ("pass_at_1", "solved")} for of in FAMILIES},
    }


def losses(rows: Sequence[Row], variant: str, seeds: Sequence[int]) -> tuple[Rates, Rates, Rates]:
    """Returns the rates of a policy under the old and the new rule, and how much it loses, by task.

    Raises:
      UserError: the two rules were measured on other tasks.
    """
    same, changed = (
        {
            (row["seed"], task.removeprefix(family.FAMILY)): rate
            for row in rows
            if row["variant"] == variant and row["seed"] in seeds
            for task, rate in row["suites"][family.FAMILY]["solved"].items()
        }
        for family in (SameRule, ChangedRule)
    )
    if same.keys() != changed.keys():
        raise UserError(f"{variant!r} was measured on other tasks after the change; delete its rows and run again.")
    return same, changed, {task: same[task] - changed[task] for task in same}


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object, over the seeds that all policies have."""
    seeds = common_seeds(rows)
    if not seeds:
        return {"seeds": []}
    found = {name: losses(rows, name, seeds) for name in POLICIES}
    return {
        "seeds": seeds,
        **{
            name: dict(zip(("same_rule", "changed_rule", "loss"), map(_with_interval, of), strict=True))
            for name, of in found.items()
        },
        "half_of_sft_minus_rl": _with_interval(spared(rows, seeds)),
    }


def common_seeds(rows: Sequence[Row]) -> list[int]:
    """Returns the seeds that all policies have rows of."""
    return sorted(set.intersection(*({r["seed"] for r in rows if r["variant"] == name} for name in POLICIES)))


def spared(rows: Sequence[Row], seeds: Sequence[int]) -> Rates:
    """Returns half of what the imitation of solved episodes loses, minus what RL loses, by task."""
    *_, imitation = losses(rows, "rft", seeds)
    *_, rl = losses(rows, "rl", seeds)
    return {task: imitation[task] / 2 - rl[task] for task in sorted(rl)}


def _with_interval(rates: Rates) -> list[float]:
    values = [rates[task] for task in sorted(rates)]
    return [sum(values) / len(values), *interval(values)]


def main(argv: Sequence[str] | None = None) -> None:
    compare_variants(argv, __doc__, "rule_change.json", tuple(POLICIES), measure, summarize)


if __name__ == "__main__":
    main()
