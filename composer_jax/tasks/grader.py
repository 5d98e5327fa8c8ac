"""What a Task says about its grading. How grading is done is in grading/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_jax.errors import UserError


@dataclass(frozen=True)
class Case:
    """One hidden check: `module.function(*args)` must return exactly `want` (same value, same type).

    `args` and `want` are JSON values: None, bool, int, float, str, and lists and string-keyed dicts of them.
    """

    module: str
    function: str
    args: tuple[Any, ...]
    want: Any

    @property
    def call(self) -> list[Any]:
        """The part that may enter a sandbox: [module, function, args], without the expected value."""
        return [self.module, self.function, list(self.args)]


@dataclass(frozen=True)
class CaseGrader:
    """Hidden cases: functions are called, their values compared outside. timeout_s: seconds for all of them."""

    cases: tuple[Case, ...]
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.cases:
            raise UserError("a grader needs at least one hidden case; give it one")

    def to_json(self) -> dict[str, Any]:
        cases = [{"call": case.call, "want": case.want} for case in self.cases]
        return {"cases": cases, "timeout_s": self.timeout_s}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CaseGrader:
        cases = []
        for item in data["cases"]:
            module, function, args = item["call"]
            cases.append(Case(module, function, tuple(args), item["want"]))
        return cls(tuple(cases), data["timeout_s"])


PYTEST = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--disable-warnings", "--color=no", "--tb=short")


@dataclass(frozen=True)
class SuiteGrader:
    """Tests of a repository: all of them must pass, and one that is missing has failed.

    fail_to_pass, pass_to_pass: pytest node ids ("tests/test_a.py::test_b[1]"), disjoint, the first not empty.
    tests: folder of pristine test files (relative paths as in the workspace) that are laid over the workspace before
      the run, so that what an agent did to them does not count. None: the workspace's own pristine ones.
    command: what runs them; test ids and the option for the report are added.
    timeout_s: seconds of the whole run.
    partial: reward the share of fail_to_pass that passes (if all of pass_to_pass do) in place of all or nothing.
    """

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    tests: Path | None = None
    command: tuple[str, ...] = PYTEST
    timeout_s: float = 120.0
    partial: bool = False

    def __post_init__(self) -> None:
        if not self.fail_to_pass:
            raise UserError("a suite grader needs at least one test in fail_to_pass; give it one")
        if both := set(self.fail_to_pass) & set(self.pass_to_pass):
            raise UserError(f"the test {min(both)!r} is in fail_to_pass and in pass_to_pass; it can only be in one")

    def to_json(self) -> dict[str, Any]:
        return {
            "fail_to_pass": list(self.fail_to_pass),
            "pass_to_pass": list(self.pass_to_pass),
            "tests": str(self.tests) if self.tests else None,
            "command": list(self.command),
            "timeout_s": self.timeout_s,
            "partial": self.partial,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SuiteGrader:
        return cls(
            tuple(data["fail_to_pass"]),
            tuple(data["pass_to_pass"]),
            Path(data["tests"]) if data["tests"] else None,
            tuple(data["command"]),
            data["timeout_s"],
            data["partial"],
        )


@dataclass(frozen=True)
class ScriptGrader:
    """Harbor's contract: `bash /tests/test.sh` writes a number to /logs/verifier/reward.txt or reward.json.

    tests: folder that is shown at /tests, to nobody but the grading sandbox. timeout_s: seconds of the script.
    environment: its variables.
    """

    tests: Path
    timeout_s: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"tests": str(self.tests), "timeout_s": self.timeout_s, "environment": dict(self.environment)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScriptGrader:
        return cls(Path(data["tests"]), data["timeout_s"], dict(data["environment"]))


@dataclass(frozen=True)
class LogGrader:
    """SWE-bench's contract: a script prints a log, and what the log says of each test counts.

    script: the text of eval.sh, run in the container after the changes were laid on it.
    parser: what kind of log it is (log_status.PARSERS).
    fail_to_pass, pass_to_pass: names of tests as the log spells them, disjoint, the first not empty.
    fail_only: the log names only failures, so a test that it does not name has passed.
    timeout_s: seconds of the script.
    """

    script: str
    parser: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    fail_only: bool = False
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if not self.fail_to_pass:
            raise UserError("a log grader needs at least one test in fail_to_pass; give it one")

    def to_json(self) -> dict[str, Any]:
        return {
            "script": self.script,
            "parser": self.parser,
            "fail_to_pass": list(self.fail_to_pass),
            "pass_to_pass": list(self.pass_to_pass),
            "fail_only": self.fail_only,
            "timeout_s": self.timeout_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LogGrader:
        return cls(
            data["script"],
            data["parser"],
            tuple(data["fail_to_pass"]),
            tuple(data["pass_to_pass"]),
            data["fail_only"],
            data["timeout_s"],
        )


Grader = CaseGrader | SuiteGrader | ScriptGrader | LogGrader
KINDS: Mapping[str, type[Grader]] = {
    "cases": CaseGrader,
    "suite": SuiteGrader,
    "script": ScriptGrader,
    "log": LogGrader,
}


def grader_to_json(grader: Grader) -> dict[str, Any]:
    """A JSON-able dict from which `grader_from_json` makes an equal grader."""
    kind = next(kind for kind, cls in KINDS.items() if type(grader) is cls)
    return {"kind": kind, **grader.to_json()}


def grader_from_json(data: Mapping[str, Any]) -> Grader:
    """The grader of such a dict. Raises UserError for a kind that there is not."""
    if data["kind"] not in KINDS:
        raise UserError(f"{data['kind']!r} is not a kind of grader; use one of {', '.join(KINDS)}")
    return KINDS[data["kind"]].from_json(data)
