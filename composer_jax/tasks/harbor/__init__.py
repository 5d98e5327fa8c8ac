"""Tasks of ours as Harbor directories."""

from composer_jax.tasks.harbor.directory import read_task, write_task

__all__ = ["read_task", "write_task"]
