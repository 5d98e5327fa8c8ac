"""The mutants fit the library as it is, and the rule that finds the tests of a module."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from composer_jax.errors import UserError
from tests.mutants import __main__ as command
from tests.mutants import run_tests
from tests.mutants.mutants import AREAS, MUTANTS, Mutant
from tests.mutants.run_tests import MutantResult, applied, check_mutants, failed_tests
from tests.mutants.select_tests import find_tests

ROOT = Path(__file__).parents[2]


def test_there_are_sixty_mutants_in_all_areas():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) == 60
    counts = Counter(mutant.area for mutant in MUTANTS)
    assert set(counts) == set(AREAS) and min(counts.values()) >= 5


def test_every_mutant_applies_once_parses_and_has_tests():
    check_mutants(MUTANTS, ROOT)
    for mutant in MUTANTS:
        source = (ROOT / mutant.file).read_text(encoding="utf-8")
        changed = ast.parse(source.replace(mutant.old, mutant.new))
        assert ast.dump(changed) != ast.dump(ast.parse(source)), mutant.name
        files = find_tests(mutant.file, ROOT)
        assert files.importing or files.others, mutant.name


def test_a_mutant_that_no_longer_applies_is_named(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    mutants = [Mutant(f"losses.{old}", "a.py", f"x = {old}", "x = 3", "") for old in (1, 2)]
    with pytest.raises(UserError, match=r"losses\.1 \(2 times in a\.py\), losses\.2 \(0 times in a\.py\)"):
        check_mutants(mutants, tmp_path)


def test_a_mutant_is_taken_back(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("x = 1\n")
    with pytest.raises(RuntimeError), applied(Mutant("losses.x", "a.py", "1", "2", ""), tmp_path):
        assert file.read_text() == "x = 2\n"
        raise RuntimeError
    assert file.read_text() == "x = 1\n"


STARTED = "tests/room/test_a.py::test_b"


@pytest.mark.parametrize(
    ("answers", "outcome", "test"),
    [
        ([(1, f"FAILED {STARTED} - assert False")], "killed", STARTED),
        ([(0, ""), (1, f"FAILED {STARTED}")], "killed", STARTED),
        ([(0, ""), (0, "")], "survived", ""),
        ([(0, ""), (5, "")], "survived", ""),  # there are no slow tests
        ([(5, "")], "error", ""),
        ([(2, "interrupted")], "error", ""),
        ([(None, f"{STARTED} ")], "hung", STARTED),
        ([(None, "collecting ... ")], "error", ""),
    ],
)
def test_the_outcome_of_a_mutant(tmp_path, monkeypatch, answers, outcome, test):
    for name in ("composer_jax/room/a.py", "tests/room/test_a.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("from composer_jax.room import a")
    markers = []

    def answer(arguments, copy, limit_s):
        markers.append(arguments[1])
        assert arguments[2:] == ["tests/room/test_a.py"]
        return answers[len(markers) - 1]

    monkeypatch.setattr(run_tests, "run_pytest", answer)
    result = run_tests.run_mutant(Mutant("losses.a", "composer_jax/room/a.py", "a", "b", ""), tmp_path, 9.0)
    assert (result.outcome, result.test) == (outcome, test)
    assert markers == ["not slow", "slow"][: len(answers)]


def test_a_test_that_fails_without_the_mutant_proves_nothing(tmp_path, monkeypatch):
    results = [MutantResult(f"losses.{test}", "killed", f"tests/a.py::{test}", 1.0) for test in "xyx"]
    monkeypatch.setattr(command, "run_pytest", lambda *_: (1, "FAILED tests/a.py::x - assert False"))
    outcomes = [result.outcome for result in command.without_broken_tests(results, tmp_path, 9.0)]
    assert outcomes == ["error", "killed", "error"]


def test_the_failed_tests_of_an_output():
    output = "tests/a.py::test_b[x y] FAILED\nFAILED tests/a.py::test_b[x y] - assert 1 == 2\nERROR tests/c.py\n"
    assert failed_tests(output) == ["tests/a.py::test_b[x y]", "tests/c.py"]


def test_the_tests_of_a_module(tmp_path):
    files = {
        "composer_jax/room/__init__.py": "from composer_jax.room.wall import Wall",
        "tests/room/test_floor.py": "",
        "tests/room/test_wall.py": "",
        "tests/room/deep/test_any.py": "",
        "tests/other/test_front_door.py": "from composer_jax.room import Wall",
        "tests/other/test_wall_paper.py": "def test_a():\n    from composer_jax.room import wall",
        "tests/other/test_nothing.py": "from composer_jax.room import Floor",
        "tests/attacks/conftest.py": "from tests.room.fixtures import wall",
        "tests/attacks/test_hole.py": "",
        "tests/elsewhere/conftest.py": "from tests.roommate import wall",
        "tests/elsewhere/test_far.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = find_tests("composer_jax/room/wall.py", tmp_path)
    assert found.importing == ["tests/other/test_wall_paper.py", "tests/other/test_front_door.py"]
    assert found.others == [
        "tests/room/test_wall.py",
        "tests/room/deep/test_any.py",
        "tests/room/test_floor.py",
        "tests/attacks/test_hole.py",
    ]
