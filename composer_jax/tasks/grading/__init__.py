"""Grading: a fresh sandbox runs hidden checks on the changes that an agent made."""

from composer_jax.tasks.grading.result import Grade
from composer_jax.tasks.grading.submission import changes_from_texts, grade, initial_changes

__all__ = ["Grade", "changes_from_texts", "grade", "initial_changes"]
