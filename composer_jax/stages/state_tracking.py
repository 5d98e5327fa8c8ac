"""State tracking of weights at an address: what `launch.state_tracking` does."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_jax.atomic_write import write_atomically
from composer_jax.checkpoint.checkpoint import Checkpoint, open_checkpoint
from composer_jax.checkpoint.dtypes import require_float_dtype
from composer_jax.errors import UserError
from composer_jax.evals.state_tracking import (
    EncodedTask,
    StateResult,
    edit_distance,
    encode_tasks,
    read_tasks,
    run_tasks,
    summarise,
)
from composer_jax.event_loop import EventLoop
from composer_jax.observe.progress import Progress
from composer_jax.parallel.mesh import batch_shards
from composer_jax.parallel.platform import use_compilation_cache
from composer_jax.parallel.processes import is_first_process
from composer_jax.sampler.config import SamplerConfig
from composer_jax.stages.model import Model, mesh_of_axes
from composer_jax.storage.bucket import is_url

LONGEST_DEFAULT = 32_768
"""Tokens of prompt and answer unless the user says otherwise; fewer where the model has a shorter context."""


def track_state(
    address: str,
    repository: str,
    *,
    diffs: int,
    tasks: int,
    max_context: int | None,
    slots: int,
    dtype: str | None,
    axes: Mapping[str, int],
    out: str | None,
) -> dict[str, Any]:
    """Measures how well a model rebuilds files from their diffs; prints one JSON line and returns its content.

    Every process of a run must call it. Each reads the repository; process 0 writes and prints.

    Args:
      address: of weights (checkpoint/address.py).
      diffs, tasks: changes per task, and most tasks.
      max_context: tokens of a prompt with its answer; longer tasks are skipped. None is LONGEST_DEFAULT.
      slots: files that are written at once.
      axes: sizes of mesh axes (mesh_of_axes).
      out: file of JSON lines, one per task with what was written; None writes none.

    Raises:
      UserError: no such weights, no usable repository, or a package that is missing; before any weight is read.
    """
    use_compilation_cache()
    require_float_dtype(dtype)
    if out is not None and is_url(out):
        raise UserError(f"--out={out} is a URL, and results are written to a file of this machine; name one.")
    edit_distance("", "")  # raises if the package is missing
    checkpoint = open_checkpoint(address)
    network, text = checkpoint.config, checkpoint.text
    if max_context is not None and max_context > network.max_context:
        raise UserError(
            f"--max_context={max_context} exceeds the model's context of {network.max_context} tokens; use less."
        )
    limit = max_context or min(network.max_context, LONGEST_DEFAULT)
    encoded, skipped = encode_tasks(read_tasks(Path(repository).expanduser(), diffs), text.tokenizer, tasks, limit)
    model = _load_model(checkpoint, encoded, slots, dtype, axes)
    if not is_first_process():
        model.follow()
        return {}
    with Progress(len(encoded), "task", "state tracking") as progress, EventLoop() as loop:
        results = loop.run(run_tasks(encoded, model, text.decode, progress.update))
    summary = summarise(results) | {"diffs": diffs, "skipped": skipped}
    if out is not None:
        _write(out, results)
    print(json.dumps(summary))
    return summary


def _load_model(
    checkpoint: Checkpoint,
    tasks: list[EncodedTask],
    slots: int,
    dtype: str | None,
    axes: Mapping[str, int],
) -> Model:
    """Returns the model with a sampler that holds the longest task in every slot."""
    mesh = mesh_of_axes(axes)
    shards = batch_shards(mesh)
    config = SamplerConfig(
        slots=math.ceil(slots / shards) * shards,
        max_model_len=max(len(task.prompt) + task.max_tokens for task in tasks),
        prefill_shapes=((8, 32), (2, 256)),
    )
    return Model(*checkpoint.load(mesh, dtype, mtp=False), mesh, checkpoint.text, config)


def _write(out: str, results: list[StateResult]) -> None:
    lines = "".join(json.dumps(dataclasses.asdict(result)) + "\n" for result in results)
    write_atomically(Path(out), lines.encode())
