"""benchmarks.router_replay over seeds, in its smallest size."""

import json

import pytest

from benchmarks import router_replay
from benchmarks.router_replay import ENGINES, WAYS


def row(seed, p99):
    engines = {engine: {way: {"p99": p99, "tokens": 8} for way in WAYS} for engine in ENGINES}
    return {"seed": seed, "variant": "small", "cost": {"gradient": 1.0, "sampling": p99}, "engines": engines}


def test_figures_are_means_over_the_seeds():
    out = router_replay.summarize([row(0, 0.1), row(3, 0.3)])
    assert json.loads(json.dumps(out)) == out
    assert (out["p99_without"], out["p99_strict"], out["seeds"]) == (0.2, 0.2, [0, 3])
    assert out["cost"] == {"gradient": 1.0, "sampling": 0.2} and out["engines"]["stale"]["replay"]["tokens"] == 8


def test_text_is_in_the_order_of_the_seed():
    def first(seed):
        pieces = router_replay.documents(64, seed)
        return [next(pieces) for _ in range(4)]

    assert first(0) == first(0) != first(1)


def test_rows_of_other_sizes_are_kept_apart(tmp_path, monkeypatch, capsys):
    measured = []

    def measure(config, o, seed, variant):
        measured.append((seed, o.layers))
        return row(seed, 0.1) | {"variant": variant}

    monkeypatch.setattr(router_replay, "measure", measure)
    file = tmp_path / "rows.json"
    for flags in (("--seeds=0,1",), ("--seeds=1,2",), ("--seeds=0", "--layers=2")):
        router_replay.main([*flags, f"--rows={file}"])
    assert measured == [(0, 8), (1, 8), (2, 8), (0, 2)]
    assert [json.loads(line)["seeds"] for line in capsys.readouterr().out.splitlines()] == [[0, 1], [1, 2], [0]]


def test_old_weights_are_those_of_a_step(capsys):
    with pytest.raises(SystemExit):
        router_replay.main(["--stale=9", "--steps=8"])
    assert "--stale=9 is not between 1 and --steps=8" in capsys.readouterr().err
