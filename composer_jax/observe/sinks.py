"""Metric sinks: where the rows of a run's metrics go, beside its own files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from composer_jax.extensions import import_object, resolve


class Sink(Protocol):
    """Takes copies of the rows of one stage (observe/metrics.py).

    The run itself does not read a sink: it continues DIR/metrics/STAGE.jsonl, which every run has.
    """

    def truncate_after(self, step: int) -> None:
        """Drops the rows of steps after `step`, of all with -1. It is called before the first row, too: an interrupted
        run goes on from an earlier step, and its last row comes again because a kill may have lost the copy."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Takes a row: "step", "time" (seconds since the start of the run), and numbers, or None for those without."""

    def close(self) -> None:
        """Ends the stage. Rows that were written survive a process that is killed before."""


OpenSink = Callable[[Path, str, Mapping[str, Any]], Sink]
"""(folder of the run, stage, config of the run) -> a sink for the rows of that stage."""

SINKS: dict[str, str | OpenSink] = {
    "tensorboard": "composer_jax.observe.tensorboard:TensorBoardSink",
    "wandb": "composer_jax.observe.weights_and_biases:WandbSink",
}
"""Name -> sink, or the import path of one whose package is optional."""


def find_sinks(names: Sequence[str]) -> list[OpenSink]:
    """Returns the sinks of config.metric_sinks, entries of SINKS or import paths.

    Raises UserError if a name is unknown, or the package of a sink is not installed.
    """
    place = "config.metric_sinks"
    entries = [resolve(name, SINKS, place) for name in names]
    return [import_object(entry, place) if isinstance(entry, str) else entry for entry in entries]
