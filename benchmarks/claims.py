"""What was published about RL of coding agents, in miniature: `python -m benchmarks.claims [--data=docs/data]`.

Reads the rows that other benchmarks have measured and runs nothing: the files of the folder --data that have the names
of these benchmarks (FILES). A claim is one difference between a policy and its control on the same tasks. It holds if
the 95 % interval of the difference, by bootstrap over the tasks of all seeds, lies above zero. Claims whose rows are
missing, or exist for one seed only, are null.

Prints a line for each claim on stderr and, as the last line of stdout, one JSON object: claim -> {"holds", "effect",
"low", "high", "seeds"}. With --pictures=FOLDER it draws FOLDER/CLAIM.png for each claim that was measured.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import parallel_calls, pass_at_64, rule_change
from benchmarks.seeded_runs import Row, integers
from composer_jax.demo.lookups import ManyLookups
from composer_jax.errors import UserError
from composer_jax.evals.interval import interval
from composer_jax.observe.picture import LIGHT, new_figure, percent_y_axis, save_figure

Rates = Mapping[tuple[int, str], float]
"""(seed, task) -> a rate of its attempts."""
Point = tuple[str, float, float, float]
"""A policy of a picture: its name, a mean, and the ends of its interval."""


@dataclass(frozen=True)
class Measured:
    """A claim's difference. points: what its picture shows."""

    effect: float
    low: float
    high: float
    seeds: Sequence[int]
    points: Sequence[Point]

    @property
    def holds(self) -> bool:
        return self.low > 0


@dataclass(frozen=True)
class Claim:
    """A published statement and how it is measured here.

    measure: rows of every file by its name without ".json" -> the difference; None without the rows.
    is_rate: whether its picture shows rates, in percent.
    """

    sentence: str
    axis: str
    measure: Callable[[Mapping[str, Sequence[Row]]], Measured | None]
    is_rate: bool = True


def _by_seed(rows: Sequence[Row], *variants: str) -> dict[str, dict[int, Row]] | None:
    """Returns variant -> seed -> row, for the seeds that all variants have; None if there are fewer than two."""
    found = {name: {row["seed"]: row for row in rows if row["variant"] == name} for name in variants}
    seeds = sorted(set.intersection(*(set(runs) for runs in found.values())))
    if len(seeds) < 2:
        return None
    return {name: {seed: runs[seed] for seed in seeds} for name, runs in found.items()}


def _rates(runs: Mapping[int, Row], suite: str) -> Rates:
    return {(seed, task): rate for seed, row in runs.items() for task, rate in row["suites"][suite]["solved"].items()}


def _point(name: str, values: Sequence[float]) -> Point:
    return (name, sum(values) / len(values), *interval(values))


def _difference(values: Mapping[str, Rates], minuend: str, subtrahend: str, factor: float = 1.0) -> Measured:
    """Returns minuend - factor * subtrahend, paired by task.

    Raises:
      UserError: the two were measured on other tasks.
    """
    ours, theirs = values[minuend], values[subtrahend]
    if ours.keys() != theirs.keys():
        raise UserError(f"{minuend!r} and {subtrahend!r} were measured on other tasks; measure one of them again.")
    tasks = sorted(ours)
    differences = [ours[task] - factor * theirs[task] for task in tasks]
    points = [_point(name, [of[task] for task in sorted(of)]) for name, of in values.items()]
    seeds = sorted({seed for seed, _ in tasks})
    return Measured(sum(differences) / len(differences), *interval(differences), seeds, points)


def pass_rates(
    suite: str, better: str, worse: str, *others: str
) -> Callable[[Mapping[str, Sequence[Row]]], Measured | None]:
    """Returns the measure of pass@1 of one control minus another; `others` are in the picture only."""

    def measure(files: Mapping[str, Sequence[Row]]) -> Measured | None:
        runs = _by_seed(files["controls"], *others, worse, better)
        if runs is None:
            return None
        return _difference({name: _rates(of, suite) for name, of in runs.items()}, better, worse)

    return measure


