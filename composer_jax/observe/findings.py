"""results.json in words: the headline, tables and marks of a report.

What was evaluated is read from the data: results.json holds the measures of every suite under suites.NAME.before and
suites.NAME.after, how they differ under suites.NAME.change, and config.json says what each suite is (evaluate.suites).
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Results = Mapping[str, Any]
Pair = tuple[float | None, float | None]
"""A measure before and after RL; None where it is missing."""
Kind = Literal["rate", "tokens", "error"]
"""rate: a fraction. tokens: a count. error: a difference of rates."""

VERDICTS = ("worse", "better", "not shown to differ")
"""What the 95 % interval of a difference says, in the order of a report."""

MIN_TASKS = 6
"""Tasks from which on a difference can be shown: one sign on all of n tasks has probability 2 * 0.5**n by chance, which
is below 0.05 from 6 on (sign test). The bootstrap interval of fewer tasks is too narrow."""

PASS_AT_1 = "pass_at_1_"
"""Beginning of the columns of metrics/evaluate_STAGE.jsonl with pass@1 of a suite, whose name follows."""

FROM_DISK = "heldout_"
"""Beginning of the names of the suites of tasks.heldout, which config.json does not list one by one."""


@dataclasses.dataclass(frozen=True)
class SuiteMeasures:
    """A suite of the config with its measures before and after RL."""

    name: str
    config: Mapping[str, Any]
    """Its entry of evaluate.suites; empty for a suite of tasks.heldout."""
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    base: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Measures of the untouched base; empty in a run without one."""
    greedy: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Measures of the policy before RL with its most probable tokens, and how far RL is from them ("rl_minus")."""
    change: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Pass@1 of the last evaluation ("to") minus that of the one before ("from"), paired by task, with its interval;
    empty after one evaluation."""

    @property
    def family(self) -> str:
        return self.config.get("family") or self.name.removeprefix(FROM_DISK)

    @property
    def split(self) -> str:
        return self.config.get("split", "heldout")

    @property
    def attempts(self) -> int:
        """k of the suite's pass@k: the attempts per task that were drawn."""
        return int((self.after or self.before or self.base).get("attempts", 1))

    @property
    def tasks(self) -> int:
        """Tasks that the last evaluation graded."""
        return int((self.after or self.before or self.base).get("tasks", 0))

    @property
    def about(self) -> str:
        compaction = self.config.get("compaction", "none")
        condition = "" if compaction == "none" else f", compaction {compaction!r}"
        return f"{self.split} tasks of {readable(self.family)}{condition}"

    @property
    def verdict(self) -> str:
        """One of VERDICTS; "" where nothing was compared."""
        return verdict(self.change)

    def pair(self, measure: str) -> Pair:
        """Returns a measure before and after RL."""
        return number_at(self.before, measure), number_at(self.after, measure)


@dataclasses.dataclass(frozen=True)
class TableRow:
    """A measure with its numbers as text."""

    name: str
    meaning: str
    values: tuple[str, ...]
    """One for each column of the table."""
    change: str
    """How far the last number is from the one before; empty where one of them is missing."""
    verdict: str = ""
    """One of VERDICTS; "" for a measure without an interval."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows with a column for each policy, and how far the last one is from the one before."""

    title: str
    columns: tuple[str, ...]
    change: str
    """Title of the column of changes."""
    rows: list[TableRow]


class Score(NamedTuple):
    """A measure of the base, before and after RL, as fractions; None where it is missing."""

    label: str
    base: float | None
    before: float | None
    after: float | None
    low: float | None = None
    """The number before the change plus the lower end of its 95 % interval, cut at 0 and 1; None without one."""
    high: float | None = None


