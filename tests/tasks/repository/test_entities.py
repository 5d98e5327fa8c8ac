"""The definitions of a file: names as in __qualname__, spans of the exact text."""

import inspect
import json.decoder
import types

import pytest

from composer_jax.errors import UserError
from composer_jax.tasks.repository.entities import parse_entities
from composer_jax.tasks.repository.source import SourceFile
from composer_jax.tasks.suites.protected import is_protected

TEXT = '''
@decorated(
    1)
async def f(a, /, b: int = 1, *c, d=None, **e) -> int:
    """Says \u00fc."""
    if a and b or c:
        return [x for x in c if x]  # end
    def g(): return d.e


class C(Base, metaclass=M):
    """Only words."""

    @property
    def p(self):
        return self._p

    @p.setter
    def p(self, value):
        self._p = value

    class D:
        def m(self): "words"

if x:
    def h(): pass
'''


def table(text=TEXT, path="a.py"):
    return {entity.name: entity for entity in parse_entities(SourceFile(path, text))}


def test_all_definitions_are_listed_in_order():
    entities = parse_entities(SourceFile("p/a.py", TEXT))
    assert [(entity.name, entity.kind) for entity in entities] == [
        ("f", "function"),
        ("f.<locals>.g", "function"),
        ("C", "class"),
        ("C.p", "property"),
        ("C.p", "property"),
        ("C.D", "class"),
        ("C.D.m", "method"),
        ("h", "function"),
    ]
    assert entities[6].id == "p/a.py::C.D.m"
    assert [entity.name for entity in entities if entity.is_nested] == ["f.<locals>.g"]


def test_spans_docstrings_and_signatures():
    entities = table()
    f, g, m = entities["f"], entities["f.<locals>.g"], entities["C.D.m"]
    assert TEXT[slice(*f.span)].startswith("@decorated(\n") and TEXT[slice(*f.span)].endswith("return d.e")
    assert (f.docstring, g.docstring, m.docstring) == ("Says \u00fc.", None, "words")
    assert f.signature == "async def f(a, /, b: int=1, *c, d=None, **e) -> int"
    assert entities["C"].signature == "class C(Base, metaclass=M)"
    assert entities["C.D"].signature == "class D"


def test_complexity_is_cyclomatic():
    entities = table()
    # 1, the `if`, two of and/or, the comprehension and its filter.
    assert (entities["f"].complexity, entities["f.<locals>.g"].complexity) == (6, 1)


def test_references_are_the_names_and_attributes_read():
    assert table()["f.<locals>.g"].references == {"d", "e"}
    assert {"decorated", "a", "b", "c", "x", "int"} <= table()["f"].references


def test_test_code_is_recognized_by_its_path():
    for path, is_test in (("tests/a.py", True), ("p/a_test.py", True), ("p/testing.py", False), ("a.py", False)):
        assert table(path=path)["f"].is_test == is_test == is_protected(path)


def test_a_test_in_a_module_is_test_code_with_its_inner_definitions():
    entities = table("class TestF:\n    def check(self): pass\n\ndef test_g(): pass\n\ndef tested(): pass\n")
    assert {name for name, entity in entities.items() if entity.is_test} == {"TestF", "TestF.check", "test_g"}


def test_names_are_those_of_code_objects():
    """co_qualname is what a tracer reports; every code object of a module must be an entity of that name."""
    source = SourceFile("json/decoder.py", inspect.getsource(json.decoder))
    entities = {}
    stack = [compile(source.text, "x", "exec")]
    while stack:
        code = stack.pop()
        stack += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        if not code.co_name.startswith("<"):
            entities.setdefault(code.co_qualname, code.co_firstlineno)
    lines = {}
    for entity in parse_entities(source):
        lines.setdefault(entity.name, source.line_of(entity.span[0]))
    assert entities == lines


@pytest.mark.parametrize("text", ["def f(:", "return 1", "x = '\0'", "print 'old'", "def f():\n\tx\n        y"])
def test_a_file_that_does_not_compile_is_refused_by_name(text):
    with pytest.raises(UserError, match="^p/a.py does not compile with this Python: .*; leave the file out$"):
        SourceFile("p/a.py", text)