def summary_errors(files: Mapping[str, Sequence[Row]]) -> Measured | None:
    """Half of the compaction error of prompted reports, minus that of trained summaries without a price of length."""
    runs = _by_seed(files["controls"], "prompted_summaries", "sft", "rl_price_0")
    if runs is None:
        return None
    errors: dict[str, Rates] = {}
    for name, of in runs.items():
        whole, compacted = _rates(of, "chain_whole"), _rates(of, "chain")
        errors[name] = {task: whole[task] - compacted[task] for task in whole}
    halves = {task: error / 2 for task, error in errors["prompted_summaries"].items()}
    measured = _difference(
        {"prompted_summaries": halves, "rl_price_0": errors["rl_price_0"]}, "prompted_summaries", "rl_price_0"
    )
    points = [_point(name, list(of.values())) for name, of in errors.items()]
    return Measured(measured.effect, measured.low, measured.high, measured.seeds, points)


def unsolved_by_64(suite: str) -> Callable[[Mapping[str, Sequence[Row]]], Measured | None]:
    """Returns the measure of benchmarks.pass_at_64: tasks that 64 samples of SFT never solve."""

    def measure(files: Mapping[str, Sequence[Row]]) -> Measured | None:
        found = pass_at_64.summarize(files["pass_at_64"])
        if not found or len(found[suite]["seeds"]) < 2 or "rl" not in found[suite]["gain"]:
            return None
        gain, curves = found[suite]["gain"]["rl"], found[suite]["pass_at_k"]
        points: list[Point] = [
            (f"{name}, {k}", *curves[name][k])
            for name in sorted(curves, key=("sft", "rft", "rl").index)
            for k in (min(curves[name], key=int), max(curves[name], key=int))
        ]
        return Measured(gain["difference"], gain["low"], gain["high"], found[suite]["seeds"], points)

    return measure


def chain(files: Mapping[str, Sequence[Row]]) -> Measured | None:
    """Joint minus frozen. Rows of the chain have no rates by task, so the interval is over the seeds' differences."""
    runs = _by_seed(files["memory_chain"], "sft", "frozen", "joint")
    if runs is None:
        return None
    differences = [runs["joint"][seed]["pass_at_1"] - runs["frozen"][seed]["pass_at_1"] for seed in runs["joint"]]
    points = [_point(name, [row["pass_at_1"] for row in of.values()]) for name, of in runs.items()]
    return Measured(sum(differences) / len(differences), *interval(differences), sorted(runs["joint"]), points)


def changed_rule(files: Mapping[str, Sequence[Row]]) -> Measured | None:
    """Half of what imitation of solved episodes loses when the rule changes, minus what RL loses."""
    rows = files["rule_change"]
    seeds = rule_change.common_seeds(rows)
    if len(seeds) < 2:
        return None
    spared = rule_change.spared(rows, seeds)
    points = []
    for name in rule_change.POLICIES:
        same, changed, _ = rule_change.losses(rows, name, seeds)
        points += [
            _point(f"{name}, {rule}", [of[t] for t in sorted(of)]) for rule, of in (("old", same), ("new", changed))
        ]
    differences = [spared[task] for task in sorted(spared)]
    return Measured(sum(differences) / len(differences), *interval(differences), seeds, points)


def _lookups(files: Mapping[str, Sequence[Row]]) -> parallel_calls.Runs | None:
    """Returns the runs of the seeds that all variants of benchmarks.parallel_calls have; None if fewer than two."""
    runs = parallel_calls.runs_of_whole_seeds(files["parallel_calls"])
    return runs if len(runs[parallel_calls.SFT]) > 1 else None


RISE = 0.3
"""The rise of calls per message that the claim asks for."""


def _rise(runs: parallel_calls.Runs, variants: Sequence[str], threshold: float) -> Measured:
    """Returns how far calls per message of the last variant exceed those of the one before it, relatively, beyond a
    threshold: for each seed, in the mean of the suites."""
    *_, to, of = variants
    by_suite = [parallel_calls.ratios(runs, suite, "calls_per_turn", of, to) for suite in parallel_calls.LOOKUPS]
    rises = [sum(ratios) / len(ratios) - 1 - threshold for ratios in zip(*by_suite, strict=True)]
    points = [
        _point(name, [s["calls_per_turn"] for row in runs[name].values() for s in row["suites"].values()])
        for name in variants
    ]
    return Measured(sum(rises) / len(rises), *interval(rises), list(runs[of]), points)


def more_parallel_calls(files: Mapping[str, Sequence[Row]]) -> Measured | None:
    """How much more calls per message rise with a price of messages than by RISE."""
    if (runs := _lookups(files)) is None:
        return None
    return _rise(runs, (parallel_calls.SFT, parallel_calls.FREE, parallel_calls.PRICED), RISE)