def read_suites(results: Results, config: Mapping[str, Any]) -> list[SuiteMeasures]:
    """Returns the measured suites: those that config.json names for the headline first, then the others in order."""
    configs = lookup(config, "evaluate.suites") or {}
    measured = lookup(results, "suites") or {}
    headline = [name for name in lookup(config, "evaluate.headline") or () if name in measured]
    parts = ("before", "after", "base", "greedy", "change")
    return [
        SuiteMeasures(name, configs.get(name, {}), **{part: measured[name].get(part) or {} for part in parts})
        for name in dict.fromkeys((*headline, *measured))
        if measured[name].keys() & {"base", "before", "after"}  # not the pooled results of a policy
    ]


def lookup(results: Results, path: str) -> Any:
    """Returns the value at a dotted path, or None where any part of the path is missing."""
    value: Any = results
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def number_at(results: Results, path: str) -> float | None:
    """Returns the number at a dotted path, or None."""
    value = lookup(results, path)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def policy_titles(suites: Sequence[SuiteMeasures], config: Mapping[str, Any]) -> dict[str, str]:
    """Returns policy -> its title for those of "base", "before" and "after" that were evaluated, in this order."""
    before = "Before RL" if "rl" in config.get("stages", ("rl",)) else "Trained"
    titles = {"base": "Base", "before": before, "after": "After RL"}
    return {policy: title for policy, title in titles.items() if any(getattr(suite, policy) for suite in suites)}


def verdict(difference: Mapping[str, float]) -> str:
    """Returns which of VERDICTS the 95 % interval of a difference supports; "" for no difference."""
    if not difference:
        return ""
    if difference["tasks"] < MIN_TASKS or difference["low"] <= 0 <= difference["high"]:
        return "not shown to differ"
    return "better" if difference["low"] > 0 else "worse"


def by_verdict(suites: Sequence[SuiteMeasures]) -> list[SuiteMeasures]:
    """Returns the suites as a report opens with them: what became worse first, what was not compared last."""
    return sorted(suites, key=lambda suite: (*VERDICTS, "").index(suite.verdict))


def headline(results: Results, suites: Sequence[SuiteMeasures], titles: Mapping[str, str]) -> str:
    """Returns how many suites have which verdict in one short sentence, or how far the run is."""
    if counts := Counter(suite.verdict for suite in suites if suite.change):
        first, *others = [f"{counts[name]} {name}" for name in VERDICTS if counts[name]]
        first = first.replace(" ", f" of {_count(counts.total(), 'suite')} ", 1)
        return f"{[*titles.values()][-1]}: {', '.join([first, *others])}"
    if titles:
        return f"{[*titles.values()][-1]}: {_count(len(suites), 'suite')} measured, none compared"
    first, last = number_at(results, "cpt.heldout_nll_first"), number_at(results, "cpt.heldout_nll_last")
    if first is not None and last is not None:
        return f"Held-out loss went from {first:.2f} to {last:.2f} nats per token; no suite is measured yet"
    return "This run has no results yet"


def suite_table(suites: Sequence[SuiteMeasures], titles: Mapping[str, str]) -> Table:
    """Returns the table that a report opens with: pass@1 of every suite and its verdict."""
    rows = [
        TableRow(
            readable(suite.name),
            _count(suite.tasks, f"{suite.split} task"),
            tuple(_value("rate", number_at(getattr(suite, policy), "pass_at_1")) for policy in titles),
            _difference(suite.change),
            suite.verdict,
        )
        for suite in by_verdict(suites)
    ]
    return Table("Pass@1", tuple(titles.values()), "Change, 95% interval", rows)


