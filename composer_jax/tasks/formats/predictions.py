"""Predictions as SWE-bench reads them: JSON lines of instance_id, model_name_or_path, model_patch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from composer_jax.sandbox import Change
from composer_jax.tasks.patches.git_diff import patch_from_changes
from composer_jax.tasks.task import Task


def prediction(task: Task, changes: Mapping[str, Change], model: str) -> dict[str, str]:
    """Returns the prediction of one episode: its changes to the task's repository as a git diff."""
    patch = patch_from_changes(task.repository, changes)
    return {"instance_id": task.id, "model_name_or_path": model, "model_patch": patch}


def write_predictions(path: Path, predictions: Iterable[Mapping[str, str]]) -> None:
    """Writes the file for --predictions_path of swebench.harness.run_evaluation."""
    with path.open("w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(json.dumps(line) + "\n" for line in predictions)
