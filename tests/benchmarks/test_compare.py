"""benchmarks.compare: two evaluations of the same tasks."""

import json

import pytest

from benchmarks import compare


def write_run(folder, suites, which="after"):
    (folder / "stages").mkdir(parents=True)
    measures = {name: {"pass_at_1": 0.0, "solved": solved} for name, solved in suites.items()}
    (folder / "stages" / f"evaluate_{which}.json").write_text(json.dumps({"suites": measures}))
    return folder


@pytest.fixture
def runs(tmp_path):
    a = write_run(tmp_path / "a", {"bugs": {"x": 1.0, "y": 0.75, "z": 0.0}, "chain": {"r": 1.0}})
    b = write_run(tmp_path / "b", {"bugs": {"x": 0.0, "y": 1.0, "z": 0.75}, "other": {"r": 1.0}})
    return a, b


def printed(capsys, *arguments):
    compare.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), err


def sentence(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        compare.main([str(argument) for argument in arguments])
    assert ended.value.code == 1
    return capsys.readouterr().err


def test_the_difference_is_paired_by_task(runs, capsys):
    result, text = printed(capsys, *runs)
    bugs = result["suites"]["bugs"]
    assert list(result["suites"]) == ["bugs"], "chain and other are not in both"
    assert (bugs["difference"], bugs["tasks"]) == (0.0, 3)
    assert bugs["low"] < 0 < bugs["high"]
    assert (bugs["gained"], bugs["lost"]) == ({"x": [0.0, 1.0]}, {"z": [0.75, 0.0]})
    assert "bugs" in text and "+0.000" in text
    backwards, _ = printed(capsys, *reversed(runs))
    assert backwards["suites"]["bugs"]["low"] == -bugs["high"]
    assert backwards["suites"]["bugs"]["gained"] == {"z": [0.0, 0.75]}


def test_an_evaluation_is_compared_with_an_earlier_one_of_the_same_run(tmp_path, capsys):
    run = write_run(tmp_path / "a", {"bugs": {"x": 1.0, "y": 1.0}})
    measures = {"suites": {"bugs": {"solved": {"x": 0.0, "y": 0.0}}}}
    (run / "stages" / "evaluate_before.json").write_text(json.dumps(measures))
    result, _ = printed(capsys, run, run / "stages" / "evaluate_before.json")
    assert result["all"] == {"difference": 1.0, "low": 1.0, "high": 1.0, "tasks": 2}


def test_bad_input_ends_with_a_sentence(runs, tmp_path, capsys):
    a, b = runs
    assert "was not measured in both; these were: bugs" in sentence(capsys, a, b, "--suites=chain")
    other = write_run(tmp_path / "c", {"bugs": {"x": 1.0, "w": 0.0}})
    assert "was measured on 2 tasks, of which 1 are among the 3" in sentence(capsys, a, other)
    assert "no suite was measured in both" in sentence(capsys, a, write_run(tmp_path / "d", {"else": {"x": 1.0}}))
    (tmp_path / "empty").mkdir()
    assert "has no evaluation yet" in sentence(capsys, a, tmp_path / "empty")
    assert "neither a run folder nor the file of an evaluation" in sentence(capsys, a, tmp_path / "nothing.json")


def test_runs_of_several_seeds_are_put_together(tmp_path, capsys):
    rates = {"a0": {"x": 1.0}, "a1": {"y": 0.5}, "b0": {"x": 0.25}, "b1": {"y": 0.0}}
    paths = {name: write_run(tmp_path / name, {"bugs": solved}) for name, solved in rates.items()}
    result, text = printed(capsys, f"{paths['a0']},{paths['a1']}", f"{paths['b0']},{paths['b1']}")
    bugs = result["suites"]["bugs"]
    assert bugs["pass_at_1"] == [0.75, 0.125] and bugs["difference"] == 0.625 and bugs["tasks"] == 2
    assert "0.750  0.125" in text
    assert "measured the same tasks of bugs" in sentence(capsys, f"{paths['a0']},{paths['b0']}", paths["b1"])
