"""Task: an instruction, a workspace and a grader. Immutable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from composer_jax.errors import UserError
from composer_jax.tasks.grader import Grader, grader_from_json, grader_to_json, json_fields

Split = Literal["train", "heldout", "unseen"]
SPLITS: tuple[Split, ...] = ("train", "heldout", "unseen")


@dataclass(frozen=True, eq=False)
class Task:
    """One task for an agent. Two tasks are equal when their ids and contents are equal.

    id: unique name; each id is consumed once in training.
    files: the files of the workspace, relative path -> text; with a repository, the files on top of it.
    tools: names of the tools that the agent gets, in the order of their descriptions.
    metadata: knowledge for scripted experts and validation (the oracle edit, the facts); hidden from the agent.
    repository: the pristine folder below the workspace. packages: a folder of installed Python packages that commands
      can import. Both are read-only.
    network: whether commands may reach the network.
    image: the container image that commands need, or None.
    max_turns: most messages of the agent; an episode has no more than agent.limits.max_turns either. None: that alone.
    """

    id: str
    family: str
    split: Split
    instruction: str
    files: Mapping[str, str]
    tools: tuple[str, ...]
    grader: Grader
    metadata: Mapping[str, Any] = field(default_factory=dict)
    repository: Path | None = None
    packages: Path | None = None
    network: bool = False
    image: str | None = None
    max_turns: int | None = None

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise UserError(f"task {self.id} has split {self.split!r}; use one of {', '.join(SPLITS)}")

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of all that an agent and its grader can observe: neither ids nor metadata.

        Folders count by path, because they do not change.
        """
        data = self.to_json()
        content = [value for key, value in data.items() if key not in ("id", "family", "split", "metadata")]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.id)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-able dict from which `from_json` makes an equal task."""
        return json_fields(self) | {"grader": grader_to_json(self.grader)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Task:
        """Makes the task of a dict of `to_json`; files of earlier versions lack max_turns."""
        folders = {name: Path(data[name]) if data[name] else None for name in ("repository", "packages")}
        own = {"files": dict(data["files"]), "metadata": dict(data["metadata"])}
        grader = grader_from_json(data["grader"])
        return cls(**{**data, **folders, **own, "tools": tuple(data["tools"]), "grader": grader})
