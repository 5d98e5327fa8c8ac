"""RL of a published model beside its controls, on one device: `python -m benchmarks.published_rl --base=hf:DIR`.

The model is SmolLM2-135M-Instruct (`python -m launch.fetch_smollm2`, `python -m launch.convert`). It is fine-tuned
once per seed on traces of an expert, and every variant goes on from there (configs/smollm2_135m.py:card). All are
measured on the same held-out tasks, and on tasks with a kind of bug that training lacks. A finished variant is a row of
--rows and does not run again; one that was stopped, as by `timeout 270`, is continued by the same command.

    sft         the policy before RL, at temperature 1
    greedy      the same, its most probable tokens, one attempt at each task
    rl          RL
    rft         rejection-sampling fine-tuning: the policy before RL plays the tasks of RL as often as RL did, and is
                trained on the episodes that it solved, once
    more_sft    as many further steps of SFT as RL has, on further traces of the expert

--choose measures something else: of 128 training tasks of each family, which neither SFT nor RL has, the fraction that
the policy after SFT solves greedily. The families of `card` were chosen by such attempts before there was any result of
RL (docs/results.md).

Flags --config.FIELD=VALUE are those of every run. Prints progress on stderr and a table on stdout. The last line of
stdout is one JSON object: variant -> {"seeds", "sampled_tokens" (in training), "pass_at_1" and "pass_at_k": suite ->
{"pass", "low", "high" (95 % interval over the tasks of all seeds), "rl_minus": the difference of RL to the variant,
paired by task, with its interval}}, and of `rl` its "times": means of TIMES over the seeds. With --choose: family ->
the fraction. --picture=FILE draws pass@1.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.controls import Fields, Seed, summarize
from benchmarks.published_choice_config import SEED as CHOICE_SEED
from benchmarks.seeded_runs import Row, complete_rows, make_parser, run_pipeline
from composer_jax.errors import UserError
from composer_jax.observe.metrics import read_metrics
from composer_jax.observe.picture import LIGHT, label_axes, new_figure, save_figure
from composer_jax.stages.controls import final_suites
from configs import smollm2_135m

CONFIG = "configs/smollm2_135m.py"
SIZES = {"full": "card", "smoke": "card_smoke"}
"""--size -> that of CONFIG."""
UNTIMED = 2
"""First steps of RL, which compile."""
VARIANTS = ("sft", "greedy", "rl", "rft", "more_sft")
PEAK = 5e-5
"""Learning rate of the two controls that are SFT: that of the config's own."""
TIMES = ("step_s", "rollout_s", "sandbox_s", "train_s", "sampled_per_s", "evaluate_s")
"""Medians over the steps of RL after those that compile: seconds of a step, those in which the sampler computed, those
in which neither it nor the learner did (tools, and the host's work between them), and those in which the learner
computed; sampled tokens over the seconds without the learner; and the seconds of the evaluation after RL."""


class PublishedSeed(Seed):
    """The runs of one seed that begin with a published model."""

    rft: Fields = {
        "rl__algorithm__name": "benchmarks.control_algorithms:RejectionSampling",
        "rl__optimizer__peak": PEAK,
    }

    def __init__(self, folder: Path, size: str, seed: int, base: str, further: Fields | None = None):
        """base: address of the published model, such as hf:DIR. further: fields of every run (run_pipeline)."""
        super().__init__(folder, size, seed)
        self.published, self.further = base, further or {}
        self.sizes = smollm2_135m.SIZES[size]

    @property
    def makers(self):
        """See Seed.makers."""
        return {
            "sft": lambda _: self.start(),
            "greedy": self.greedy,
            "rl": self.rl,
            "rft": self.rejection_sampling,
            "more_sft": self.more_sft,
        }

    def start(self) -> Path:
        """The policy before RL."""
        return self.run("sft", base=self.published, stages="('sft',)", evaluate__which="('before',)")

    def greedy(self, variant: str) -> Path:
        """The policy before RL at temperature 0."""
        config: Any = smollm2_135m.get_config(self.size)
        once = {f"evaluate__suites__{name}__attempts": 1 for name in config.evaluate.suites}
        base = self.start() / "checkpoints" / "sft"
        return self.run(variant, base=base, stages="()", evaluate__temperature=0.0, **once)

    def more_sft(self, variant: str) -> Path:
        """Further SFT from the policy before RL."""
        sft: Fields = {
            "sft__steps": self.sizes.rl_steps,
            "sft__sources__bugs__options__first": 8 * self.sizes.sft_steps,
            "sft__sources__bugs__options__count": 8 * self.sizes.rl_steps,
            "sft__optimizer__peak": PEAK,
        }
        base = self.start() / "checkpoints" / "sft"
        return self.run(variant, base=base, stages="('sft',)", evaluate__which="('before',)", **sft)

    def measure(self, control: str) -> Row:
        """See Seed.measure; the row of RL has its times."""
        row = super().measure(control)
        return {**row, "times": times(self.folder / control)} if control == "rl" else row

    def choose(self) -> dict[str, float]:
        """Returns family -> the fraction of the training tasks of benchmarks/published_choice_config.py that the
        policy before RL solves greedily."""
        workdir, base = self.folder / "choice", self.start() / "checkpoints" / "sft"
        run_pipeline(
            workdir,
            self.size,
            self.seed + CHOICE_SEED,
            config="benchmarks/published_choice_config.py",
            **{**self.further, "base": base},
        )
        return {name: suite["pass_at_1"] for name, suite in final_suites(workdir).items()}

    def run(self, control: str, *arguments: str, **fields: Any) -> Path:
        """See Seed.run."""
        return super().run(control, *arguments, **{**self.further, **fields, "config": CONFIG})


