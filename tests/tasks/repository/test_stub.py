"""Stubs: the body is removed with its comments; signature, docstring and other code stay."""

import pytest

from composer_jax.tasks.repository.entities import parse_entities
from composer_jax.tasks.repository.mutate import stub
from composer_jax.tasks.repository.source import SourceFile

R = "raise NotImplementedError"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f(): return 1\n", f"def f(): {R}\n"),
        ("def f(): x = 1; return x  # why\n", f"def f(): {R}  # why\n"),
        ("def f(): 'words'; return 1\n", f"def f(): 'words'; {R}\n"),
        ("def f():\n    return 1", f"def f():\n    {R}"),
        (
            'def f():\n    """Words."""\n    # how\n    x = 1\n\n    return x  # why\n',
            f'def f():\n    """Words."""\n    {R}\n',
        ),
        ("def f():\n\tif x:\n\t\treturn 1\n\t# else nothing\n# of the module\n", f"def f():\n\t{R}\n# of the module\n"),
        ("def f():\r\n    x = 1\r\n    return x\r\ny = 1\r\n", f"def f():\r\n    {R}\r\ny = 1\r\n"),
        (
            "@x\nasync def f(a,\n            b):  # both\n    await a\n",
            f"@x\nasync def f(a,\n            b):  # both\n    {R}\n",
        ),
        ("def f():\n    yield '''\n\n'''\n\n\nx = 1\n", f"def f():\n    {R}\n\n\nx = 1\n"),
    ],
)
def test_the_body_is_replaced(before, after):
    (entity,) = parse_entities(SourceFile("a.py", before))
    stubbed = stub(entity)
    assert stubbed.files == {"a.py": after}
    assert (stubbed.kind, stubbed.entities) == ("stub", ("a.py::f",))


@pytest.mark.parametrize(
    "body", ["pass", "...", "'words'", "raise NotImplementedError('later')", "raise NotImplementedError"]
)
def test_a_function_that_does_nothing_is_not_a_candidate(body):
    (entity,) = parse_entities(SourceFile("a.py", f"def f():\n    {body}\n"))
    assert stub(entity) is None


def test_a_class_is_not_a_candidate():
    assert stub(parse_entities(SourceFile("a.py", "class C:\n    x = 1\n"))[0]) is None
