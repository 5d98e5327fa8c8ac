"""The benchmark of traffic prints what is measured, measures what is missing, and its kills really kill."""

import json

import numpy as np
import pytest

from benchmarks import traffic, traffic_baselines, traffic_batches
from composer_jax.realtime.simulation import SimulatedWorld


def printed(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_rows_that_exist_are_printed_at_once(tmp_path, capsys, monkeypatch):
    calls = []
    monkeypatch.setattr(
        traffic,
        "MEASURES",
        {
            "a": lambda: calls.append("a") or {"x": 1, "lost": 2},
            "b": lambda: calls.append("b") or {"y": 3, "lost": 4},
            "c": lambda: {"z": 5},
        },
    )
    file = tmp_path / "rows.json"
    traffic.main([f"--rows={file}", "--only=b"])
    assert printed(capsys) == {"y": 3, "lost": 4}
    traffic.main([f"--rows={file}", "--only=c"])
    assert printed(capsys) == {"z": 5}  # nothing could be lost
    traffic.main([f"--rows={file}"])
    assert printed(capsys) == {"x": 1, "y": 3, "z": 5, "lost": 6}
    assert [row["name"] for row in json.loads(file.read_text())] == ["a", "b", "c"]
    traffic.main([f"--rows={file}"])
    assert calls == ["b", "a"]
    traffic.main([f"--rows={file}", "--fresh"])
    assert calls == ["b", "a", "a", "b"]
    with pytest.raises(SystemExit):
        traffic.main([f"--rows={file}", "--only=d"])


def test_labels_at_one_age_against_the_control(monkeypatch):
    monkeypatch.setattr(traffic, "WORLD", SimulatedWorld(users=100, sessions=60))
    row = traffic.measure_labels()
    assert abs(row["label_bias_z"]) < 2 < -row["by_now_z"]
    assert (row["sessions"], row["changed"]) == (60 * traffic.SEEDS, 0)


@pytest.mark.slow
def test_killed_labellers_lose_nothing(monkeypatch):
    monkeypatch.setattr(traffic, "KILLS", 4)
    assert traffic.measure_kills() == {"label_kills": 4, "lost": 0}


def test_the_committed_rows_are_complete():
    rows = traffic.read_rows(traffic.ROWS)
    assert rows.keys() == traffic.MEASURES.keys()
    out = traffic.summarize(rows)
    assert abs(out["label_bias_z"]) < 2 < -out["by_now_z"]
    assert out["user_cycles"] >= 20_000
    assert out["lost"] == out["changed"] == out["problems"] == 0
    assert out["kill_points"] >= 30 and out["false_alarms"] <= 0.05 < out["fixed_false_alarms"]
    assert out["gate_equal"] >= 0.9 and out["gate_worse"] <= 0.05
    assert out["poison_moves"] <= out["poison_bound"] and out["poison_moves"] < out["poison_moves_uncapped"]
    assert out["poison_truth"] > 0.2 > out["poison_truth_uncapped"] and out["batch_bytes"] < 20_000
    assert min(out["baseline_shrinkage"], out["baseline_ridge"]) >= 0.8 and abs(out["baseline_gradient_z"]) < 3


def test_an_organisation_that_poisons_moves_a_batch_within_its_bound():
    row = traffic_batches.measure(SimulatedWorld(users=400, sessions=500))
    assert 0.2 < row["poison_traffic"] < 0.5 and row["poison_moves"] <= row["poison_bound"]
    assert row["poison_moves"] < row["poison_moves_uncapped"] and row["poison_truth"] > row["poison_truth_uncapped"]


def test_scripted_returns_have_the_mean_that_they_say():
    """Their mean by tenths of the conditional mean, and what a baseline of noise would take away."""
    batch = traffic_baselines.scripted_returns(3)
    residuals = batch.returns - batch.mean
    for part in np.array_split(np.argsort(batch.mean), 10):
        assert abs(residuals[part].mean()) < 4 * residuals[part].std() / len(part) ** 0.5
    assert traffic_baselines.removed_part(batch, batch.mean) == 1
    assert traffic_baselines.removed_part(batch, np.random.default_rng(0).normal(0, 0.1, 10_000)) < 0
    removed = {name: traffic_baselines.removed_part(batch, one)
               for name, one in traffic_baselines.baselines_of(batch).items()}  # fmt: skip
    assert all(0.8 < part < 1 for part in removed.values()), removed
