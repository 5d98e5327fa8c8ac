"""results.json (the contract of the demo) and the report made from it."""

import json
from pathlib import Path
from typing import Any

from composer_jax.atomic_write import write_atomically
from composer_jax.observe.report import write_report
from composer_jax.stages.evaluate import HELDOUT
from composer_jax.stages.run import Run

STAGES = ("pretrain", "sft", "evaluate_before", "rl", "evaluate_after")


def report(run: Run) -> Path:
    """Writes results.json from the stages that are done, plots and report.html; returns the report's path."""
    write_atomically(run.path / "results.json", (json.dumps(results(run), indent=1) + "\n").encode())
    return write_report(run.path)


def results(run: Run) -> dict[str, Any]:
    """What every finished stage found. Parts of stages that are not done are left out."""
    done = {name: run.workdir.stage_result(name) for name in STAGES if run.workdir.stage_done(name)}
    phases = {name: stage["seconds"] for name, stage in done.items()}
    out: dict[str, Any] = {
        "config_hash": run.workdir.config_hash,
        "seed": run.settings.seed,
        "wall_seconds": sum(phases.values()),
        "peak_rss_gb": max((stage["peak_rss_gb"] for stage in done.values()), default=0.0),
        "phases_s": phases,
        "throughput": {},
    }
    if "pretrain" in done:
        stage = done["pretrain"]
        out["cpt"] = {k: stage[k] for k in ("heldout_nll_first", "heldout_nll_last", "tokens")}
        out["throughput"]["train_tokens_per_s"] = stage["train_tokens_per_s"]
    if "sft" in done:
        out["sft"] = {k: done["sft"][k] for k in ("loss_last", "tokens", "expert_reward")}
    rl = {k: done["rl"][k] for k in ("steps", "episodes", "compilations_after_first_tenth")} if "rl" in done else {}
    summary: dict[str, Any] = {}
    for which in ("before", "after"):
        if f"evaluate_{which}" not in done:
            continue
        stage = done[f"evaluate_{which}"]
        suites = stage["suites"]
        rl |= {
            f"pass_at_1_{which}": suites["bugfix"]["pass_at_1"],
            f"pass_at_8_{which}": suites["bugfix"]["pass_at_k"],
            f"unseen_family_{which}": suites["unseen"]["pass_at_1"],
        }
        summary |= {
            f"pass_{which}": suites["recall_short"]["pass_at_1"],
            f"pass_uncompacted_{which}": suites["recall_whole"]["pass_at_1"],
            f"tokens_{which}": suites["recall_short"]["tokens_per_summary"],
            f"compaction_error_{which}": stage["compaction_error"],
        }
        if which == "before":
            summary["prompted_baseline"] = {
                "pass": suites["recall_long"]["pass_at_1"],
                "tokens": suites["recall_long"]["tokens_per_summary"],
                "compaction_error": stage["compaction_error_long"],
            }
        for name in suites:
            if name.startswith(HELDOUT):
                rates = out.setdefault("heldout", {}).setdefault(_as_key(name.removeprefix(HELDOUT)), {})
                rates[f"pass_at_1_{which}"] = suites[name]["pass_at_1"]
        out["throughput"]["decode_tokens_per_s"] = stage["decode_tokens_per_s"]
    if "rl" in done:
        stage = done["rl"]
        out["throughput"]["sandbox_runs_per_s"] = stage["sandbox_runs"] / stage["step_s"]
        out["rl_time_s"] = {k: stage[k] for k in ("rollout_s", "sandbox_s", "train_s", "step_s")}
    return out | ({"rl": rl} if rl else {}) | ({"summary": summary} if summary else {})


def _as_key(family: str) -> str:
    """A dot in results.json's paths leads to a field within a field."""
    return family.replace(".", "_")
