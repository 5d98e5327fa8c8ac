"""The runs of Weights & Biases that a run leaves without a network, read back from their files."""

import json
import shutil
import struct

import pytest

from composer_jax.errors import UserError
from composer_jax.observe.metrics import MetricsWriter, read_metrics
from composer_jax.stages.run import Run
from configs.tiny import get_config

wandb = pytest.importorskip("wandb", reason='pip install "composer_jax[wandb]"')


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_PROJECT": "agents"}.items():
        monkeypatch.setenv(name, value)


def records_of(file):
    """The records of a .wandb file: blocks of 32 KiB that hold (checksum, size, type, bytes), as in LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = file.read_bytes(), 7, b""  # after the header of the file
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts, place = parts + data[place + 7 : place + 7 + size], place + 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(parts)
            parts = b""


def runs_of(workdir):
    """(run, step -> its numbers) of each W&B run in a folder, in the order in which they began."""
    wandb.teardown()  # waits for W&B's process, which writes the files
    found = []
    for file in (workdir / "wandb").glob("offline-run-*/*.wandb"):
        records = list(records_of(file))
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        steps = {}
        for record in records:
            if record.WhichOneof("record_type") == "history":
                items = {item.nested_key[0] if item.nested_key else item.key: item for item in record.history.item}
                steps[record.history.step.num] = {name: json.loads(item.value_json) for name, item in items.items()}
        found.append((run, steps))
    return sorted(found, key=lambda entry: entry[0].start_time.ToNanoseconds())


def test_a_stage_and_its_suites_are_two_runs_of_one_group(tmp_path):
    config = get_config("smoke")
    config.metric_sinks = ("wandb",)
    with Run(config, tmp_path / "mine") as run, run.metrics("rl") as rl, run.metrics("evaluate_rl") as suites:
        for step in range(3):
            rl.write(step, loss=step / 2, reward=None if step < 2 else 1.0, bad=float("nan"))
            if step:
                suites.write(step, pass_at_1_bugs=0.25 * step)
    (of_rl, rows), (of_suites, suite_rows) = runs_of(tmp_path / "mine")
    assert [of_rl.display_name, of_rl.job_type, of_rl.run_group, of_rl.project] == ["mine rl", "rl", "mine", "agents"]
    assert (of_suites.display_name, of_suites.run_group) == ("mine evaluate_rl", "mine")
    assert {item.key: json.loads(item.value_json) for item in of_rl.config.update}["seed"] == config.seed
    assert {step: row["loss"] for step, row in rows.items()} == {0: 0.0, 1: 0.5, 2: 1.0}
    assert [row.get("reward") for row in rows.values()] == [None, None, 1.0] and "bad" not in rows[0]
    times = [row["time"] for row in read_metrics(tmp_path / "mine" / "metrics" / "rl.jsonl")]
    assert [row["time"] for row in rows.values()] == times
    assert {step: row["pass_at_1_bugs"] for step, row in suite_rows.items()} == {1: 0.25, 2: 0.5}


def test_a_run_that_goes_on_keeps_its_identity_and_the_first_row_of_a_step(tmp_path):
    from composer_jax.observe.weights_and_biases import WandbSink

    before, after = tmp_path / "before", tmp_path / "after"
    with MetricsWriter(before / "m.jsonl", sinks=[WandbSink(before, "rl", {})]) as metrics:
        for step in range(1, 4):
            metrics.write(step, loss=step)
        metrics.truncate_after(1)
        metrics.write(2, loss=20)
        metrics.write(4, loss=4)
    (after / "wandb").mkdir(parents=True)  # W&B names folders by the second, so the second run has another one here
    for file in ("m.jsonl", "wandb/rl.id"):
        shutil.copy(before / file, after / file)
    with MetricsWriter(after / "m.jsonl", sinks=[WandbSink(after, "rl", {})]) as metrics:
        metrics.write(5, loss=5)
    ((first, rows),), ((second, later),) = runs_of(before), runs_of(after)
    assert first.run_id == second.run_id
    assert {step: row["loss"] for step, row in rows.items()} == {1: 1, 2: 2, 3: 3, 4: 4}
    assert {step: row["loss"] for step, row in later.items()} == {4: 4, 5: 5}


def test_a_refusal_is_one_sentence(tmp_path, monkeypatch):
    from composer_jax.observe.weights_and_biases import WandbSink

    monkeypatch.setattr(wandb, "init", lambda **options: (_ for _ in ()).throw(wandb.Error("no API key")))
    with pytest.raises(UserError, match=r"Biases refuses the run \(no API key\); run `wandb login`, or set WANDB_MODE"):
        WandbSink(tmp_path, "rl", {})
