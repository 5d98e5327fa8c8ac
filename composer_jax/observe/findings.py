"""results.json in words: the sentences and the table of a report, made from whatever numbers are there."""

import dataclasses
from collections.abc import Mapping
from typing import Any

Results = Mapping[str, Any]

# PASS: a share, more is better. TOKENS: a count, less is better. ERROR: a share, less is better.
PASS, TOKENS, ERROR = "pass", "tokens", "error"


@dataclasses.dataclass(frozen=True)
class Measure:
    """One row of the results table: where its two numbers are in results.json and how to read them."""

    section: str
    name: str
    meaning: str
    before: str  # dotted path in results.json
    after: str
    kind: str  # PASS, TOKENS or ERROR
    baseline: str | None = None  # dotted path of the same number for the long summary that was asked for


@dataclasses.dataclass(frozen=True)
class TableRow:
    """A measure with its numbers written out; `verdict` is "better", "worse" or "" (same or unknown)."""

    name: str
    meaning: str
    before: str
    after: str
    change: str
    verdict: str
    baseline: str


BUGS, MEMORY = "Bug fixing, held-out tasks", "Self-summarization, held-out tasks"
GIVEN = "Tasks of tasks.heldout"
MEASURES = (
    Measure(
        BUGS,
        "Pass@1",
        "share of single attempts that pass the hidden tests",
        "rl.pass_at_1_before",
        "rl.pass_at_1_after",
        PASS,
    ),
    Measure(
        BUGS,
        "Pass@8",
        "share of tasks that at least one of eight attempts passes",
        "rl.pass_at_8_before",
        "rl.pass_at_8_after",
        PASS,
    ),
    Measure(
        BUGS,
        "Pass@1, unseen family",
        "a kind of bug that no training task had",
        "rl.unseen_family_before",
        "rl.unseen_family_after",
        PASS,
    ),
    Measure(
        MEMORY,
        "Pass rate",
        "tasks that do not fit the context, solved across summaries",
        "summary.pass_before",
        "summary.pass_after",
        PASS,
        "summary.prompted_baseline.pass",
    ),
    Measure(
        MEMORY,
        "Compaction error",
        "pass rate lost against a context long enough to need no summary",
        "summary.compaction_error_before",
        "summary.compaction_error_after",
        ERROR,
        "summary.prompted_baseline.compaction_error",
    ),
    Measure(
        MEMORY,
        "Summary tokens",
        "tokens of one summary, mean",
        "summary.tokens_before",
        "summary.tokens_after",
        TOKENS,
        "summary.prompted_baseline.tokens",
    ),
)


def lookup(results: Results, path: str) -> Any:
    """The value at a dotted path, or None where any part of the path is missing."""
    value: Any = results
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def number_at(results: Results, path: str) -> float | None:
    value = lookup(results, path)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def headline(results: Results) -> str:
    """The result in one short sentence; without the numbers, what kind of page this is."""
    before, after = number_at(results, "rl.pass_at_1_before"), number_at(results, "rl.pass_at_1_after")
    if before is not None and after is not None:
        return f"Pass@1 on held-out bugs {_moved(before, after)}"
    if before is not None:
        return f"Before RL, {_percent(before)} of held-out bugs are fixed; RL is not done yet"
    first, last = number_at(results, "cpt.heldout_nll_first"), number_at(results, "cpt.heldout_nll_last")
    if first is not None and last is not None:
        return f"Held-out loss went from {first:.2f} to {last:.2f} nats per token; RL is not done yet"
    return "This run has no results yet"


def findings(results: Results) -> list[str]:
    """What else the numbers say, a sentence each, leaving out what is not there."""
    sentences = []

    def pair(name: str) -> tuple[float, float] | None:
        before, after = number_at(results, f"{name}_before"), number_at(results, f"{name}_after")
        return None if before is None or after is None else (before, after)

    if eight := pair("rl.pass_at_8"):
        sentences.append(f"Pass@8 {_moved(*eight)}.")
    if unseen := pair("rl.unseen_family"):
        sentences.append(f"On a family of bugs never trained on, pass@1 {_moved(*unseen)}.")
    if passed := pair("summary.pass"):
        sentences.append(f"On tasks that need summaries, the pass rate {_moved(*passed)}.")
    if error := pair("summary.compaction_error"):
        sentences.append(f"What summarizing costs (compaction error) {_moved(*error, unit=' points')}.")
    if tokens := pair("summary.tokens"):
        sentences.append(f"Summaries went from {tokens[0]:.1f} to {tokens[1]:.1f} tokens each.")
    return sentences


