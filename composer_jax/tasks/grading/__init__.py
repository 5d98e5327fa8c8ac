"""Grading: what the agent left behind, judged by what it never saw, in a sandbox it never touched."""

from composer_jax.tasks.grading.result import Grade
from composer_jax.tasks.grading.submission import as_changes, grade, untouched

__all__ = ["Grade", "as_changes", "grade", "untouched"]
