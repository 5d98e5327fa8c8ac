"""What RL gains beyond simpler explanations: `python -m benchmarks.controls [--seeds=0,1,2] [--controls=sft,rft,...]`.

For every seed, configs/tiny.py is pretrained and fine-tuned once, and every control starts from there (CONTROLS). They
are evaluated on the same tasks. A stopped run is continued. A finished one is a row of --rows and does not run again.
--base takes the policies before RL from other folders, such as those of finished demos, instead of training them.

    sft, sft_t05, sft_greedy    the policy before RL, sampled at temperature 1, 0.5 and 0
    prompted_summaries          a policy whose SFT taught no short summaries, asked for long reports
    rft                         rejection-sampling fine-tuning: the policy before RL plays the tasks of RL as often as
                                RL did, and is trained on the episodes that it solved, once
    rl                          RL as the config has it
    rl_masked_summaries         RL with summaries left out of the loss
    rl_other_summaries          RL whose summaries get the advantage of another episode of the group
    rl_random_advantages        RL whose advantages are dealt to the episodes of a group at random
    rl_price_0                  RL without a price of length

Prints progress on stderr and, as the last line of stdout, one JSON object: control -> {"seeds", "sampled_tokens" (in
training, mean over the seeds), "suites": suite -> {"family", "pass_at_1", "low", "high" (95 % interval over the tasks
of all seeds), "rl_minus": the difference of "rl" to this control, paired by task, with its interval}}.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.seeded_runs import Row, complete_rows, make_parser, run_entry, run_pipeline
from composer_jax.errors import UserError
from composer_jax.evals.interval import interval
from composer_jax.observe.metrics import read_metrics
from composer_jax.stages.controls import POLICIES, compare_by_task, final_suites

Fields = Mapping[str, Any]
RL: Fields = {"stages": "('rl',)", "evaluate__which": "('after',)"}
RL_CONTROLS: Mapping[str, Fields] = {
    "rl": {"rl__keep_groups": True},  # rft plays the tasks of these groups
    "rl_masked_summaries": {"agent__compactions__short__train_summaries": False},
    "rl_other_summaries": {"rl__algorithm__name": "benchmarks.control_algorithms:OtherSummaries"},
    "rl_random_advantages": {"rl__algorithm__name": "benchmarks.control_algorithms:RandomAdvantages"},
    "rl_price_0": {"rl__reward__weight": 0.0},
}
"""Name -> what the run changes in the config beside RL."""
TEMPERATURES = {"sft_t05": 0.5, "sft_greedy": 0.0}
NO_SHORT_SUMMARIES: Mapping[str, int] = {"chain": 0, "chain_long": 1000}
"""Traces of an SFT that teaches long reports in place of short summaries."""
RFT: Fields = {
    "rl__algorithm__name": "benchmarks.control_algorithms:RejectionSampling",
    "rl__optimizer__peak": 3e-4,  # that of RL; with 1e-3 the policy is worse in every suite of seed 0
}


MEASURES = ("pass_at_1", "pass_given_attempt", "calls_per_turn", "tokens_per_summary", "facts_kept_last", "solved")
"""Measures of a suite that a row has."""


class Seed:
    """The runs of one seed, in a folder of their own; each is made when it is first needed."""

    rft: Fields = RFT
    """What rejection-sampling fine-tuning changes in RL."""

    def __init__(self, folder: Path, size: str, seed: int, base: Path | None = None):
        """base: holds the run whose policy before RL is that of the seed, as base/seedN/sft; None trains one."""
        self.folder, self.size, self.seed, self.is_trained_here = folder / f"seed{seed}", size, seed, base is None
        self.sft = (base / f"seed{seed}" if base else self.folder) / "sft"

    def measure(self, control: str) -> Row:
        """Returns the row of a control: seed, variant, sampled_tokens (in training), and the measures of the suites."""
        return self.row(control, self.makers[control](control))

    def row(self, variant: str, workdir: Path) -> Row:
        """Returns the row of a variant that was run in a folder; "sft" is the policy before RL."""
        policies = ("before",) if variant == "sft" else POLICIES
        config = json.loads((workdir / "config.json").read_bytes())["config"]["evaluate"]["suites"]
        suites = {
            name: {"family": config[name]["family"], **{measure: suite[measure] for measure in MEASURES}}
            for name, suite in final_suites(workdir, policies).items()
        }
        sampled = 0.0 if variant == "sft" else _sampled_tokens(workdir)
        return {"seed": self.seed, "variant": variant, "sampled_tokens": sampled, "suites": suites}

    @property
    def makers(self) -> Mapping[str, Callable[[str], Path]]:
        """Control -> what runs it and returns its folder."""
        return {
            "sft": lambda _: self.start(),
            **dict.fromkeys(TEMPERATURES, self.at_temperature),
            "prompted_summaries": self.prompted,
            "rft": self.rejection_sampling,
            **dict.fromkeys(RL_CONTROLS, self.rl),
        }

    def start(self) -> Path:
        """The policy before RL."""
        if self.is_trained_here:
            run_pipeline(self.sft, self.size, self.seed, stages="('pretrain','sft')", evaluate__which="('before',)")
        elif not (self.sft / "stages" / "evaluate_before.json").exists():
            raise UserError(f"{self.sft} has no policy that was evaluated before RL; run a demo there.")
        return self.sft

    def at_temperature(self, control: str) -> Path:
        """The policy before RL at another temperature."""
        base = self.start() / "checkpoints" / "sft"
        return self.run(control, base=base, stages="()", evaluate__temperature=TEMPERATURES[control])

    def prompted(self, control: str) -> Path:
        """SFT without short summaries; where the suites ask for short ones, it is asked for reports."""
        base = self.start() / "checkpoints" / "pretrain"
        traces = {f"sft__sources__conversations__options__traces__{name}": n for name, n in NO_SHORT_SUMMARIES.items()}
        long = {"evaluate__suites__chain__compaction": "long"}
        return self.run(control, base=base, stages="('sft',)", evaluate__which="('before',)", **traces, **long)

    def rl(self, control: str) -> Path:
        """RL, with one thing changed."""
        base = self.start() / "checkpoints" / "sft"
        return self.run(control, base=base, **RL, **RL_CONTROLS[control])

    def rejection_sampling(self, control: str) -> Path:
        """SFT on what the policy before RL solved of the tasks of RL."""
        reference, base = self.rl("rl"), self.start() / "checkpoints" / "sft"
        records, workdir = self.folder / "records", self.folder / control
        if not (workdir / "stages" / "rl.json").exists():
            run_entry("launch.replay", "rollout", f"--workdir={reference}", f"--policy={base}", f"--out={records}")
            self.run(control, "train", f"--records={records}", entry="launch.replay", base=base, **RL, **self.rft)
        return self.run(control, base=base, **RL, **self.rft)

    def run(self, control: str, *arguments: str, **fields: Any) -> Path:
        """Runs or continues an entry point in the folder of a control (run_pipeline), and returns the folder."""
        workdir = self.folder / control
        run_pipeline(workdir, self.size, self.seed, *arguments, **fields)
        return workdir


def _sampled_tokens(workdir: Path) -> float:
    """Returns how many sampled tokens a run was trained with."""
    metrics = workdir / "metrics" / "rl.jsonl"
    return sum(row["sampled_tokens"] for row in read_metrics(metrics)) if metrics.exists() else 0.0


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object. Raises a UserError if a control and RL were measured on other tasks."""
    by_control: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_control.setdefault(row["variant"], {})[row["seed"]] = row
    references = by_control.get("rl", {})
    return {
        control: {
            "seeds": sorted(runs),
            "sampled_tokens": round(statistics.fmean(run["sampled_tokens"] for run in runs.values())),
            "suites": {
                name: _summarize_suite(name, control, runs, references) for name in next(iter(runs.values()))["suites"]
            },
        }
        for control, runs in by_control.items()
    }


