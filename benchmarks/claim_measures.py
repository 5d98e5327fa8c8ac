"""The differences that benchmarks.claims prints, each from the rows of one benchmark (Files).

A measure takes the rows of every file by its name without ".json", and returns its difference, or None if its rows are
missing or exist for one seed only.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks import length_normalisation, parallel_calls, pass_at_64, rule_change
from benchmarks.seeded_runs import Row, runs_of_common_seeds
from composer_jax.demo.lookups import ManyLookups
from composer_jax.errors import UserError
from composer_jax.evals.interval import interval

Files = Mapping[str, Sequence[Row]]
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


Measure = Callable[[Files], Measured | None]


RISE = 0.3
"""The rise of calls per message that the claim asks for."""
TRAINED = "rl_price_0"
"""The control whose summaries RL trains without a price of length."""


def _by_seed(rows: Sequence[Row], *variants: str) -> dict[str, dict[int, Row]] | None:
    """Returns variant -> seed -> row, for the seeds that all variants have; None if there are fewer than two."""
    runs = runs_of_common_seeds(rows, variants)
    return runs if len(runs[variants[0]]) > 1 else None


def _rates(runs: Mapping[int, Row], suite: str) -> Rates:
    return {(seed, task): rate for seed, row in runs.items() for task, rate in row["suites"][suite]["solved"].items()}


def _point(name: str, values: Sequence[float]) -> Point:
    return (name, sum(values) / len(values), *interval(values))


def _difference(values: Mapping[str, Rates], minuend: str, subtrahend: str) -> Measured:
    """Returns minuend - subtrahend, paired by task.

    Raises:
      UserError: the two were measured on other tasks.
    """
    ours, theirs = values[minuend], values[subtrahend]
    if ours.keys() != theirs.keys():
        raise UserError(f"{minuend!r} and {subtrahend!r} were measured on other tasks; measure one of them again.")
    tasks = sorted(ours)
    differences = [ours[task] - theirs[task] for task in tasks]
    points = [_point(name, [of[task] for task in sorted(of)]) for name, of in values.items()]
    seeds = sorted({seed for seed, _ in tasks})
    return Measured(sum(differences) / len(differences), *interval(differences), seeds, points)


def pass_rates(suite: str, better: str, worse: str, *others: str) -> Measure:
    """Returns the measure of pass@1 of one control minus another; `others` are in the picture only."""

    def measure(files: Files) -> Measured | None:
        runs = _by_seed(files["controls"], *others, worse, better)
        if runs is None:
            return None
        return _difference({name: _rates(of, suite) for name, of in runs.items()}, better, worse)

    return measure


def half_the_error(prompted: str, *others: str) -> Measure:
    """Returns the measure of the compaction error: half of that of a control, minus that of summaries trained without a
    price of length; `others` are in the picture only."""

    def measure(files: Files) -> Measured | None:
        runs = _by_seed(files["controls"], prompted, *others, TRAINED)
        if runs is None:
            return None
        errors: dict[str, Rates] = {}
        for name, of in runs.items():
            whole, compacted = _rates(of, "chain_whole"), _rates(of, "chain")
            errors[name] = {task: whole[task] - compacted[task] for task in whole}
        halves = {task: error / 2 for task, error in errors[prompted].items()}
        measured = _difference({prompted: halves, TRAINED: errors[TRAINED]}, prompted, TRAINED)
        return replace(measured, points=[_point(name, list(of.values())) for name, of in errors.items()])

    return measure


def unsolved_by_64(suite: str) -> Measure:
    """Returns the measure of benchmarks.pass_at_64: tasks that 64 samples of SFT never solve."""

    def measure(files: Files) -> Measured | None:
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


def chain(files: Files) -> Measured | None:
    """Joint minus frozen. Rows of the chain have no rates by task, so the interval is over the seeds' differences."""
    runs = _by_seed(files["memory_chain"], "sft", "frozen", "joint")
    if runs is None:
        return None
    differences = [runs["joint"][seed]["pass_at_1"] - runs["frozen"][seed]["pass_at_1"] for seed in runs["joint"]]
    points = [_point(name, [row["pass_at_1"] for row in of.values()]) for name, of in runs.items()]
    return Measured(sum(differences) / len(differences), *interval(differences), sorted(runs["joint"]), points)


