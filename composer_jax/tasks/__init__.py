"""Tasks: what an agent is asked to do, where, and how the result is graded."""

from composer_jax.tasks.grader import Case, CaseGrader, Grader, LogGrader, ScriptGrader, SuiteGrader
from composer_jax.tasks.task import Task

__all__ = ["Case", "CaseGrader", "Grader", "LogGrader", "ScriptGrader", "SuiteGrader", "Task"]
