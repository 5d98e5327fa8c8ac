"""Steps of GRPO on completions (benchmarks/grpo_completions.py): the engine samples, the learner trains."""

import statistics
import tempfile
from pathlib import Path

from benchmarks.gpu_parts.output import Figures, digits, note
from benchmarks.gpu_parts.worker import print_figures
from benchmarks.grpo_completions import MESH, run
from benchmarks.peers.completions import GROUP, PROMPTS, UNTIMED
from composer_jax.parallel.platform import configure_cpu


def measure(small: bool) -> Figures:
    """Returns the medians of the steps after those that compile."""
    configure_cpu(MESH.cpu_devices)
    steps = UNTIMED + (1 if small else 10)
    note(f"rl, {steps} steps of {PROMPTS * GROUP} completions")
    with tempfile.TemporaryDirectory(prefix="composer-gpu-rl-") as folder:
        rows = run(steps, Path(folder))
    median = lambda name: statistics.median(row[name] for row in rows[UNTIMED:])  # noqa: E731
    return {
        "completions_per_s": digits(PROMPTS * GROUP / median("step_s")),
        "rollout_s": digits(median("rollout_s")),
        "train_s": digits(median("train_s")),
        "first_step_s": digits(rows[0]["step_s"]),
    }


if __name__ == "__main__":
    print_figures(measure)
