"""Graders: the part of a Task that says how it is graded. The package grading/ does the grading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from composer_jax.errors import UserError


def json_fields(record: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass as JSON values: tuples as lists, paths as texts."""
    return {field.name: _json_value(getattr(record, field.name)) for field in fields(record)}


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, Path) else value


@dataclass(frozen=True)
class _JsonGrader:
    """A grader whose JSON has an entry for each field; other entries are ignored."""

    def to_json(self) -> dict[str, Any]:
        return json_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        values = {field.name: data[field.name] for field in fields(cls)}
        for name in values.keys() & {"fail_to_pass", "pass_to_pass", "command"}:
            values[name] = tuple(values[name])
        if "tests" in values:
            values["tests"] = Path(values["tests"]) if values["tests"] else None
        if "environment" in values:
            values["environment"] = dict(values["environment"])
        return cls(**values)


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
        """[module, function, args]: the part that may enter a sandbox, without the expected value."""
        return [self.module, self.function, list(self.args)]


@dataclass(frozen=True)
class CaseGrader:
    """Hidden cases: a sandbox calls functions, their values are compared outside it. timeout_s: seconds for all."""

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
class SuiteGrader(_JsonGrader):
    """Tests of a repository: all of them must pass, and a missing test has failed.

    fail_to_pass, pass_to_pass: pytest node ids ("tests/test_a.py::test_b[1]"), disjoint, the first not empty.
    tests: folder of pristine test files (relative paths as in the workspace). They replace the workspace's test files
      before the run, so that an agent's changes to them do not count. None: the pristine tests of the repository.
    command: the command that runs the tests; test ids and report options are added.
    timeout_s: seconds of the whole run.
    partial: reward the fraction of fail_to_pass that passes (if all of pass_to_pass do) instead of all or nothing.
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


@dataclass(frozen=True)
class ScriptGrader(_JsonGrader):
    """Harbor's contract: `bash /tests/test.sh` writes a number to /logs/verifier/reward.txt or reward.json.

    tests: folder that only the grading sandbox sees, at /tests. timeout_s: seconds of the script. environment: its
    variables.
    """

    tests: Path
    timeout_s: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LogGrader(_JsonGrader):
    """SWE-bench's contract: a script prints a log that states the status of each test.

    script: the text of eval.sh, which runs in the container after the changes were applied.
    parser: the name of the log's parser (grading/log_parsers.py).
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


Grader = CaseGrader | SuiteGrader | ScriptGrader | LogGrader
KINDS: Mapping[str, type[Grader]] = {
    "cases": CaseGrader,
    "suite": SuiteGrader,
    "script": ScriptGrader,
    "log": LogGrader,
}


def grader_to_json(grader: Grader) -> dict[str, Any]:
    """Returns a JSON-able dict from which `grader_from_json` makes an equal grader."""
    kind = next(kind for kind, cls in KINDS.items() if type(grader) is cls)
    return {"kind": kind, **grader.to_json()}


def grader_from_json(data: Mapping[str, Any]) -> Grader:
    """Makes the grader of a dict of `grader_to_json`. Raises UserError for an unknown kind."""
    if data["kind"] not in KINDS:
        raise UserError(f"{data['kind']!r} is not a kind of grader; use one of {', '.join(KINDS)}")
    return KINDS[data["kind"]].from_json(data)
