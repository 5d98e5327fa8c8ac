import json

import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.observe.metrics import MetricsWriter, read_metrics


def test_a_row_is_written_only_if_the_run_still_has_its_folder(tmp_path):
    def taken_over():
        raise UserError("taken over")

    with MetricsWriter(tmp_path / "m.jsonl", taken_over) as writer, pytest.raises(UserError, match="taken over"):
        writer.write(1, loss=1.0)
    assert read_metrics(tmp_path / "m.jsonl") == []


def test_rows_come_back_as_written_and_are_on_disk_at_once(tmp_path):
    path = tmp_path / "metrics" / "rl.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(1, loss=np.float32(0.5), tokens=np.int64(7))
        assert [row["loss"] for row in read_metrics(path)] == [0.5]
        metrics.write(2, loss=2, reward_memory_chain=None)
    first, second = read_metrics(path)
    assert first["tokens"] == 7 and isinstance(first["tokens"], int)
    assert list(first) == ["step", "time", "loss", "tokens"]
    assert second["reward_memory_chain"] is None and second["time"] >= first["time"] >= 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_null(tmp_path, value):
    with MetricsWriter(tmp_path / "m.jsonl") as metrics:
        metrics.write(0, loss=value)
    assert json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)["loss"] is None


def test_truncate_after_drops_later_steps_and_writing_continues(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as metrics:
        for step in range(6):
            metrics.write(step, loss=step)
        metrics.truncate_after(3)
        metrics.write(4, loss=-4.0)
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, -4),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("torn", ['{"step":2,"ti', '{"step":2,"time":3.0}', "\udcff"])
def test_a_killed_run_loses_only_its_torn_line(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    whole = '{"step":0,"time":5.0}\n{"step":1,"time":90.5}\n'
    path.write_bytes((whole + torn).encode(errors="surrogateescape"))
    assert [row["step"] for row in read_metrics(path)] == [0, 1]
    with MetricsWriter(path) as metrics:
        metrics.write(2)
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert 90.5 <= rows[-1]["time"] < 95  # the clock goes on; the pause is not counted


def test_truncating_to_before_the_first_row_empties_the_file(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl") as metrics:
        metrics.write(3)
        metrics.truncate_after(-1)
        metrics.write(0)
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [0]


def test_going_back_without_truncating_is_an_error(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl") as metrics:
        metrics.write(5)
        with pytest.raises(ValueError, match=r"step 4 comes after step 5 .* truncate_after\(3\)"):
            metrics.write(4)
        with pytest.raises(ValueError, match="written by the MetricsWriter"):
            metrics.write(6, time=1.0)


def test_damage_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step":0,"time":1}\nnonsense\n{"step":1,"time":2}\n')
    with pytest.raises(UserError, match="line 2 of .*m.jsonl is not a metrics row"):
        read_metrics(path)


def test_no_file_is_no_rows(tmp_path):
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the folder"):
        MetricsWriter(tmp_path / "file" / "m.jsonl")
