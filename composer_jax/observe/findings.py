"""results.json in words: the headline, sentences, tables and marks of a report.

What was evaluated is read from the data: results.json holds the measures of every suite under suites.NAME.before and
suites.NAME.after, and config.json says what each suite is (evaluate.suites).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

Results = Mapping[str, Any]
Pair = tuple[float | None, float | None]
"""A measure before and after RL; None where it is missing."""
Kind = Literal["rate", "tokens", "error"]
"""rate: a fraction, more is better. tokens: a count, less is better. error: a difference of rates, less is better."""

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
    def title(self) -> str:
        compaction = self.config.get("compaction", "none")
        condition = "" if compaction == "none" else f", compaction {compaction!r}"
        return f"{_readable(self.name)}: {self.split} tasks of {_readable(self.family)}{condition}"

    def pair(self, measure: str) -> Pair:
        """Returns a measure before and after RL."""
        return number_at(self.before, measure), number_at(self.after, measure)


@dataclasses.dataclass(frozen=True)
class TableRow:
    """A measure with its numbers as text; `verdict` is "better", "worse" or "" (same or unknown)."""

    name: str
    meaning: str
    base: str
    """Of the untouched base; "" in a suite in which none was measured."""
    before: str
    after: str
    change: str
    verdict: str


def read_suites(results: Results, config: Mapping[str, Any]) -> list[SuiteMeasures]:
    """Returns the measured suites: those that config.json names for the headline first, then the others in order."""
    configs = lookup(config, "evaluate.suites") or {}
    measured = lookup(results, "suites") or {}
    headline = [name for name in lookup(config, "evaluate.headline") or () if name in measured]
    return [
        SuiteMeasures(
            name,
            configs.get(name, {}),
            measured[name].get("before") or {},
            measured[name].get("after") or {},
            measured[name].get("base") or {},
            measured[name].get("greedy") or {},
        )
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


def headline(results: Results, suites: list[SuiteMeasures]) -> str:
    """Returns the result of the first suite in one short sentence, or how far the run is."""
    if suites:
        before, after = suites[0].pair("pass_at_1")
        where = f"of {_readable(suites[0].name)}"
        if before is not None and after is not None:
            return f"Pass@1 {where} {_moved(before, after)}"
        if before is not None:
            return f"Pass@1 {where} is {_percent(before)} before RL; RL is not done yet"
        if (base := number_at(suites[0].base, "pass_at_1")) is not None:
            return f"Pass@1 {where} is {_percent(base)} for the untouched base; no training stage is measured yet"
    first, last = number_at(results, "cpt.heldout_nll_first"), number_at(results, "cpt.heldout_nll_last")
    if first is not None and last is not None:
        return f"Held-out loss went from {first:.2f} to {last:.2f} nats per token; RL is not done yet"
    return "This run has no results yet"


def sentences(suites: list[SuiteMeasures]) -> list[str]:
    """Returns a sentence for each measure beside the headline that was taken before and after RL, or of the base."""
    texts = []
    for place, suite in enumerate(suites):
        name = _readable(suite.name)
        measures = [("pass_at_1", "Pass@1", "%")] if place else []
        if not place and suite.attempts > 1:
            measures.append(("pass_at_k", f"Pass@{suite.attempts}", "%"))
        measures.append(("compaction_error", "Compaction error", " points"))
        for key, label, unit in measures:
            before, after = suite.pair(key)
            if before is not None and after is not None:
                texts.append(f"{label} of {name} {_moved(before, after, unit)}.")
        before, after = suite.pair("tokens_per_summary")
        if before and after:
            texts.append(f"Summaries of {name} went from {before:.1f} to {after:.1f} tokens each.")
        if gain := suite.greedy.get("rl_minus"):
            greedy = _percent(suite.greedy["pass_at_1"])
            texts.append(f"Greedy sampling before RL passes {greedy} of {name}; RL {_compared(gain)}.")
        if (base := number_at(suite.base, "pass_at_1")) is not None:
            texts.append(f"The untouched base passes {_percent(base)} of {name}.")
    return texts


def suite_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the suites that have rows in metrics/evaluate_STAGE.jsonl, in the order of their first ones."""
    columns = dict.fromkeys(column for row in rows for column in row if column.startswith(PASS_AT_1))
    return [column.removeprefix(PASS_AT_1) for column in columns]