def inflated_by_deviation(files: Mapping[str, Sequence[Row]]) -> Measured | None:
    """How much calls per message rise at a negligible price if advantages are divided by the standard deviation."""
    if (runs := _lookups(files)) is None:
        return None
    return _rise(runs, (parallel_calls.FREE, parallel_calls.PRICED, parallel_calls.TINY, parallel_calls.TINY_STD), 0.0)


def solved_without_deviation(files: Mapping[str, Sequence[Row]]) -> Measured | None:
    """How many tasks with many files RL solves more if its advantages are not divided by the standard deviation."""
    if (runs := _lookups(files)) is None:
        return None
    names = (parallel_calls.SFT, parallel_calls.TINY_STD, parallel_calls.TINY)
    rates = {name: _rates(runs[name], ManyLookups.FAMILY) for name in names}
    return _difference(rates, parallel_calls.TINY, parallel_calls.TINY_STD)


def shorter_easy_tasks(files: Mapping[str, Sequence[Row]]) -> Measured | None:
    """The fraction of messages that the price saves where there are few files, minus that where there are many."""
    if (runs := _lookups(files)) is None:
        return None
    seeds = list(runs[parallel_calls.SFT])
    saved = {
        suite: [1 - ratio for ratio in parallel_calls.ratios(runs, suite, "turns")] for suite in parallel_calls.LOOKUPS
    }
    easy, hard = saved.values()
    differences = [few - many for few, many in zip(easy, hard, strict=True)]
    points = [_point(name, of) for name, of in saved.items()]
    return Measured(sum(differences) / len(differences), *interval(differences), seeds, points)


HARD = "two_bugs"
HARD_AXIS = "pass@1 of two bugs"
CLAIMS: Mapping[str, Claim] = {
    "rl_lifts_pass_at_1": Claim(
        "RL solves more held-out tasks at the first attempt than SFT sampled greedily.",
        HARD_AXIS,
        pass_rates(HARD, "rl", "sft_greedy", "sft"),
    ),
    "rl_beats_rejection_sampling": Claim(
        "RL beats fine-tuning on the solved episodes of SFT, of the same tasks and as many sampled tokens.",
        HARD_AXIS,
        pass_rates(HARD, "rl", "rft", "sft"),
    ),
    "rl_beats_rejection_sampling_on_chains": Claim(
        "The same for chains, of which a guess solves an eighth and rejection sampling learns from such episodes, too.",
        "pass@1 of chains with summaries",
        pass_rates("chain", "rl", "rft", "sft"),
    ),
    "rl_needs_its_rewards": Claim(
        "RL beats the same RL whose advantages are dealt at random.",
        HARD_AXIS,
        pass_rates(HARD, "rl", "rl_random_advantages", "sft"),
    ),
    "rl_solves_what_64_samples_do_not": Claim(
        "Of the tasks that 64 samples of SFT never solve, RL solves more than 64 further samples do.",
        "pass@1 and pass@64 of three bugs",
        unsolved_by_64("three_bugs"),
    ),
    "summaries_need_their_own_loss": Claim(
        "RL that trains its summaries carries more than RL that trains everything else.",
        "pass@1 of chains with summaries",
        pass_rates("chain", "rl", "rl_masked_summaries", "sft"),
    ),
    "summaries_need_their_own_credit": Claim(
        "Summaries learn from the episode that goes on from them, not from another one of the task.",
        "pass@1 of chains with summaries",
        pass_rates("chain", "rl", "rl_other_summaries", "sft"),
    ),
    "trained_summaries_halve_the_error": Claim(
        "Trained summaries have at most half of the compaction error of prompted reports, without a price of length.",
        "compaction error of chains",
        summary_errors,
    ),
    "joint_beats_frozen": Claim(
        "A fact survives three summaries if RL trains them, and not if it trains all but them.",
        "pass@1 of the memory chain",
        chain,
    ),
    "rl_survives_a_rule_change": Claim(
        "When the rule of the training tasks changes, RL loses at most half of what SFT on solved episodes loses.",
        "pass@1 of one bug, old and new rule",
        changed_rule,
    ),
    "price_raises_parallel_calls": Claim(
        f"A price of messages raises calls per message by at least {RISE:.0%} over the same RL without it.",
        "calls per message",
        more_parallel_calls,
        is_rate=False,
    ),
    "std_normalisation_inflates_small_differences": Claim(
        "Advantages divided by the standard deviation of their group make a hundredth of that price matter.",
        "calls per message",
        inflated_by_deviation,
        is_rate=False,
    ),
    "std_normalisation_costs_solved_tasks": Claim(
        "At that price RL solves more tasks if its advantages are not divided by the standard deviation.",
        "pass@1 of lookups in four files",
        solved_without_deviation,
    ),
    "price_shortens_easy_tasks_more": Claim(
        "The length cost, which bends down, saves a larger part of easy tasks than of hard ones.",
        "messages saved",
        shorter_easy_tasks,
    ),
}
"""Name -> claim, in the order of docs/science.md."""