def changed_rule(files: Files) -> Measured | None:
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


def _lookups(files: Files) -> parallel_calls.Runs | None:
    """Returns the runs of the seeds that all variants of benchmarks.parallel_calls have; None if fewer than two."""
    return _by_seed(files["parallel_calls"], *parallel_calls.VARIANTS)


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


def more_parallel_calls(files: Files) -> Measured | None:
    """How much more calls per message rise with a price of messages than by RISE."""
    if (runs := _lookups(files)) is None:
        return None
    return _rise(runs, (parallel_calls.SFT, parallel_calls.FREE, parallel_calls.PRICED), RISE)


def inflated_by_deviation(files: Files) -> Measured | None:
    """How much calls per message rise at a negligible price if advantages are divided by the standard deviation."""
    if (runs := _lookups(files)) is None:
        return None
    return _rise(runs, (parallel_calls.FREE, parallel_calls.PRICED, parallel_calls.TINY, parallel_calls.TINY_STD), 0.0)


def solved_without_deviation(files: Files) -> Measured | None:
    """How many tasks with many files RL solves more if its advantages are not divided by the standard deviation."""
    if (runs := _lookups(files)) is None:
        return None
    names = (parallel_calls.SFT, parallel_calls.TINY_STD, parallel_calls.TINY)
    rates = {name: _rates(runs[name], ManyLookups.FAMILY) for name in names}
    return _difference(rates, parallel_calls.TINY, parallel_calls.TINY_STD)


def shorter_easy_tasks(files: Files) -> Measured | None:
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


def longer_failures(files: Files) -> Measured | None:
    """How many tokens more failed attempts have after RL whose loss is divided by each episode's length."""
    runs = _by_seed(files["length_normalisation"], *length_normalisation.VARIANTS)
    if runs is None:
        return None
    failed = length_normalisation.failures_of_both(runs, length_normalisation.ALL)
    return _difference(failed, length_normalisation.BY_LENGTH, length_normalisation.CONSTANT)


def harder_tasks(suite: str) -> Measure:
    """Returns the measure of benchmarks.ladder: pass@1 after RL on a ladder minus that on a fixed mix."""

    def measure(files: Files) -> Measured | None:
        runs = _by_seed(files["ladder"], "fixed", "ladder")
        if runs is None:
            return None
        return _difference({name: _rates(of, suite) for name, of in runs.items()}, "ladder", "fixed")

    return measure


def faster_than(control: str) -> Measure:
    """Returns the measure of benchmarks.feedback: malformed calls during RL of a control minus those with feedback.

    Rows have a fraction per step and no tasks. A run's number is the mean over its steps, and the interval is over the
    seeds' differences.
    """

    def measure(files: Files) -> Measured | None:
        runs = _by_seed(files["feedback"], control, "feedback")
        if runs is None:
            return None
        during = {name: [statistics.fmean(row["malformed"]) for row in of.values()] for name, of in runs.items()}
        differences = [theirs - ours for theirs, ours in zip(during[control], during["feedback"], strict=True)]
        points = [_point(name, of) for name, of in during.items()]
        return Measured(statistics.fmean(differences), *interval(differences), sorted(runs[control]), points)

    return measure


def replayed_routes(files: Files) -> Measured | None:
    """Half of the gap of log-probabilities without router replay minus that with it, at the 99th percentile, for the
    bfloat16 engine; over the seeds of the variant that the most have."""
    rows = files["router_replay"]
    variants = [row["variant"] for row in rows]
    most = max(variants, key=variants.count, default="")
    seeds = {row["seed"]: row["engines"]["bfloat16"] for row in rows if row["variant"] == most}
    if len(seeds) < 2:
        return None
    p99 = {way: [of[way]["p99"] for of in seeds.values()] for way in ("without", "replay")}
    differences = [without / 2 - replay for without, replay in zip(p99["without"], p99["replay"], strict=True)]
    points = [_point(name, of) for name, of in p99.items()]
    return Measured(statistics.fmean(differences), *interval(differences), sorted(seeds), points)
