"""Combined candidates: only where they do not touch each other, and independent of their order."""

import ast

import pytest

from composer_jax.seeds import seeded_random
from composer_jax.tasks.repository.candidate import Candidate, combinations, combine, make_candidate

TEXT = "def f():\n    return 1\n\n\ndef g():\n    return 2\n"
SOURCES = {"p/a.py": TEXT, "p/b.py": TEXT, "q/c.py": TEXT}


def change(path, old, new):
    text = SOURCES[path].replace(old, new) if new is not None else None
    return make_candidate("stub", SOURCES, {path: text}, (f"{path}::{old}",), f"{old} in {path}")


ONE, TWO, OTHER = change("p/a.py", "1", "3"), change("p/a.py", "2", "4"), change("p/b.py", "1", "3")


def test_two_changes_of_a_file_become_one():
    both = combine(SOURCES, ONE, TWO)
    assert both.kind == "combine"
    assert both.files == {"p/a.py": TEXT.replace("1", "3").replace("2", "4")}
    assert set(both.removed) == {"    return 1\n", "    return 2\n"}
    assert set(both.entities) == {"p/a.py::1", "p/a.py::2"}
    assert both == combine(SOURCES, TWO, ONE)


def test_changes_of_two_files_become_one():
    assert set(combine(SOURCES, ONE, OTHER).files) == {"p/a.py", "p/b.py"}


@pytest.mark.parametrize(
    "second",
    [ONE, change("p/a.py", "1", "5"), change("p/a.py", "p/a.py", None), change("p/a.py", "def f()", "def f(x)")],
    ids=["the same", "the same line", "deleted", "the next line"],
)
def test_changes_that_touch_are_refused(second):
    assert combine(SOURCES, ONE, second) is None


def test_a_result_that_does_not_compile_is_refused():
    sources = {"a.py": "x = [\n    1,\n\n    2,\n]\n"}
    first = make_candidate("stub", sources, {"a.py": "x = (\n    1,\n\n    2,\n]\n"}, ("a.py::x",), "")
    second = make_candidate("stub", sources, {"a.py": "x = [\n    1,\n\n    3,\n]\n"}, ("a.py::y",), "")
    assert combine(sources, first, second) is None


def test_the_same_file_comes_before_the_same_folder_and_order_does_not_matter():
    far = change("q/c.py", "1", "3")
    combined = list(combinations(SOURCES, [ONE, TWO, OTHER, far], seeded_random(1)))
    assert [sorted(c.files) for c in combined] == [["p/a.py"], ["p/a.py", "p/b.py"]]
    assert combined == list(combinations(SOURCES, [far, OTHER, TWO, ONE], seeded_random(1)))
    assert all(ast.parse(text) for c in combined for text in c.files.values())


def test_the_id_is_that_of_kind_and_files():
    first = Candidate("stub", {"b.py": None, "a.py": "x"}, ("a.py::f",), (), "one")
    again = Candidate("stub", {"a.py": "x", "b.py": None}, (), ("y",), "two")
    assert first.id == again.id == "9110e25942a3fe7b"
    assert first.id != Candidate("combine", first.files, (), (), "").id
    assert first.id != Candidate("stub", {"a.py": "x", "b.py": ""}, (), (), "").id
