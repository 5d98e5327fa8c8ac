"""RL with targeted textual feedback against reward alone: `python -m benchmarks.feedback [--seeds=0,1,2]`.

The question is whether rl.feedback removes a habit of malformed calls faster than the reward does, and leaves the other
turns alone. The habit is made on purpose: SFT teaches the network of configs/memory_chain.py to call a tool that does
not exist before a read, and to follow the hint of the detector unknown_tool where it gets one (tool_habit.py). Tasks
leave room for the wrong calls, so that the grade hardly sees them. RL then starts from one SFT policy per seed:

    before              the SFT policy, without RL
    reward              RL without feedback
    priced_reward       the same, with a price of malformed calls in the reward
    feedback            the same RL with the KL to the teacher with the hint
    feedback_alone      the KL with advantages of 0

A stopped run is continued. A finished one is a row of --rows and does not run again.

Prints progress on stderr and, as the last line of stdout, one JSON object: "seeds", those that all chosen variants were
run with, and each variant -> measures, lists of which are in the order of the seeds:
    malformed           mean over the seeds, by step of RL, of the fraction of an episode's calls that are malformed;
                        step 1 plays the policy before RL
    steps_to_tenth      the first step whose fraction is at most a tenth of that of step 1; null if there is none
    grade               mean over the seeds, by step
    malformed_after, pass_at_1      on held-out tasks
    other_turns         mean absolute change of log p, from the policy before RL, of the tokens of other messages in the
                        episodes of step 1: those that the detector does not name, without the next two
    right_reads         the same for reads that no wrong call precedes, where the habit is the alternative, so that
                        losing it changes them
"before" has malformed_after and pass_at_1 only.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.seeded_runs import Row, complete_rows, make_parser, run_pipeline
from benchmarks.tool_habit import DETECTOR
from composer_jax.agent.episode import Episode
from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.chat.messages import ToolCall
from composer_jax.evals.score import score
from composer_jax.observe.episodes import read_episodes
from composer_jax.observe.metrics import read_metrics
from composer_jax.parallel.mesh import make_mesh
from composer_jax.rl.hint_detectors import DETECTORS, ParsedEpisode
from composer_jax.rl.records import RolloutRecords
from composer_jax.stages.controls import final_suites

CONFIG = "benchmarks/feedback_config.py"
BEFORE = "before"
WEIGHT = 1.0
"""rl.feedback.weight."""
PRICE = 0.2
"""rl.reward.penalties.malformed_calls: what an episode would pay all of whose calls are malformed."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "reward": {"rl__feedback__weight": 0.0},
    "priced_reward": {"rl__feedback__weight": 0.0, "rl__reward__penalties__malformed_calls": PRICE},
    "feedback": {"rl__feedback__weight": WEIGHT},
    "feedback_alone": {
        "rl__feedback__weight": WEIGHT,
        "rl__algorithm__name": "benchmarks.control_algorithms:NoAdvantages",
    },
}
"""Name -> fields of the config."""
CURVES = {"malformed": "behavior_malformed_calls", "grade": "grade"}
"""Measure by step -> column of metrics/rl.jsonl."""
FINAL = ("malformed_after", "pass_at_1")
CHANGES = ("other_turns", "right_reads")


def measure(folder: Path, size: str, seed: int, variant: str) -> Row:
    """Returns the row of one run: seed, variant, FINAL and, for runs of RL, the values of CURVES by step and CHANGES.

    The policy before RL is trained first if it is not there.
    """
    before = folder / f"seed{seed}" / BEFORE
    run_pipeline(before, size, seed, config=CONFIG, stages="('sft',)", evaluate__which="('before',)")
    row: Row = {"seed": seed, "variant": variant}
    if variant == BEFORE:
        return row | final_measures(before)
    workdir, base = folder / f"seed{seed}" / variant, before / "checkpoints" / "sft"
    start = {"base": base, "stages": "('rl',)", "evaluate__which": "('after',)"}
    run_pipeline(workdir, size, seed, config=CONFIG, **start, **VARIANTS[variant])
    steps = read_metrics(workdir / "metrics" / "rl.jsonl")
    by_step = {name: [step[column] for step in steps] for name, column in CURVES.items()}
    return row | final_measures(workdir) | by_step | turn_changes(workdir, base)


def final_measures(workdir: Path) -> dict[str, float]:
    """Returns FINAL of the last policy of a run, of which all held-out episodes are recorded."""
    which = "before" if workdir.name == BEFORE else "after"
    fractions = []
    for record in read_episodes(workdir / "episodes" / f"{which}.jsonl"):
        calls = sum(len(message.calls) for segment in record.segments for message in segment)
        fractions.append(record.parts.get("malformed_calls", 0) / max(1, calls))
    return {"malformed_after": statistics.fmean(fractions), "pass_at_1": final_suites(workdir)["chain"]["pass_at_1"]}


