"""results.json, and the report made from it. The config says what is measured; results.json follows from it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError
from composer_jax.evals.config import HELDOUT, WHICH
from composer_jax.evals.interval import interval
from composer_jax.observe.report import write_report
from composer_jax.stages.controls import compare_by_task, control_suites, final_suites, paired_difference
from composer_jax.stages.evaluate import GREEDY, policy_stage
from composer_jax.stages.run import Run

BY_TASK = ("solved", "failed_tokens")
"""Measures of a suite that have a number for every task and stay in stages/evaluate_*.json."""
AFTER_PRETRAINING = ("sft", "evaluate_before", "evaluate_greedy", "rl", "evaluate_after")
PRETRAINING_RESULTS = ("heldout_nll_first", "heldout_nll_last", "tokens")


def report(run: Run) -> Path | str:
    """Writes results.json from the stages that are done, plots and report.html; returns the report's path or URL."""
    write_atomically(run.path / "results.json", (json.dumps(results(run), indent=1) + "\n").encode())
    page = write_report(run.path)
    run.workdir.publish()
    return run.workdir.location(page)


def results(run: Run) -> dict[str, Any]:
    """Returns the results of every finished stage; parts of unfinished stages are left out."""
    phases = [name for name in run.config.pretraining if name != "pretrain"]
    stages = ("evaluate_base", "pretrain", *phases, *AFTER_PRETRAINING)
    done = {name: run.workdir.stage_result(name) for name in stages if run.workdir.stage_done(name)}
    seconds = {name: stage["seconds"] for name, stage in done.items()}
    out: dict[str, Any] = {
        "config_hash": run.workdir.config_hash,
        "seed": run.config.seed,
        "wall_seconds": sum(seconds.values()),
        "peak_rss_gb": max((stage["peak_rss_gb"] for stage in done.values()), default=0.0),
        "phases_s": seconds,
        "throughput": {},
    }
    if stage := done.get("pretrain"):
        out["cpt"] = {key: stage[key] for key in PRETRAINING_RESULTS}
        out["throughput"]["train_tokens_per_s"] = stage["train_tokens_per_s"]
    if further := [name for name in phases if name in done]:
        out["phases"] = {name: {key: done[name][key] for key in PRETRAINING_RESULTS} for name in further}
    if stage := done.get("sft"):
        out["sft"] = {key: value for key, value in stage.items() if key not in ("seconds", "peak_rss_gb")}
    if stage := done.get("rl"):
        out["rl"] = {key: stage[key] for key in ("steps", "episodes", "compilations_after_first_tenth")}
        if (gap := stage.get("weight_gap_max")) is not None:
            out["rl"]["weight_gap_max"] = gap
        out["throughput"]["sandbox_runs_per_s"] = stage["sandbox_runs"] / stage["step_s"]
        out["rl_time_s"] = {key: stage[key] for key in ("rollout_s", "sandbox_s", "train_s", "step_s")}
    for which in WHICH:
        if stage := done.get(f"evaluate_{which}"):
            out["throughput"]["decode_tokens_per_s"] = stage["decode_tokens_per_s"]
            _add_suites(run, out, which, stage["suites"])
    _add_differences(out, {which: stage["suites"] for which in WHICH if (stage := done.get(f"evaluate_{which}"))})
    if controls := control_suites(run.path):
        _add_controls(run, out, controls)
    return out


def _add_differences(out: dict[str, Any], measured: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Adds how pass@1 of every suite differs between evaluations, paired by task and with a 95 % interval.

    suites.NAME.change is the last evaluation minus the one before it, which "to" and "from" name;
    suites.NAME.greedy.rl_minus is RL minus greedy sampling before it. A task that an evaluation lost is not compared.

    measured: evaluation -> suite -> its measures.
    """
    *earlier, last = [which for which in measured if which != GREEDY] or [""]
    for name in measured.get(last, ()):
        solved = {which: suites[name]["solved"] for which, suites in measured.items()}
        shared = {which for which in solved if solved[which].keys() & solved[last].keys()}
        if earlier and earlier[-1] in shared:
            change = paired_difference(solved[last], solved[earlier[-1]])
            out["suites"][name]["change"] = {"from": earlier[-1], "to": last, **change}
        if last == "after" and GREEDY in shared:
            out["suites"][name][GREEDY]["rl_minus"] = paired_difference(solved[last], solved[GREEDY])


def _add_controls(run: Run, out: dict[str, Any], controls: Mapping[str, dict[str, dict[str, Any]]]) -> None:
    """Adds pass@1 of every control under suites.NAME, and how the final policy differs from it under controls.NAME."""
    ours = _pooled(run, final_suites(run.path))
    for name, suites in controls.items():
        if name in out.get("suites", {}):
            raise UserError(f"{run.path}/controls/{name} has the name of a suite; rename that folder.")
        theirs = {suite: measures for suite, measures in suites.items() if suite in ours}
        compared = compare_by_task(ours, theirs, name)
        out.setdefault("suites", {})[name] = pool(list(theirs.values()))
        out.setdefault("controls", {})[name] = compared


def _pooled(run: Run, suites: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the suites whose tasks are pooled: not those that repeat the tasks of another one."""
    repeated = {name for name, suite in run.config.evaluate.suites.items() if suite.compare_to}
    return {name: measures for name, measures in suites.items() if name not in repeated}


def _add_suites(run: Run, out: dict[str, Any], which: str, suites: dict[str, dict[str, Any]]) -> None:
    """Adds every measure under suites.NAME.WHICH, and those that the config names under their own keys."""
    for name, measures in suites.items():
        kept = {key: value for key, value in measures.items() if key not in BY_TASK}
        out.setdefault("suites", {}).setdefault(name, {})[which] = kept
        if name.startswith(HELDOUT):
            family = name.removeprefix(HELDOUT).replace(".", "_")  # a dot leads to a field within a field
            _put(out, f"heldout.{family}.pass_at_1_{which}", measures["pass_at_1"])
    if which == GREEDY:
        return
    for name, suite in run.config.evaluate.suites.items():
        for measure, key in suite.results.items():
            _put(out, key.format(which=which, k=suite.attempts), suites[name][measure])
    if run.config.base and (pooled := pool(list(_pooled(run, suites).values()))):
        out["suites"][policy_stage(run, which) or "base"] = pooled


def pool(suites: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns pass@1 with its 95 % interval over the tasks of several suites; {} where there are none.

    "attempts" is the smallest number of attempts at a task.
    """
    solved = [rate for measures in suites for rate in measures["solved"].values()]
    if not solved:
        return {}
    low, high = interval(solved)
    return {
        "pass_at_1": sum(solved) / len(solved),
        "low": low,
        "high": high,
        "tasks": len(solved),
        "attempts": min(measures["attempts"] for measures in suites),
    }


def _put(out: dict[str, Any], path: str, value: Any) -> None:
    """Puts a value at a dotted path; a value of an earlier evaluation stays."""
    *sections, name = path.split(".")
    for section in sections:
        out = out.setdefault(section, {})
    out.setdefault(name, value)