NAMES = {
    "sft": "before RL",
    "sft_greedy": "greedy before RL",
    "rft": "rejection sampling",
    "rl": "RL",
    "rl_masked_summaries": "masked summaries",
    "rl_other_summaries": "others' summaries",
    "rl_random_advantages": "random advantages",
    "rl_price_0": "RL, no price",
    "prompted_summaries": "prompted",
    "frozen": "masked summaries",
    "joint": "RL",
    "free": "RL, no price",
    "priced": "RL, price",
    "tiny_price": "price / 100",
    "tiny_price_std": "price / 100, std",
}
"""Policy of a row -> its name in a picture; others keep theirs."""


FILES = ("controls", "pass_at_64", "memory_chain", "rule_change", "parallel_calls")
"""Benchmarks whose rows claims read."""


def _name(policy: str) -> str:
    """Returns the name of a policy in a picture; what follows a comma stays: "rft, new"."""
    head, comma, rest = policy.partition(",")
    return NAMES.get(head, head.replace("_", " ")) + comma + rest


def draw(claim: Claim, measured: Measured, path: Path) -> Path:
    """Draws the policies of a claim with their intervals."""
    figure, (ax,) = new_figure(LIGHT, 4.6, 2.6)
    for i, (_, mean, low, high) in enumerate(measured.points):
        color = LIGHT.palette[0] if i == len(measured.points) - 1 else LIGHT.muted
        ax.errorbar(
            i, mean, [[max(0, mean - low)], [max(0, high - mean)]], fmt="o", color=color, capsize=3, markersize=5
        )
        ax.annotate(
            f"{mean:.0%}" if claim.is_rate else f"{mean:.2f}",
            (i, mean),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=8.5,
        )
    names = [_name(name) for name, *_ in measured.points]
    ax.set_xticks(
        range(len(names)), names, rotation=20 if len(names) > 3 else 0, ha="right" if len(names) > 3 else "center"
    )
    ax.set_xlim(-0.5, len(measured.points) - 0.2)
    if claim.is_rate:
        percent_y_axis(ax)
    ax.set_title(claim.axis, loc="left", fontsize=9, color=LIGHT.muted)
    return save_figure(figure, path)


def read_rows(folder: Path, seeds: Sequence[int] | None = None) -> dict[str, list[Row]]:
    """Returns the rows of each file that claims use, of all seeds or of some; [] for a file that does not exist."""
    files = {}
    for name in FILES:
        path = folder / f"{name}.json"
        rows = json.loads(path.read_bytes()) if path.exists() else []
        files[name] = [row for row in rows if seeds is None or row["seed"] in seeds]
    return files


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("docs/data"), help="folder of the rows (default: docs/data)")
    parser.add_argument("--seeds", type=integers, help="comma-separated integers (default: all that have rows)")
    parser.add_argument("--pictures", type=Path, help="folder for one picture per claim (default: none)")
    o = parser.parse_args(argv)
    if not o.data.is_dir():
        parser.error(f"--data={o.data} is no folder; give the folder that has controls.json")
    files = read_rows(o.data, o.seeds)
    results: dict[str, Any] = {}
    for name, claim in CLAIMS.items():
        try:
            measured = claim.measure(files)
        except UserError as error:
            parser.error(str(error))
        results[name] = measured and {
            "holds": measured.holds,
            **{field: round(getattr(measured, field), 4) for field in ("effect", "low", "high")},
            "seeds": list(measured.seeds),
        }
        if measured is None:
            print(f"not measured   {claim.sentence}", file=sys.stderr)
            continue
        words = "holds         " if measured.holds else "does not hold "
        interval_text = f"{measured.effect:+.3f} [{measured.low:+.3f}, {measured.high:+.3f}]"
        print(f"{words} {interval_text} {claim.sentence}", file=sys.stderr)
        if o.pictures:
            draw(claim, measured, o.pictures / f"{name}.png")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
