"""Published task formats: Harbor and Terminal-Bench directories, rows of SWE-bench and SWE-smith.

tasks = read_tasks("terminal-bench-2/")                                      # the format is detected
tasks = read_tasks("verified.parquet", ReadOptions(repos=Path("mirrors")), skipped := [])
write_predictions(Path("predictions.jsonl"), [prediction(task, changes, "my-model")])
"""

from composer_jax.tasks.formats.options import ReadOptions
from composer_jax.tasks.formats.predictions import prediction, write_predictions
from composer_jax.tasks.formats.read import read_tasks
from composer_jax.tasks.formats.swe_bench import gold_changes

__all__ = ["ReadOptions", "gold_changes", "prediction", "read_tasks", "write_predictions"]
