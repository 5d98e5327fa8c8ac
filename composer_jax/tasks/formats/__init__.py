"""Published task formats: Harbor and Terminal-Bench directories, rows of SWE-bench and SWE-smith.

tasks = read_tasks("terminal-bench-2/")                                      # the format is detected
tasks = read_tasks("verified.parquet", ReadOptions(repos=Path("mirrors")), skipped := [])
"""

from composer_jax.tasks.formats.options import ReadOptions
from composer_jax.tasks.formats.read import read_tasks

__all__ = ["ReadOptions", "read_tasks"]
