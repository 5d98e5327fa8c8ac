"""The report: one HTML file that needs no network, and its plots as PNG files beside it."""

import base64
import dataclasses
import hashlib
import importlib.resources
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError
from composer_jax.observe import findings, plots
from composer_jax.observe.episodes import STAGES, EpisodeRecord, read_episodes
from composer_jax.observe.metrics import read_metrics
from composer_jax.observe.picture import DARK, LIGHT, Theme

EPISODE_BYTES = 3_500_000  # most episode text in the page, which stays below 5 MB with the plots

METRICS = ("sft", "rl", "evaluate_sft", "evaluate_rl")
"""Metric files beside those of pretraining."""

MISSING = {
    "results": "results.json (written at the end of the pipeline)",
    "pretrain": "pretraining curves",
    "sft": "fine-tuning curves",
    "rl": "RL curves",
    "before": "episodes of the evaluation before RL",
    "after": "episodes of the evaluation after RL",
    "rl episodes": "episodes sampled during RL",
}


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The files of a workdir that a report shows; a missing one is empty."""

    results: Mapping[str, Any]
    config: Mapping[str, Any]  # without the hash beside it in config.json (storage/workdir.py)
    # "pretrain" (with its phases) | "sft" | "rl" | "evaluate_sft" | "evaluate_rl" -> rows
    metrics: Mapping[str, list[dict[str, Any]]]
    episodes: Mapping[str, list[EpisodeRecord]]  # one of STAGES -> records

    @classmethod
    def read(cls, workdir: Path) -> "RunFiles":
        config = _read_object(workdir / "config.json").get("config", {})
        return cls(
            results=_read_object(workdir / "results.json"),
            config=config,
            metrics={"pretrain": _read_pretraining(workdir, config)}
            | {name: read_metrics(workdir / "metrics" / f"{name}.jsonl") for name in METRICS},
            episodes={stage: read_episodes(workdir / "episodes" / f"{stage}.jsonl") for stage in STAGES},
        )

    def results_so_far(self) -> Mapping[str, Any]:
        """Returns results.json or, before it is written, those of its numbers that the metric files have."""
        if self.results:
            return self.results
        known: dict[str, dict[str, Any]] = {"cpt": {}, "sft": {}, "rl": {}}
        if heldout := [row["heldout_nll"] for row in self.metrics["pretrain"] if row.get("heldout_nll")]:
            known["cpt"] = {"heldout_nll_first": heldout[0], "heldout_nll_last": heldout[-1]}
        for stage, name in (("cpt", "pretrain"), ("sft", "sft")):
            if rows := self.metrics[name]:
                known[stage]["tokens"] = rows[-1].get("tokens")
        if rows := self.metrics["rl"]:
            known["rl"]["steps"] = len({row["step"] for row in rows})
        return known

    def missing(self) -> list[str]:
        """Returns what the workdir lacks of the stages and evaluations in its config, as text."""
        parts = {"results": self.results, **self.metrics, **self.episodes}
        parts["rl"], parts["rl episodes"] = self.metrics["rl"], self.episodes["rl"]
        stages = self.config.get("stages", ("pretrain", "sft", "rl"))
        measured = findings.lookup(self.config, "evaluate.which") or ("before", "after")
        expected = {"results", *stages, *measured}
        if "rl" in stages:
            expected.add("rl episodes")
        else:
            expected.discard("after")
        return [text for name, text in MISSING.items() if name in expected and not parts[name]]


def _read_pretraining(workdir: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of pretraining and its phases in one sequence: tokens count on, `stage` names the phase."""
    rows: list[dict[str, Any]] = []
    for stage in ("pretrain", *(name for name in config.get("stages", ()) if name in config.get("phases", ()))):
        before = rows[-1].get("tokens", 0) if rows else 0
        for row in read_metrics(workdir / "metrics" / f"{stage}.jsonl"):
            rows.append(row | {"tokens": row.get("tokens", 0) + before, "stage": stage})
    return rows


