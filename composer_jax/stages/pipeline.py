"""The whole pipeline: from an empty folder to an agent that has learned. Stages that are done are not repeated."""

import sys
from pathlib import Path

from composer_jax.parallel.processes import require_one_process
from composer_jax.stages.evaluate import evaluate
from composer_jax.stages.pretrain import pretrain
from composer_jax.stages.reinforce import reinforce
from composer_jax.stages.report import report, results
from composer_jax.stages.run import Run
from composer_jax.stages.sft import sft


def pipeline(run: Run) -> Path:
    """Runs every stage and returns the report's path; prints one line of results to stdout at the end."""
    require_one_process("the whole pipeline")
    if not run.done("evaluate_after"):
        run.check()
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
    found = results(run)
    rl, summary = found["rl"], found["summary"]
    print(
        f"pass@1 {rl['pass_at_1_before']:.2f} -> {rl['pass_at_1_after']:.2f}, compaction error "
        f"{summary['compaction_error_before']:.2f} -> {summary['compaction_error_after']:.2f}, summaries of "
        f"{summary['tokens_before']:.0f} -> {summary['tokens_after']:.0f} tokens, in "
        f"{found['wall_seconds'] / 60:.0f} minutes: {path}"
    )
    return path
