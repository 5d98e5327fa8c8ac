"""The whole pipeline: from an empty folder to an agent that has learned. Finished stages are not repeated."""

import sys
from pathlib import Path
from typing import Any

from composer_jax.parallel.processes import require_one_process
from composer_jax.stages.evaluate import evaluate
from composer_jax.stages.pretrain import pretrain
from composer_jax.stages.reinforce import reinforce
from composer_jax.stages.report import report, results
from composer_jax.stages.run import Run
from composer_jax.stages.sft import sft


def pipeline(run: Run) -> Path:
    """Runs every stage and returns the report's path; its last line on stdout holds the headline results."""
    require_one_process("the whole pipeline")
    if not run.is_done("evaluate_after"):
        run.services.check()
    for stage in (
        pretrain,
        sft,
        lambda run: evaluate(run, "before"),
        reinforce,
        lambda run: evaluate(run, "after"),
    ):
        stage(run)
        sys.stderr.flush()
    path = report(run)
    summary = results(run)
    parts = [headline(name, summary["suites"][name]) for name in run.config.evaluate.headline]
    print(f"{'; '.join([*parts, ''])}{summary['wall_seconds'] / 60:.0f} minutes: {path}")
    return path


def headline(name: str, suite: dict[str, Any]) -> str:
    """Returns the results of one suite in words: "bugfix pass@1 0.30 -> 0.89"."""
    before, after = suite["before"], suite["after"]
    words = f"{name} pass@1 {before['pass_at_1']:.2f} -> {after['pass_at_1']:.2f}"
    if "compaction_error" in before:
        words += (
            f", compaction error {before['compaction_error']:.2f} -> {after['compaction_error']:.2f}, summaries of "
            f"{before['tokens_per_summary']:.0f} -> {after['tokens_per_summary']:.0f} tokens"
        )
    return words
