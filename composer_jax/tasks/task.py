"""A Task: an instruction, a workspace, and how the result is graded. Immutable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from composer_jax.errors import UserError

Split = Literal["train", "heldout", "unseen"]
SPLITS: tuple[Split, ...] = ("train", "heldout", "unseen")


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
class Grader:
    """The hidden cases of a task and the seconds that evaluating all of them may take."""

    cases: tuple[Case, ...]
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.cases:
            raise UserError("a grader needs at least one hidden case; give it one")

    def to_json(self) -> dict[str, Any]:
        cases = [{"call": case.call, "want": case.want} for case in self.cases]
        return {"cases": cases, "timeout_s": self.timeout_s}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Grader:
        cases = []
        for item in data["cases"]:
            module, function, args = item["call"]
            cases.append(Case(module, function, tuple(args), item["want"]))
        return cls(tuple(cases), data["timeout_s"])


@dataclass(frozen=True, eq=False)
class Task:
    """What is to be done, where, and how it is graded.

    id: unique name, also the key under which a task is consumed once.
    files: the workspace, relative path -> text.
    tools: names of the tools the agent gets, in the order in which they are described.
    metadata: what a scripted expert may know (the oracle edit, the facts); an agent never sees it.
    Two tasks are equal when their ids and contents are.
    """

    id: str
    family: str
    split: Split
    instruction: str
    files: Mapping[str, str]
    tools: tuple[str, ...]
    grader: Grader
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise UserError(f"task {self.id} has split {self.split!r}; use one of {', '.join(SPLITS)}")

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of everything that makes the task what it is to an agent: not its id, not its
        metadata."""
        content = [self.instruction, dict(self.files), list(self.tools), self.grader.to_json()]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.id)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict from which `from_json` makes an equal task."""
        return {
            "id": self.id,
            "family": self.family,
            "split": self.split,
            "instruction": self.instruction,
            "files": dict(self.files),
            "tools": list(self.tools),
            "grader": self.grader.to_json(),
            "metadata": dict(self.metadata),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Task:
        return cls(
            id=data["id"],
            family=data["family"],
            split=data["split"],
            instruction=data["instruction"],
            files=dict(data["files"]),
            tools=tuple(data["tools"]),
            grader=Grader.from_json(data["grader"]),
            metadata=dict(data["metadata"]),
        )
