"""Tasks: what an agent is asked to do, where, and how the result is graded. Generators, splits, on-disk
format."""

from composer_jax.tasks.generate import FAMILIES, generate
from composer_jax.tasks.grader import Case, CaseGrader, Grader, LogGrader, ScriptGrader, SuiteGrader
from composer_jax.tasks.task import Task

__all__ = [
    "FAMILIES",
    "Case",
    "CaseGrader",
    "Grader",
    "LogGrader",
    "ScriptGrader",
    "SuiteGrader",
    "Task",
    "generate",
]