def turn_changes(workdir: Path, base: Path) -> dict[str, float | None]:
    """Returns CHANGES: how far RL moved log p of what the policy before it had sampled, in nats per token.

    Args:
      workdir: of the run of RL. base: checkpoints of the policy before it.
    """
    chat = load_chat_format(workdir / "base")
    records = RolloutRecords(workdir, chat.tokenizer.fingerprint)
    episodes = [episode for number in records.batches[0].groups for episode in records.load(number).episodes]
    rows = [episode.transcript.rows()[0].tokens for episode in episodes]
    tokens_BS = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for padded, tokens in zip(tokens_BS, rows, strict=True):
        padded[: len(tokens)] = tokens
    old_BS, new_BS = (_logprobs(weights, tokens_BS) for weights in (base, workdir / "checkpoints" / "rl"))
    return mean_changes(episodes, chat, np.abs(new_BS - old_BS))


def _logprobs(weights: Path, tokens_BS: np.ndarray) -> np.ndarray:
    """Returns log p of each token but the first, [B,S-1], by a network that chooses its own experts."""
    mesh = make_mesh(jax.devices()[:1])
    loaded = open_checkpoint(str(weights)).load(mesh)
    return score(loaded.definition, loaded.params, loaded.router_bias, tokens_BS, mesh=mesh, rows=32).logprobs


def mean_changes(episodes: Sequence[Episode], chat: ChatFormat, changes_BS: np.ndarray) -> dict[str, float | None]:
    """Returns the mean of each of CHANGES over the tokens of its turns; None without such a turn.

    Args:
      episodes: B episodes without compaction.
      changes_BS: of log p of the tokens of their rows but the first, [B,S-1].
    """
    by_kind: dict[str, list[np.ndarray]] = {name: [] for name in CHANGES}
    for episode, changes_S in zip(episodes, changes_BS, strict=True):
        parsed, spans = ParsedEpisode.of(episode, chat), episode.transcript.trained_spans()
        named = {hint.turn for hint in DETECTORS[DETECTOR](parsed)}
        for number, turn in enumerate(parsed.turns):
            if number in named:
                continue
            calls = turn.message.calls
            is_read = bool(calls) and isinstance(calls[0], ToolCall) and calls[0].name == "read"
            kind = "right_reads" if is_read and number - 1 not in named else "other_turns"
            span = spans[turn.node.id]
            by_kind[kind].append(changes_S[span.start - 1 : span.stop - 1])
    return {name: float(np.concatenate(parts).mean()) if parts else None for name, parts in by_kind.items()}


def steps_to_tenth(malformed: Sequence[float]) -> int | None:
    """Returns the first step, from 1, with at most a tenth of the fraction of step 1; None if there is none."""
    return next((step for step, value in enumerate(malformed, start=1) if value <= malformed[0] / 10), None)


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object; seeds that lack a variant of the rows are left out."""
    by_variant: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], {})[row["seed"]] = row
    seeds = sorted(set.intersection(*map(set, by_variant.values()))) if by_variant else []
    return {
        **{variant: _summarize_variant([runs[seed] for seed in seeds]) for variant, runs in by_variant.items()},
        "seeds": seeds,
    }


def _summarize_variant(runs: Sequence[Row]) -> dict[str, Any]:
    """Returns the measures of a variant over its runs, one per seed."""
    measures: dict[str, Any] = {name: _rounded(run[name] for run in runs) for name in FINAL}
    if all("malformed" in run for run in runs):
        measures["steps_to_tenth"] = [steps_to_tenth(run["malformed"]) for run in runs]
        for name in CURVES:
            by_step = zip(*(run[name] for run in runs), strict=True)
            measures[name] = _rounded(statistics.fmean(values) for values in by_step)
        measures |= {name: _rounded(run[name] for run in runs) for name in CHANGES}
    return measures


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in values]


def main(argv: Sequence[str] | None = None) -> None:
    names = (BEFORE, *VARIANTS)
    parser = make_parser(__doc__, "runs/feedback", CONFIG)
    parser.add_argument("--variants", default=",".join(names), help="comma-separated names (default: all of them)")
    o = parser.parse_args(argv)
    chosen = o.variants.split(",")
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"--variants names {unknown[0]!r}; use some of {', '.join(names)}")
    folder = o.workdir.absolute()
    file = o.rows or folder / "rows.json"
    print(json.dumps(summarize(complete_rows(file, o.seeds, chosen, lambda *run: measure(folder, o.size, *run)))))


if __name__ == "__main__":
    main()