def what_ran(results: Results) -> list[tuple[str, str]]:
    """The size of the run as (what, how much) pairs for the head of the report."""
    facts = [
        ("Pretraining", _amount(number_at(results, "cpt.tokens"), "tokens")),
        ("Supervised fine-tuning", _amount(number_at(results, "sft.tokens"), "tokens")),
        ("RL", _amount(number_at(results, "rl.steps"), "steps")),
        ("RL episodes", _amount(number_at(results, "rl.episodes"), "")),
        ("Wall time", duration(number_at(results, "wall_seconds"))),
        ("Peak memory", _amount(number_at(results, "peak_rss_gb"), "GB", digits=1)),
        ("Training", _amount(number_at(results, "throughput.train_tokens_per_s"), "tokens/s")),
        ("Decoding", _amount(number_at(results, "throughput.decode_tokens_per_s"), "tokens/s")),
        ("Sandbox", _amount(number_at(results, "throughput.sandbox_runs_per_s"), "runs/s")),
    ]
    return [(what, amount) for what, amount in facts if amount]


def table(results: Results) -> list[tuple[str, list[TableRow]]]:
    """The results table by section; rows without any number are left out, and so are empty sections."""
    sections: dict[str, list[TableRow]] = {}
    for measure in (*MEASURES, *_measures_of_given(results)):
        before, after = number_at(results, measure.before), number_at(results, measure.after)
        if before is None and after is None:
            continue
        baseline = number_at(results, measure.baseline) if measure.baseline else None
        change, verdict = _change(measure.kind, before, after)
        words = [_value(measure.kind, value) for value in (before, after, baseline)]
        row = TableRow(measure.name, measure.meaning, words[0], words[1], change, verdict, words[2])
        sections.setdefault(measure.section, []).append(row)
    return list(sections.items())


def _measures_of_given(results: Results) -> list[Measure]:
    return [
        Measure(
            GIVEN,
            f"Pass@1, {family}",
            "share of single attempts that their own tests pass",
            f"heldout.{family}.pass_at_1_before",
            f"heldout.{family}.pass_at_1_after",
            PASS,
        )
        for family in results.get("heldout", {})
    ]


def scores(results: Results) -> list[tuple[str, float | None, float | None]]:
    """(label, before, after) shares for the overview picture."""
    return [
        (label, number_at(results, f"{path}_before"), number_at(results, f"{path}_after"))
        for label, path in (
            ("bugs, pass@1", "rl.pass_at_1"),
            ("bugs, pass@8", "rl.pass_at_8"),
            ("unseen family", "rl.unseen_family"),
            ("across summaries", "summary.pass"),
            ("compaction error\n(less is better)", "summary.compaction_error"),
        )
    ]


def marks(results: Results) -> dict[str, tuple[float | None, float | None]]:
    """Held-out pass@1 before and after RL, by task family, for the reward curves."""
    given = {family: f"heldout.{family}.pass_at_1" for family in results.get("heldout", {})}
    paths = given | {"bugfix": "rl.pass_at_1", "recall": "summary.pass"}
    return {
        family: (number_at(results, f"{path}_before"), number_at(results, f"{path}_after"))
        for family, path in paths.items()
    }


def phases(results: Results) -> list[tuple[str, str, float]]:
    """(phase, time in words, share of the run in percent) in the order of results.json."""
    seconds = lookup(results, "phases_s")
    if not isinstance(seconds, Mapping):
        return []
    known = {str(name): float(s) for name, s in seconds.items() if isinstance(s, (int, float)) and s >= 0}
    total = sum(known.values()) or 1.0
    return [(name.replace("_", " "), duration(s), 100 * s / total) for name, s in known.items()]


def duration(seconds: float | None) -> str:
    """Seconds for people: "8.2 s", "3 min 20 s", "1 h 05 min"; "" for None."""
    if seconds is None:
        return ""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _moved(before: float, after: float, unit: str = "%") -> str:
    a, b = f"{100 * before:.0f}", f"{100 * after:.0f}"
    if a == b:
        return f"stayed at {b}{unit}"
    return f"{'rose' if after > before else 'fell'} from {a}{unit if unit == '%' else ''} to {b}{unit}"


def _change(kind: str, before: float | None, after: float | None) -> tuple[str, str]:
    if before is None or after is None:
        return "", ""
    difference = after - before
    words = f"{difference:+.1f}" if kind == TOKENS else f"{100 * difference:+.1f} points"
    if float(words.split()[0]) == 0:
        return "no change", ""
    good = difference > 0 if kind == PASS else difference < 0
    if kind == TOKENS and before:
        words = f"{100 * difference / before:+.0f}%"
    return words.replace("-", "\N{MINUS SIGN}"), "better" if good else "worse"


def _value(kind: str, value: float | None) -> str:
    if value is None:
        return "\N{EN DASH}"
    if kind == PASS:
        return f"{100 * value:.1f}%"
    words = f"{value:.1f}" if kind == TOKENS else f"{100 * value:.1f} points"
    return words.replace("-", "\N{MINUS SIGN}")


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def _amount(value: float | None, unit: str, digits: int = 0) -> str:
    if value is None:
        return ""
    words = f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value:,.{digits}f}"
    return f"{words} {unit}".strip()