def suite_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the suites that have rows in metrics/evaluate_STAGE.jsonl, in the order of their first ones."""
    columns = dict.fromkeys(column for row in rows for column in row if column.startswith(PASS_AT_1))
    return [column.removeprefix(PASS_AT_1) for column in columns]


def control_tables(results: Results, suites: Sequence[SuiteMeasures]) -> list[Table]:
    """Returns how the final policy differs from each control, greedy sampling before RL and other runs; [] without."""
    controls = [(f"greedy sampling before RL: {readable(suite.name)}", suite.greedy) for suite in by_verdict(suites)]
    for name, difference in (lookup(results, "controls") or {}).items():
        controls.append((readable(name), {**(lookup(results, f"suites.{name}") or {}), "rl_minus": difference}))
    rows = [
        TableRow(
            name,
            _count(difference["tasks"], "task"),
            (_value("rate", number_at(measures, "pass_at_1")),),
            _difference(difference),
            verdict(difference),
        )
        for name, measures in controls
        if (difference := measures.get("rl_minus"))
    ]
    return [Table("Controls", ("Pass@1",), "This run minus it, 95% interval", rows)] if rows else []


def run_facts(results: Results) -> list[tuple[str, str]]:
    """Returns the size of the run as (what, how much) pairs."""
    gap = number_at(results, "rl.weight_gap_max")
    facts = [
        ("Pretraining", _amount(number_at(results, "cpt.tokens"), "tokens")),
        ("Supervised fine-tuning", _amount(number_at(results, "sft.tokens"), "tokens")),
        ("RL", _amount(number_at(results, "rl.steps"), "steps")),
        ("RL episodes", _amount(number_at(results, "rl.episodes"), "")),
        ("Gap of sampler and learner", "" if gap is None else f"{gap:.3g} nats"),
        ("Wall time", format_duration(number_at(results, "wall_seconds"))),
        ("Peak memory", _amount(number_at(results, "peak_rss_gb"), "GB", digits=1)),
        ("Training", _amount(number_at(results, "throughput.train_tokens_per_s"), "tokens/s")),
        ("Decoding", _amount(number_at(results, "throughput.decode_tokens_per_s"), "tokens/s")),
        ("Sandbox", _amount(number_at(results, "throughput.sandbox_runs_per_s"), "runs/s")),
    ]
    return [(what, amount) for what, amount in facts if amount]


def result_tables(suites: Sequence[SuiteMeasures], titles: Mapping[str, str]) -> list[Table]:
    """Returns the measures of every suite; those without a number are left out, and so are empty suites."""
    tables = [
        Table(f"{readable(suite.name)}: {suite.about}", tuple(titles.values()), "Change", list(_rows(suite, titles)))
        for suite in suites
    ]
    return [table for table in tables if table.rows]


def _rows(suite: SuiteMeasures, policies: Iterable[str]) -> Iterator[TableRow]:
    k = suite.attempts
    measures: list[tuple[str, str, str, Kind]] = [
        ("pass_at_1", "Pass@1", "fraction of attempts that pass the hidden tests", "rate")
    ]
    if k > 1:
        measures.append(
            ("pass_at_k", f"Pass@{k}", f"fraction of tasks that at least one of {k} attempts solves", "rate")
        )
    meaning = "pass@1 of the attempts that changed a file"
    measures.append(("pass_given_attempt", "Pass given a change", meaning, "rate"))
    uncompacted = readable(suite.config.get("compare_to", ""))
    measures.append(("compaction_error", "Compaction error", f"pass@1 of {uncompacted} minus pass@1 here", "error"))
    if any(suite.pair("tokens_per_summary")):
        measures.append(("tokens_per_summary", "Summary tokens", "tokens of one summary, mean", "tokens"))
    for key, name, meaning, kind in measures:
        by_policy = [getattr(suite, policy) for policy in policies]
        numbers = [number_at(measured, key) for measured in by_policy]
        if any(number is not None for number in numbers):
            cells = tuple(_cell(kind, measured, key) for measured in by_policy)
            yield TableRow(name, meaning, cells, _change(kind, *numbers[-2:]))


def pass_at_1_scores(suites: Sequence[SuiteMeasures]) -> list[Score]:
    """Returns pass@1 of each suite with the interval of its change."""
    scores = []
    for suite in suites:
        score = Score(readable(suite.name), *_rates(suite, "pass_at_1"))
        if change := suite.change:
            start = getattr(score, change["from"])
            score = score._replace(low=max(0.0, start + change["low"]), high=min(1.0, start + change["high"]))
        scores.append(score)
    return [score for score in scores if score[1:4] != (None, None, None)]


def overview_scores(suites: Sequence[SuiteMeasures]) -> list[Score]:
    """Returns the rates of the overview picture."""
    scores = []
    for place, suite in enumerate(suites):
        name = readable(suite.name)
        scores += [score._replace(label=f"{name}, pass@1") for score in pass_at_1_scores([suite])]
        if not place and suite.attempts > 1:
            scores.append(Score(f"{name}, pass@{suite.attempts}", *_rates(suite, "pass_at_k")))
        scores.append(Score(f"{name}, compaction error ↓", *_rates(suite, "compaction_error")))
    return [score for score in scores if score[1:4] != (None, None, None)]


def _rates(suite: SuiteMeasures, measure: str) -> tuple[float | None, float | None, float | None]:
    return number_at(suite.base, measure), *suite.pair(measure)


def family_marks(suites: list[SuiteMeasures]) -> dict[str, Pair]:
    """Returns {task family: held-out pass@1 before and after RL} by each family's first held-out suite."""
    marks: dict[str, Pair] = {}
    for suite in suites:
        if suite.split == "heldout":
            marks.setdefault(suite.family, suite.pair("pass_at_1"))
    return marks


