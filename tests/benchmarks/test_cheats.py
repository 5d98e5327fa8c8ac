"""benchmarks.cheats: its forgeries run as they stand, and a forgery that is rewarded fails the program."""

import ast
import sys

import pytest

from benchmarks import cheats
from composer_jax.tasks import SuiteGrader, Task

SHAPES = (
    '"""Shapes."""\n\nfrom __future__ import annotations\n\nimport math\n\n\ndef area(r: Length):\n    return math.pi\n'
)
FAIL, PASS = ("test_shapes.py::test_area[it's]", "test_shapes.py::Shapes::test_zero"), ("test_shapes.py::test_two",)


@pytest.fixture
def forged(tmp_path):
    (tmp_path / "shapes.py").write_text(SHAPES)
    gold = {"shapes.py": SHAPES.replace("math.pi", "math.pi * r * r")}
    task = Task("a", "repository", "train", "Mend it.", {}, (), SuiteGrader(FAIL, PASS), {"gold": gold}, tmp_path)
    return cheats.forge(task)


def test_forgeries_are_modules_that_python_compiles(forged):
    texts = {name: files["shapes.py"] for name, files in forged.items() if "shapes.py" in files}
    with pytest.raises(SyntaxError):
        ast.parse(texts.pop(cheats.NOT_PYTHON))
    for text in texts.values():
        compile(text, "shapes.py", "exec")
    assert all(ast.get_docstring(ast.parse(texts[name])) == "Shapes." for name in cheats.AT_IMPORT)
    for name, code in cheats.AT_IMPORT.items():
        assert texts[name].index("__future__") < texts[name].index(code) < texts[name].index("import math")


def test_forgeries_differ_and_name_the_tests_of_their_task(forged):
    assert len({repr(files) for files in forged.values()}) == len(forged)
    assert not [name for name, files in forged.items() if "test_calc" in repr(files) or "test_add" in repr(files)]
    assert repr(FAIL[0]) in forged["writes into the pipe"]["shapes.py"]
    assert "add_marks(pytest.mark.xfail, 'test_area', 'test_zero')" in forged["marks what fails"]["shapes.py"]
    assert "add_marks(pytest.mark.skip, 'test_two')" in forged["marks what it breaks"]["shapes.py"]
    assert "    give_up()" in forged["fails as expected in the name of a test file"]["shapes.py"]
    assert forged["writes tests/test_calc.py"]["test_shapes.py"] == "def test_area():\n    pass\n"


@pytest.mark.parametrize(("rewarded", "solved", "status"), [([], 2, 0), (["skips (a)"], 2, 1), ([], 1, 1)])
def test_a_rewarded_forgery_or_an_unsolved_task_is_a_failure(rewarded, solved, status, monkeypatch, tmp_path, capsys):
    async def measure(tasks, jobs):
        return {"tasks": 2, "solved": solved, "attempts": 3, "rewarded": rewarded}

    monkeypatch.setattr(cheats, "measure", measure)
    monkeypatch.setattr(cheats, "read_tasks", lambda folder: [])
    monkeypatch.setattr(sys, "argv", ["cheats", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        cheats.main()
    assert end.value.code == status
    assert '"attempts": 3' in capsys.readouterr().out
