"""Tasks: the instruction, workspace and grader of what an agent does."""

from composer_jax.tasks.grader import Case, CaseGrader, Grader, LogGrader, ScriptGrader, SuiteGrader
from composer_jax.tasks.task import Task

__all__ = ["Case", "CaseGrader", "Grader", "LogGrader", "ScriptGrader", "SuiteGrader", "Task"]