def training_sentences(stage: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a sentence for each suite that ran while a stage trained: from its first row to its last.

    stage: its name as a sentence shows it, such as "RL".
    """
    texts = []
    for name in suite_names(rows):
        known = [row for row in rows if f"{PASS_AT_1}{name}" in row]
        first, last = known[0], known[-1]
        interval = f"95% interval {100 * last[f'low_{name}']:.0f} to {100 * last[f'high_{name}']:.0f}"
        rate, where = last[f"{PASS_AT_1}{name}"], f"Pass@1 of {_readable(name)}"
        if len(known) > 1:
            moved = _moved(first[f"{PASS_AT_1}{name}"], rate)
            texts.append(f"{where} {moved} between steps {first['step']} and {last['step']} of {stage} ({interval}).")
        else:
            texts.append(f"{where} is {_percent(rate)} after step {last['step']} of {stage} ({interval}).")
    return texts


def control_sentences(results: Results) -> list[str]:
    """Returns a sentence for each control: how the final policy differs from it, with the interval over tasks."""
    texts = []
    for name, compared in (lookup(results, "controls") or {}).items():
        texts.append(f"On {compared['tasks']} tasks, RL {_compared(compared, f'the control {_readable(name)}')}.")
    return texts


def _compared(difference: Mapping[str, float], control: str = "it") -> str:
    """Returns what a difference of pass@1, RL minus a control, says: "beats it by 12.0 points (95% ...)"."""
    points = {key: 100 * difference[key] for key in ("difference", "low", "high")}
    between = f"95% interval {points['low']:+.1f} to {points['high']:+.1f}"
    if points["low"] > 0:
        return f"beats {control} by {points['difference']:.1f} points ({between})"
    if points["high"] < 0:
        return f"is worse than {control} by {-points['difference']:.1f} points ({between})"
    return f"is not shown to differ from {control}: {points['difference']:+.1f} points ({between})"


def run_facts(results: Results) -> list[tuple[str, str]]:
    """Returns the size of the run as (what, how much) pairs for the head of the report."""
    facts = [
        ("Pretraining", _amount(number_at(results, "cpt.tokens"), "tokens")),
        ("Supervised fine-tuning", _amount(number_at(results, "sft.tokens"), "tokens")),
        ("RL", _amount(number_at(results, "rl.steps"), "steps")),
        ("RL episodes", _amount(number_at(results, "rl.episodes"), "")),
        ("Gap of sampler and learner", _amount(number_at(results, "rl.weight_gap_max"), "nats", digits=4)),
        ("Wall time", format_duration(number_at(results, "wall_seconds"))),
        ("Peak memory", _amount(number_at(results, "peak_rss_gb"), "GB", digits=1)),
        ("Training", _amount(number_at(results, "throughput.train_tokens_per_s"), "tokens/s")),
        ("Decoding", _amount(number_at(results, "throughput.decode_tokens_per_s"), "tokens/s")),
        ("Sandbox", _amount(number_at(results, "throughput.sandbox_runs_per_s"), "runs/s")),
    ]
    return [(what, amount) for what, amount in facts if amount]


def result_tables(suites: list[SuiteMeasures]) -> list[tuple[str, list[TableRow]]]:
    """Returns (title, rows) of every suite; measures without a number are left out, and so are empty suites."""
    tables = [(suite.title, list(_rows(suite))) for suite in suites]
    return [(title, rows) for title, rows in tables if rows]


def _rows(suite: SuiteMeasures) -> Iterator[TableRow]:
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
    uncompacted = _readable(suite.config.get("compare_to", ""))
    measures.append(("compaction_error", "Compaction error", f"pass@1 of {uncompacted} minus pass@1 here", "error"))
    if any(suite.pair("tokens_per_summary")):
        measures.append(("tokens_per_summary", "Summary tokens", "tokens of one summary, mean", "tokens"))
    for key, name, meaning, kind in measures:
        before, after = suite.pair(key)
        if before is not None or after is not None:
            change, verdict = _change(kind, before, after)
            base = _cell(kind, suite.base, key) if suite.base else ""
            at_start, at_end = _cell(kind, suite.before, key), _cell(kind, suite.after, key)
            yield TableRow(name, meaning, base, at_start, at_end, change, verdict)


def overview_scores(suites: list[SuiteMeasures]) -> list[tuple[str, float | None, float | None, float | None]]:
    """Returns (label, base, before, after) rates for the overview picture."""
    measures = []
    for place, suite in enumerate(suites):
        name = _readable(suite.name)
        measures.append((f"{name}, pass@1", suite, "pass_at_1"))
        if not place and suite.attempts > 1:
            measures.append((f"{name}, pass@{suite.attempts}", suite, "pass_at_k"))
        measures.append((f"{name}, compaction error ↓", suite, "compaction_error"))
    scores = [(label, number_at(suite.base, key), *suite.pair(key)) for label, suite, key in measures]
    return [score for score in scores if score[1:] != (None, None, None)]


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
    return [(_readable(name), format_duration(s), 100 * s / total) for name, s in known.items()]


def format_duration(seconds: float | None) -> str:
    """Formats seconds: "8.2 s", "3 min 20 s", "1 h 05 min"; "" for None."""
    if seconds is None:
        return ""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _readable(name: str) -> str:
    return name.replace("_", " ")


def _moved(before: float, after: float, unit: str = "%") -> str:
    a, b = f"{100 * before:.0f}", f"{100 * after:.0f}"
    if a == b:
        return f"stayed at {b}{unit}"
    return f"{'rose' if after > before else 'fell'} from {a}{unit if unit == '%' else ''} to {b}{unit}"


def _change(kind: Kind, before: float | None, after: float | None) -> tuple[str, str]:
    if before is None or after is None:
        return "", ""
    difference = after - before
    text = f"{difference:+.1f}" if kind == "tokens" else f"{100 * difference:+.1f} points"
    if float(text.split()[0]) == 0:
        return "no change", ""
    is_better = difference > 0 if kind == "rate" else difference < 0
    if kind == "tokens" and before:
        text = f"{100 * difference / before:+.0f}%"
    return text.replace("-", "\N{MINUS SIGN}"), "better" if is_better else "worse"


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


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def _amount(value: float | None, unit: str, digits: int = 0) -> str:
    if value is None:
        return ""
    text = f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value:,.{digits}f}"
    return f"{text} {unit}".strip()