def phase_fractions(results: Results) -> list[tuple[str, str, float]]:
    """Returns (phase, duration as text, percent of the run) in the order of results.json."""
    seconds = lookup(results, "phases_s")
    if not isinstance(seconds, Mapping):
        return []
    known = {str(name): float(s) for name, s in seconds.items() if isinstance(s, (int, float)) and s >= 0}
    total = sum(known.values()) or 1.0
    return [(readable(name), format_duration(s), 100 * s / total) for name, s in known.items()]


def format_duration(seconds: float | None) -> str:
    """Formats seconds: "8.2 s", "3 min 20 s", "1 h 05 min"; "" for None."""
    if seconds is None:
        return ""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def readable(name: str) -> str:
    """Returns a name of a config as a sentence shows it."""
    return name.replace("_", " ")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _difference(difference: Mapping[str, float]) -> str:
    """Returns a difference of pass@1 in points with its interval: "+12.0 (+3.1 to +20.3)"; "" for none."""
    if not difference:
        return ""
    middle, low, high = (f"{100 * difference[key]:+.1f}" for key in ("difference", "low", "high"))
    return f"{middle} ({low} to {high})".replace("-", "\N{MINUS SIGN}")


def _change(kind: Kind, before: float | None, after: float | None = None) -> str:
    if before is None or after is None:
        return ""
    difference = after - before
    text = f"{difference:+.1f}" if kind == "tokens" else f"{100 * difference:+.1f} points"
    if float(text.split()[0]) == 0:
        return "no change"
    if kind == "tokens" and before:
        text = f"{100 * difference / before:+.0f}%"
    return text.replace("-", "\N{MINUS SIGN}")


def _value(kind: Kind, value: float | None) -> str:
    if value is None:
        return "\N{EN DASH}"
    if kind == "rate":
        return f"{100 * value:.1f}%"
    text = f"{value:.1f}" if kind == "tokens" else f"{100 * value:.1f} points"
    return text.replace("-", "\N{MINUS SIGN}")


def _cell(kind: Kind, measures: Results, key: str) -> str:
    """Returns a measure as text; pass@1 with its 95 % interval over tasks where there is one."""
    text = _value(kind, number_at(measures, key))
    low, high = number_at(measures, "low"), number_at(measures, "high")
    if key != "pass_at_1" or low is None or high is None:
        return text
    return f"{text} ({100 * low:.0f} to {100 * high:.0f})"


def _amount(value: float | None, unit: str, digits: int = 0) -> str:
    if value is None:
        return ""
    text = f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value:,.{digits}f}"
    return f"{text} {unit}".strip()
