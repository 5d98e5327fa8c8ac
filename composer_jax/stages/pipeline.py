"""The whole pipeline: from an empty folder to an agent that has learned. Finished stages are not repeated."""

import sys
from pathlib import Path
from typing import Any

from composer_jax.evals.config import WHICH
from composer_jax.parallel.processes import require_one_process
from composer_jax.stages.evaluate import GREEDY, evaluate, evaluations
from composer_jax.stages.pretrain import pretrain
from composer_jax.stages.report import report, results
from composer_jax.stages.run import Run
from composer_jax.stages.sft import sft
from composer_jax.stages.train_rl import train_rl


def pipeline(run: Run) -> Path | str:
    """Runs every stage and returns the report's path or URL; its last line on stdout holds the headline results."""
    require_one_process("the whole pipeline")
    measured = evaluations(run)
    if not run.is_done(f"evaluate_{measured[-1]}"):
        run.services.check()
    train = {"sft": sft, "rl": train_rl}
    for step in ("base", "pretrain", "sft", "before", "greedy", "rl", "after"):
        if step == "pretrain" and run.config.pretraining:
            pretrain(run)
        elif step in run.config.stages:
            train[step](run)
        elif step in measured:
            evaluate(run, step)
        sys.stderr.flush()
    path = report(run)
    summary = results(run)
    parts = [headline(name, summary["suites"][name]) for name in run.config.evaluate.headline]
    print(f"{'; '.join([*parts, ''])}{summary['wall_seconds'] / 60:.0f} minutes: {path}")
    return path


def headline(name: str, suite: dict[str, Any]) -> str:
    """Returns the results of one suite in words, an arrow between evaluations: "bugfix pass@1 0.30 -> 0.89"."""
    measured = [suite[which] for which in WHICH if which in suite and which != GREEDY]

    def course(measure: str, digits: int) -> str:
        return " -> ".join(f"{measures[measure]:.{digits}f}" for measures in measured)

    words = f"{name} pass@1 {course('pass_at_1', 2)}"
    if "compaction_error" in measured[0]:
        words += f", compaction error {course('compaction_error', 2)}, summaries of "
        words += f"{course('tokens_per_summary', 0)} tokens"
    return words
