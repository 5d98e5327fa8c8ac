"""The event files that TensorBoard shows of a run, read back from their bytes."""

import struct
import sys

import pytest
from tensorboardX.proto import event_pb2

from composer_jax.errors import UserError
from composer_jax.observe.metrics import MetricsWriter, read_metrics
from composer_jax.observe.tensorboard import TensorBoardSink
from composer_jax.stages.run import Run
from configs.tiny import get_config


def events_of(folder):
    """name -> {step: value} as TensorBoard reads them: a file that starts after a step hides later steps before it."""
    shown: dict[str, dict[int, float]] = {}
    for file in sorted(folder.iterdir()):  # TensorBoard's order
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])  # length, its checksum, the event, its checksum
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.session_log.status == event.session_log.START:
                for values in shown.values():
                    for step in [step for step in values if step >= event.step]:
                        del values[step]
            for value in event.summary.value:
                steps = shown.setdefault(value.tag, {})
                assert event.step not in steps, "a step is shown twice"
                steps[event.step] = value.simple_value
    return shown


def test_tensorboard_shows_the_rows_of_the_file(tmp_path):
    path, folder = tmp_path / "m.jsonl", tmp_path / "tensorboard" / "rl"
    with MetricsWriter(path, sinks=[TensorBoardSink(tmp_path, "rl", {})]) as metrics:
        for step in range(4):
            metrics.write(step, loss=step / 2, reward=None if step < 2 else 1.0, bad=float("nan"))
    shown = events_of(folder)
    assert shown.keys() == {"loss", "reward", "time"}
    assert shown["loss"] == {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5} and shown["reward"] == {2: 1.0, 3: 1.0}
    assert list(shown["time"].values()) == pytest.approx([row["time"] for row in read_metrics(path)])


def test_a_run_that_goes_on_shows_no_step_twice(tmp_path):
    path, folder = tmp_path / "m.jsonl", tmp_path / "tensorboard" / "rl"
    with MetricsWriter(path, sinks=[TensorBoardSink(tmp_path, "rl", {})]) as metrics:
        for step in range(1, 6):
            metrics.write(step, loss=step)
        metrics.truncate_after(3)
        metrics.write(4, loss=40)
    assert events_of(folder)["loss"] == {1: 1, 2: 2, 3: 3, 4: 40}
    with MetricsWriter(path, sinks=[TensorBoardSink(tmp_path, "rl", {})]) as metrics:
        metrics.truncate_after(2)
        metrics.write(3, loss=30)
        metrics.write(4, loss=41)
    assert events_of(folder)["loss"] == {1: 1, 2: 2, 3: 30, 4: 41}


def test_a_row_whose_events_a_kill_has_lost_is_written_again(tmp_path):
    path, folder = tmp_path / "m.jsonl", tmp_path / "tensorboard" / "rl"
    with MetricsWriter(path) as metrics:  # as if the queue of events had died with the process
        metrics.write(1, loss=1.0)
    with MetricsWriter(path, sinks=[TensorBoardSink(tmp_path, "rl", {})]) as metrics:
        metrics.truncate_after(1)
        metrics.write(2, loss=2.0)
    assert events_of(folder)["loss"] == {1: 1.0, 2: 2.0}


def test_a_missing_package_is_named_before_the_run_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.delitem(sys.modules, "composer_jax.observe.tensorboard")
    config = get_config("smoke")
    config.metric_sinks = ("tensorboard",)
    with pytest.raises(UserError, match=r'pip install "composer_jax\[tensorboard\]"'):
        Run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