def write_report(workdir: Path, traffic: Sequence[findings.Table] = ()) -> Path:
    """Writes `report.html` and `plots/*.png` of a workdir; returns the path of the page.

    traffic: tables of the section "Traffic", such as `summary_tables` of realtime/labels makes them.

    Every part is optional: the page of an unfinished run lists what is missing. Reads results.json, config.json,
    metrics/{pretrain,sft,rl,evaluate_sft,evaluate_rl}.jsonl and episodes/{before,after,rl}.jsonl. Raises UserError if
    there is no such folder, or a file in it is damaged.
    """
    workdir = Path(workdir)
    if not workdir.is_dir():
        raise UserError(f"there is no folder {workdir} to report on; run a stage with --workdir={workdir} first")
    run = RunFiles.read(workdir)
    results = run.results_so_far()
    suites = findings.read_suites(run.results, run.config)
    titles = findings.policy_titles(suites, run.config)
    episodes, left_out = _select_episodes(run.episodes)
    is_of_run = bool(run.config) or not traffic  # a folder with releases only is not an unfinished run
    template = importlib.resources.files("composer_jax.observe")
    style, script = (template / "report.css").read_text("utf-8"), (template / "report.js").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    page = environment.from_string((template / "report.html").read_text("utf-8")).render(
        name=workdir.resolve().name,
        headline=findings.headline(results, suites, titles) if is_of_run else "Releases and traffic",
        opening=findings.suite_table(suites, titles),
        missing=run.missing() if is_of_run else [],
        traffic=traffic,
        tables=[*findings.control_tables(results, suites), *findings.result_tables(suites, titles)],
        figures=_figures(run, suites, titles, workdir / "plots"),
        facts=findings.run_facts(results),
        phases=findings.phase_fractions(results),
        config_hash=findings.lookup(results, "config_hash"),
        config_text=json.dumps(run.config, indent=2) if run.config else "",
        results_text=json.dumps(run.results, indent=2) if run.results else "",
        episode_count=len(episodes),
        left_out=left_out,
        episodes=_json_for_script(episodes),
        style=Markup(style),
        script=Markup(script),
        # Only this script may run, whatever the text of an episode contains.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return write_atomically(workdir / "report.html", page.encode("utf-8", errors="replace"))


@dataclasses.dataclass(frozen=True)
class PageFigure:
    """A plot of the page in the light and the dark scheme, as data URIs."""

    title: str
    group: str  # "opening", "curves", "time", or "wide" for a plot as wide as the page
    light: str
    dark: str


Draw = Callable[[Path, Theme], Path | None]


def _figure_specs(
    metrics: Mapping[str, list[dict[str, Any]]], suites: list[findings.SuiteMeasures], titles: Mapping[str, str]
) -> dict[str, tuple[str, str, Draw]]:
    """Returns file name -> (alternative text, place in the page, function that draws it) of every plot of the page."""
    rl, scores = metrics["rl"], findings.pass_at_1_scores(findings.by_verdict(suites))
    of_suites = "{}: pass@1 of suites that ran while it trained, with 95% intervals"
    return {
        "pass_at_1": (
            "Pass@1 of every suite by policy, with the 95% interval of its change",
            "opening",
            partial(plots.plot_pass_at_1, scores, titles),
        ),
        "pretraining": (
            "Pretraining: training loss and held-out loss against tokens",
            "curves",
            partial(plots.plot_pretraining, metrics["pretrain"]),
        ),
        "sft": ("Supervised fine-tuning: loss against tokens", "curves", partial(plots.plot_sft, metrics["sft"])),
        "rl_reward": (
            "RL: mean reward per step and family",
            "curves",
            partial(plots.plot_reward, rl, findings.family_marks(suites)),
        ),
        "suites_sft": (of_suites.format("SFT"), "curves", partial(plots.plot_suites, metrics["evaluate_sft"], "SFT")),
        "suites_rl": (of_suites.format("RL"), "curves", partial(plots.plot_suites, metrics["evaluate_rl"], "RL")),
        "summaries": (
            "Self-summaries: length and pass rate against RL step",
            "curves",
            partial(plots.plot_summaries, rl),
        ),
        "rl_health": ("RL: entropy, importance ratio, gradient norm, turns", "wide", partial(plots.plot_health, rl)),
        "rl_staleness": (
            "RL: staleness, KL of sampler and learner, tokens out of the trust region, replayed experts, groups",
            "wide",
            partial(plots.plot_staleness, rl),
        ),
        "time_split": (
            "Seconds of each RL step by what they were spent on",
            "time",
            partial(plots.plot_time_split, rl),
        ),
    }


def _figures(
    run: RunFiles, suites: list[findings.SuiteMeasures], titles: Mapping[str, str], folder: Path
) -> list[PageFigure]:
    metrics, figures = run.metrics, []
    for name, (title, group, draw) in _figure_specs(metrics, suites, titles).items():
        light = draw(folder / f"{name}.png", LIGHT)
        dark = draw(folder / f"{name}_dark.png", DARK)
        if light and dark:
            figures.append(PageFigure(title, group, _data_uri(light), _data_uri(dark)))
    scores = findings.overview_scores(suites)
    for name, theme in (("overview", LIGHT), ("overview_dark", DARK)):
        plots.plot_overview(metrics, scores, folder / f"{name}.png", theme)
    return figures


def _select_episodes(by_stage: Mapping[str, list[EpisodeRecord]]) -> tuple[list[dict[str, Any]], int]:
    """Returns the episodes that fit into the page, each with its stage, and the number left out.

    If there are too many, the stages take turns, so that every stage keeps its first ones.
    """
    queues = [[{"stage": stage, **record.to_json()} for record in by_stage[stage]] for stage in STAGES]
    longest = max(map(len, queues), default=0)
    turns = [queue[i] for i in range(longest) for queue in queues if i < len(queue)]
    selected, size = [], 0
    for episode in turns:
        size += len(_json_for_script(episode))
        if size > EPISODE_BYTES:
            break
        selected.append(episode)
    selected.sort(key=lambda episode: STAGES.index(episode["stage"]))
    return selected, len(turns) - len(selected)


def _json_for_script(value: Any) -> Markup:
    """Returns JSON that is safe in a <script> element: it can neither end the element nor start a comment."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON ({error}); run the stage that writes it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; run the stage that writes it again")
    return value