def times(workdir: Path) -> dict[str, float]:
    """Returns TIMES of a run of RL that was evaluated."""
    rows = read_metrics(workdir / "metrics" / "rl.jsonl")
    rows = rows[UNTIMED:] or rows
    found = {name: statistics.median(row[name] for row in rows) for name in TIMES[:4]}
    playing = sum(row["step_s"] - row["train_s"] for row in rows)
    found["sampled_per_s"] = sum(row["sampled_tokens"] for row in rows) / playing
    found["evaluate_s"] = json.loads((workdir / "stages" / "evaluate_after.json").read_bytes())["seconds"]
    return {name: round(value, 3) for name, value in found.items()}


def summarize_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object. Raises a UserError if a variant and RL were measured on other tasks."""
    kinds = {"pass_at_1": summarize(rows), "pass_at_k": summarize([any_solved(row) for row in rows])}
    out: dict[str, Any] = {}
    for kind, measured in kinds.items():
        for variant, of in measured.items():
            found = out.setdefault(variant, {"seeds": of["seeds"], "sampled_tokens": of["sampled_tokens"]})
            found[kind] = {
                suite: {"pass": measures.pop("pass_at_1"), **measures} for suite, measures in of["suites"].items()
            }
    if timed := [row["times"] for row in rows if "times" in row]:
        out["rl"]["times"] = {name: statistics.fmean(one[name] for one in timed) for name in TIMES}
    return out


def any_solved(row: Row) -> Row:
    """Returns a row whose tasks count as solved if one of their attempts solved them."""
    suites = {
        name: {**suite, "solved": {task: float(rate > 0) for task, rate in suite["solved"].items()}}
        for name, suite in row["suites"].items()
    }
    return {**row, "suites": suites}


def table(measured: Mapping[str, Any]) -> str:
    """Returns all passes, and the differences of RL to the controls, as a table in Markdown."""
    columns = ("suite", "policy", "seeds", "pass@1", "RL minus it", "pass@k", "RL minus it")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for suite in next(iter(measured.values()))["pass_at_1"]:
        for variant, of in measured.items():
            cells = [suite, variant, ", ".join(map(str, of["seeds"]))]
            for kind in ("pass_at_1", "pass_at_k"):
                one = of[kind][suite]
                cells.append(f"{one['pass']:.3f} [{one['low']:.3f}, {one['high']:.3f}]")
                minus = one.get("rl_minus")
                cells.append("{difference:+.3f} [{low:.3f}, {high:.3f}]".format(**minus) if minus else "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(measured: Mapping[str, Any], path: Path) -> Path:
    """Draws pass@1 of every policy in every suite, with its interval."""
    suites, variants = list(next(iter(measured.values()))["pass_at_1"]), list(measured)[::-1]
    figure, axes = new_figure(LIGHT, 3.2 * len(suites), 2.8, across=len(suites))
    for ax, suite in zip(axes, suites, strict=True):
        for place, variant in enumerate(variants):
            one = measured[variant]["pass_at_1"][suite]
            ax.plot([one["low"], one["high"]], [place, place], color=LIGHT.muted, linewidth=1.5)
            ax.plot([one["pass"]], [place], "o", color=LIGHT.palette[variant != "rl"])
        ax.set_yticks(range(len(variants)), variants)
        ax.set_xlim(-0.03, 1.03)
        label_axes(ax, LIGHT, suite, "pass@1", "", legend_columns=0)
    return save_figure(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "runs/published_rl", CONFIG)
    parser.add_argument("--base", required=True, help="address of the published model, such as hf:DIR")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated names (default: all of them)")
    parser.add_argument("--choose", action="store_true", help="measures how many training tasks SFT leaves")
    parser.add_argument("--picture", type=Path, help="file of the picture (default: none)")
    o, further = parser.parse_known_args(argv)
    chosen = [name for name in o.variants.split(",") if name]
    if unknown := [name for name in chosen if name not in VARIANTS]:
        parser.error(f"--variants names {unknown[0]!r}; use some of {', '.join(VARIANTS)}")
    if unknown := [flag for flag in further if not (flag.startswith("--config.") and "=" in flag)]:
        parser.error(f"{unknown[0]} is not a flag; --help names them, and those of a config are --config.FIELD=VALUE")
    fields = dict(flag.removeprefix("--config.").replace(".", "__").split("=", 1) for flag in further)
    folder, size = o.workdir.absolute(), SIZES[o.size]
    make = lambda seed: PublishedSeed(folder, size, seed, o.base, fields)  # noqa: E731
    try:
        if o.choose:
            solved = [make(seed).choose() for seed in o.seeds]
            print(json.dumps({name: statistics.fmean(one[name] for one in solved) for name in solved[0]}))
            return
        rows = complete_rows(o.rows or folder / "rows.json", o.seeds, chosen, lambda *run: make(run[0]).measure(run[1]))
        measured = summarize_rows(rows)
        if not measured:
            parser.error("no variant has been measured; name some with --variants")
        print(table(measured))
        if o.picture:
            draw(measured, o.picture)
        print(json.dumps(measured))
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
