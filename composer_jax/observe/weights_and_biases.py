"""Weights & Biases as a sink of metrics."""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError

try:
    import wandb  # pyright: ignore[reportMissingImports]  # optional
except ImportError as error:
    raise ImportError('it needs the package wandb: pip install "composer_jax[wandb]"') from error


class WandbSink:
    """Writes the rows of a stage into a W&B run of its own, in the group of the run folder.

    W&B's environment variables choose the project (WANDB_PROJECT, by default composer_jax), the entity and the mode:
    with WANDB_MODE=offline the rows stay in DIR/wandb until `wandb sync`. W&B takes no row back, so the first row of a
    step stays where a resumed run takes the step again.
    """

    def __init__(self, workdir: Path, stage: str, config: Mapping[str, Any]):
        """Raises a UserError if W&B refuses the run, such as without a key."""
        run_id = workdir / "wandb" / f"{stage}.id"
        if not run_id.exists():
            write_atomically(run_id, uuid.uuid4().hex.encode())
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "composer_jax"),
                group=workdir.name,
                job_type=stage,
                name=f"{workdir.name} {stage}",
                id=run_id.read_text(),
                resume="allow",
                config=dict(config),
                dir=workdir,
                reinit="create_new",  # a stage and its suites have a run each at the same time
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            raise UserError(
                f"Weights & Biases refuses the run ({error}); run `wandb login`, or set WANDB_MODE=offline."
            ) from error

    def write(self, row: Mapping[str, Any]) -> None:
        if row["step"] >= self._run.step:
            self._run.log({name: value for name, value in row.items() if value is not None}, step=row["step"])

    def truncate_after(self, step: int) -> None:
        """Does nothing: W&B takes no row back, and `write` leaves out the steps that it has."""

    def close(self) -> None:
        self._run.finish()
