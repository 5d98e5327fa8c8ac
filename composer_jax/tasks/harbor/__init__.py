"""Tasks of this library as Harbor directories: write_task, read_task."""

from composer_jax.tasks.harbor.directory import read_task, write_task

__all__ = ["read_task", "write_task"]
