"""The files of a workspace whose agent has the tool run_tests: a runner and the cases that the agent may see."""

import json
from collections.abc import Sequence
from pathlib import Path

from composer_jax.tasks.grader import Case

RUN_TESTS = Path(__file__).with_name("run_tests.py").read_text(encoding="utf-8")
"""The text of run_tests.py, which the tool run_tests starts (agent/tools/compact.py)."""


def visible_cases(cases: Sequence[Case]) -> str:
    """The text of cases.json: what run_tests.py checks. It is not a Python file, so grep does not find it."""
    return json.dumps([[*case.call, case.want] for case in cases])
