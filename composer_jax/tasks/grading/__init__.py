"""Grading: what the agent left behind, judged by what it never saw, in a sandbox it never touched."""

from composer_jax.tasks.grading.result import Grade
from composer_jax.tasks.grading.submission import changes_from_texts, grade, initial_changes

__all__ = ["Grade", "changes_from_texts", "grade", "initial_changes"]
