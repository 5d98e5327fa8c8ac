"""Metric sinks: by name, by import path and from a file, and what they get of a run that goes on."""

import pytest

from composer_jax.errors import UserError
from composer_jax.observe.metrics import MetricsWriter
from composer_jax.observe.sinks import SINKS, find_sinks
from composer_jax.schema.run_config import run_config
from composer_jax.stages.run import Run
from configs.tiny import get_config


class Calls:
    """A sink that records every call."""

    def __init__(self, workdir, stage, config):
        self.stage, self.seed, self.calls = stage, config["seed"], []

    def truncate_after(self, step):
        self.calls.append(("truncate_after", step))

    def write(self, row):
        self.calls.append(("write", row["step"], row["loss"]))

    def close(self):
        self.calls.append("close")


OF_A_FILE = """
class Lines:
    def __init__(self, workdir, stage, config):
        self.file = workdir / f"{stage}.lines"
        self.lines = []
    def truncate_after(self, step):
        self.lines = self.lines[: step + 1]
    def write(self, row):
        self.lines.append(f"{row['step']} {row['loss']}")
    def close(self):
        self.file.write_text("; ".join(self.lines))
"""


def test_a_sink_gets_the_rows_of_a_run_that_goes_on(tmp_path):
    first, second = Calls(tmp_path, "rl", {"seed": 0}), Calls(tmp_path, "rl", {"seed": 0})
    with MetricsWriter(tmp_path / "m.jsonl", sinks=[first]) as metrics:
        for step in range(3):
            metrics.write(step, loss=float(step))
        metrics.truncate_after(1)
    assert first.calls == [
        ("truncate_after", -1),
        *(("write", step, float(step)) for step in range(3)),
        ("truncate_after", 1),
        "close",
    ]
    with MetricsWriter(tmp_path / "m.jsonl", sinks=[second]) as metrics:
        metrics.write(2, loss=float("inf"))
    assert second.calls == [("truncate_after", 0), ("write", 1, 1.0), ("write", 2, None), "close"]


def test_a_run_opens_the_sinks_of_its_config(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setitem(SINKS, "calls", lambda *arguments: opened.append(Calls(*arguments)) or opened[-1])
    (tmp_path / "own.py").write_text(OF_A_FILE)
    config = get_config("smoke")
    config.metric_sinks = ("calls", f"{tmp_path}/own.py:Lines")
    with Run(config, tmp_path / "run") as run, run.metrics("sft") as metrics:
        metrics.write(0, loss=2.0)
        metrics.write(1, loss=1.5)
    (calls,) = opened
    assert (calls.stage, calls.seed) == ("sft", config.seed)
    assert calls.calls == [("truncate_after", -1), ("write", 0, 2.0), ("write", 1, 1.5), "close"]
    assert (tmp_path / "run" / "sft.lines").read_text() == "0 2.0; 1 1.5"


def test_a_run_without_sinks_has_its_own_file(tmp_path):
    with Run(get_config("smoke"), tmp_path / "run") as run, run.metrics("sft") as metrics:
        metrics.write(0, loss=2.0)
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"config.json", "metrics"}
    assert not (tmp_path / "run" / "tensorboard").exists() and not (tmp_path / "run" / "wandb").exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tensorbord", "config.metric_sinks='tensorbord' is unknown; use one of tensorboard, wandb, or an import path"),
        ("no_such_module:Sink", "config.metric_sinks='no_such_module:Sink' cannot be imported: No module named"),
        ("no_such_file.py:Sink", "config.metric_sinks='no_such_file.py:Sink' cannot be imported: .*No such file"),
    ],
)
def test_a_bad_name_is_one_sentence(name, sentence):
    with pytest.raises(UserError, match=sentence):
        find_sinks([name])


def test_the_switch_of_older_configs_names_the_field_of_today():
    with pytest.raises(UserError, match=r'tensorboard is now metric_sinks=\("tensorboard",\)'):
        run_config(get_config("smoke").to_dict() | {"tensorboard": True})
