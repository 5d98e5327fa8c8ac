"""The files that every generated workspace has in common, and how its modules are laid out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from composer_jax.tasks.grader import Case

RUN_TESTS = Path(__file__).with_name("run_tests.py").read_text(encoding="utf-8")
"""The runner that the agent's run_tests tool starts. Real files, so that they are linted and tested like any
other."""


def visible_cases(cases: Sequence[Case]) -> str:
    """The text of cases.json: what run_tests.py checks. It is not a Python file, so grep does not find it."""
    return json.dumps([[*case.call, case.want] for case in cases])