def _summarize_suite(name: str, control: str, runs: Mapping[int, Row], references: Mapping[int, Row]) -> dict[str, Any]:
    """Returns the measures of a suite over the seeds of a control, and how far RL is from it."""

    def solved(of: Mapping[int, Row], seeds: Sequence[int]) -> dict[str, Any]:
        return {str(seed): of[seed]["suites"][name] for seed in seeds}

    rates = [rate for run in runs.values() for rate in run["suites"][name]["solved"].values()]
    low, high = interval(rates)
    family = next(iter(runs.values()))["suites"][name]["family"]
    measures: dict[str, Any] = {"family": family, "pass_at_1": statistics.fmean(rates), "low": low, "high": high}
    if control != "rl" and (seeds := sorted(runs.keys() & references.keys())):
        measures["rl_minus"] = compare_by_task(solved(references, seeds), solved(runs, seeds), control)
    return measures


def compare_variants(
    argv: Sequence[str] | None,
    doc: str | None,
    rows: str,
    variants: Sequence[str],
    measure: Callable[[Path, str, Path | None, int, str], Row],
    summarize_rows: Callable[[Sequence[Row]], dict[str, Any]],
) -> None:
    """The main function of a benchmark that goes on from the runs of this one, in the same --workdir.

    doc: of its module. rows: name of its file of rows. measure: (folder, size, base, seed, variant) -> the row.
    """
    parser = make_parser(doc, "runs/controls", rows=rows)
    parser.add_argument("--base", type=Path, help="that of benchmarks.controls (default: none)")
    o = parser.parse_args(argv)
    folder, base = o.workdir.absolute(), o.base and o.base.absolute()
    try:
        found = complete_rows(
            o.rows or folder / rows, o.seeds, variants, lambda *run: measure(folder, o.size, base, *run)
        )
        print(json.dumps(summarize_rows(found)))
    except UserError as error:
        parser.error(str(error))


def main(argv: Sequence[str] | None = None) -> None:
    names = ("sft", *TEMPERATURES, "prompted_summaries", "rft", *RL_CONTROLS)
    parser = make_parser(__doc__, "runs/controls")
    parser.add_argument("--controls", default=",".join(names), help="comma-separated names (default: all of them)")
    parser.add_argument("--base", type=Path, help="folder whose seedN/sft are used as they are (default: none)")
    o = parser.parse_args(argv)
    chosen = o.controls.split(",")
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"--controls names {unknown[0]!r}; use some of {', '.join(names)}")
    if len(set(o.seeds)) < 2:
        parser.error(f"--seeds={','.join(map(str, o.seeds))} is one seed, whose interval has no seeds in it; use two")
    folder = o.workdir.absolute()
    base = o.base and o.base.absolute()
    try:
        rows = complete_rows(
            o.rows or folder / "rows.json",
            o.seeds,
            chosen,
            lambda seed, name: Seed(folder, o.size, seed, base).measure(name),
        )
        print(json.dumps(summarize(rows)))
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
