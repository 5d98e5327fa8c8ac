"""What benchmarks.length_normalisation makes of its rows, and in what its two runs differ."""

import json

import pytest

from benchmarks import controls, length_normalisation
from benchmarks.length_normalisation import SUITES


def row(seed, variant, solved, failed):
    """A row in which one bug has these numbers by task, and the other suites have one task that is always solved."""
    suites = {name: {"solved": {f"{name}-x": 1.0}, "failed_tokens": {}} for name in SUITES}
    suites["one_bug"] = {"solved": solved, "failed_tokens": failed}
    return {"seed": seed, "variant": variant, "suites": suites}


ROWS = [
    row(0, "constant", {"a": 0.5, "b": 0.5, "c": 1.0}, {"a": 100.0, "b": 100.0}),
    row(0, "by_length", {"a": 0.0, "b": 0.5, "c": 0.5}, {"a": 140.0, "b": 100.0, "c": 999.0}),
    row(1, "constant", {"a": 0.0, "b": 0.0, "c": 0.0}, {"a": 50.0, "b": 50.0, "c": 50.0}),
    row(1, "by_length", {"a": 0.0, "b": 0.0, "c": 1.0}, {"a": 70.0, "b": 50.0}),
    row(2, "constant", {"a": 0.0}, {"a": 1.0}),
]


def test_failures_are_compared_on_tasks_that_both_fail(tmp_path, capsys):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(ROWS))
    length_normalisation.main(["--seeds=0,1", f"--rows={file}"])
    out = json.loads(capsys.readouterr().out)
    one = out["one_bug"]
    assert out["seeds"] == [0, 1] and list(out) == ["seeds", *SUITES, "all"]
    assert one["constant"] == {"pass_at_1": 0.3333, "failed_tokens": 75.0, "tasks": 4}
    assert one["by_length"] == {"pass_at_1": 0.3333, "failed_tokens": 90.0, "tasks": 4}
    mean, low, high = one["longer"]
    assert mean == 15 and 0 <= low < 15 < high <= 40
    assert out["all"]["longer"] == one["longer"] and out["all"]["constant"]["pass_at_1"] == 0.6
    assert out["two_bugs"]["longer"] is None and out["two_bugs"]["solved"] == [0, 0, 0]
    assert length_normalisation.summarize(ROWS[-1:]) == {"seeds": []}


def test_other_tasks_are_refused_in_one_sentence(tmp_path, capsys):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([ROWS[0], row(0, "by_length", {"z": 0.5}, {})]))
    with pytest.raises(SystemExit) as ended:
        length_normalisation.main(["--seeds=0", f"--rows={file}"])
    assert ended.value.code == 2 and "measured on other tasks of 'one_bug'" in capsys.readouterr().err


def test_the_runs_differ_in_the_algorithm(tmp_path, monkeypatch):
    runs = {}
    monkeypatch.setattr(controls, "run_pipeline", lambda workdir, *_, **fields: runs.update({workdir.name: fields}))
    suite = {"solved": {"a": 1.0}, "failed_tokens": {}}
    monkeypatch.setattr(length_normalisation, "final_suites", lambda _: dict.fromkeys(SUITES, suite))
    for variant in length_normalisation.VARIANTS:
        length_normalisation.measure(tmp_path, "full", None, 0, variant)
    constant, by_length = runs["rl"], runs["rl_length_normalised"]
    assert by_length.keys() - constant.keys() == {"rl__algorithm__name"}
    assert constant.keys() - by_length.keys() == {"rl__keep_groups"}, "which stores more and trains the same"
    shared = by_length.keys() & constant.keys()
    assert {key: by_length[key] for key in shared} == {key: constant[key] for key in shared}
