"""Mutations by example: each kind on a few lines, with the rest of the file unchanged."""

import re

import pytest

from composer_jax.seeds import seeded_random
from composer_jax.tasks.repository.entities import parse_entities
from composer_jax.tasks.repository.mutate import MUTATIONS, is_sound, mutate
from composer_jax.tasks.repository.source import Edit, SourceFile


def mutants(kind, text, name="f"):
    """Every text that a kind makes of the entity, over a dozen draws."""
    matching = [entity for entity in parse_entities(SourceFile("a.py", text)) if entity.name == name]
    return {
        candidate.files["a.py"]
        for entity in matching
        for seed in range(12)
        for candidate in mutate(kind, entity, seeded_random(seed))
    }


# kind, the body of `def f(a, b, c):`, every body that may come out
BODIES = [
    ("if_else_invert", "return a if b else c", ["return c if b else a"]),
    ("if_else_invert", "if a:\n        b()\n    else:\n        c()", ["if a:\n        c()\n    else:\n        b()"]),
    ("if_else_invert", "if a: b()\n    else: c(); c()", ["if a: c(); c()\n    else: b()"]),
    (
        "if_else_invert",
        "if a:\n        # one\n        b()  # 1\n    # between\n    else:\n        c()",
        ["if a:\n        c()\n    # between\n    else:\n        # one\n        b()  # 1"],
    ),
    ("if_else_invert", "if a:\n        b()\n    elif b:\n        c()", []),
    ("shuffle_lines", "b = a\n    c = b  # why\n    return 1", ["c = b\n    b = a  # why\n    return 1"]),
    ("shuffle_lines", "b = 1; c = b", []),
    ("shuffle_lines", "b = 1\n    c = 2", []),
    ("remove_assign", "b = 1  # why\n    return b", ["return b"]),
    ("remove_assign", "b = 1; return b", ["return b"]),
    ("remove_assign", "b += 1", ["pass"]),
    ("remove_assign", "a(); b = 1; c()", ["a(); c()"]),
    ("remove_assign", "a()\n    b: int = 1", ["a()"]),
    ("remove_assign", "b: int\n    a()", []),
    ("remove_conditional", "if a:\n        return b\n    return c", ["return c"]),
    ("remove_conditional", "if a: return b", ["pass"]),
    (
        "remove_conditional",
        "if a:\n        a()\n    elif b:\n        b()\n    else:\n        c()",
        ["pass", "if a:\n        a()"],
    ),
    ("remove_loop", "for x in a:\n        b(x)\n    return c", ["return c"]),
    ("remove_loop", "while a: b()\n    else: c()\n    return c", ["return c"]),
    ("remove_wrapper", "with a as x:\n        # why\n        b()  # 1\n    c()", ["# why\n    b()  # 1\n    c()"]),
    ("remove_wrapper", "with a: b(); c()", ["b(); c()"]),
    (
        "remove_wrapper",
        'try:\n        b("""x\n        y""")\n    except E:\n        c()\n    finally:\n        a()\n    c()',
        ['b("""x\n        y""")\n    a()\n    c()'],
    ),
    ("drop_return", "return a(b)", ["a(b)"]),
    ("drop_return", "return (a(b) +\n        c)", ["(a(b) +\n        c)"]),
    ("drop_return", "a()\n    return b", ["a()"]),
    ("drop_return", "return b", ["pass"]),
    ("drop_return", "return", []),
    (
        "swallow_except",
        "try:\n        a()\n    except E as e:\n        b()\n        raise  # on",
        ["try:\n        a()\n    except E as e:\n        pass  # on"],
    ),
    ("swallow_except", "try: a()\n    except E: pass", []),
    ("break_chain", "return a + b - c", ["return a + b", "return c"]),
    ("break_chain", "return a and (b) and c", ["return (b) and c", "return a and c", "return a and (b)"]),
    (
        "break_chain",
        "return (a or\n        (b or c))",
        ["return ((b or c))", "return (a)", "return (a or\n        (b))", "return (a or\n        (c))"],
    ),
    ("change_operator", "return (a) * (b)", ["return (a) / (b)", "return (a) // (b)", "return (a) % (b)"]),
    ("change_operator", "a <<= 1", ["a >>= 1"]),
    ("change_operator", "return '%s' % a", []),
    ("flip_operator", "return a + b", ["return a - b"]),
    ("flip_operator", "return a and b and c", ["return a or b or c"]),
    ("flip_operator", "return -a", ["return a"]),
    ("flip_operator", "return 'a' + b", []),
    ("swap_operands", "return a - b", ["return b - a"]),
    ("swap_operands", "return (a + b) / c", ["return c / (a + b)"]),
    ("swap_operands", "return a + b - c", ["return c - (a + b)"]),
    ("swap_operands", "return a * b - c", ["return c - a * b"]),
    ("swap_operands", "return a < (b)  # < is right", ["return (b) < a  # < is right"]),
    ("swap_operands", "return a in b", ["return b in a"]),
    ("swap_operands", "return a == b", []),
    ("compare_flip", "return a<b", ["return a>=b"]),
    ("compare_flip", "return a == b", ["return a != b"]),
    ("compare_flip", "return a not in b", ["return a in b"]),
    ("compare_flip", "return a is  not b", ["return a is b"]),
    (
        "compare_flip",
        "return (a # <\n        ) < (b) > c",
        ["return (a # <\n        ) >= (b) > c", "return (a # <\n        ) < (b) <= c"],
    ),
    ("compare_boundary", "return a < b", ["return a <= b"]),
    ("compare_boundary", "return a == b", []),
    ("negate_condition", "if a:\n        b()", ["if not a:\n        b()"]),
    ("negate_condition", "if a or b:\n        c()", ["if not (a or b):\n        c()"]),
    ("negate_condition", "if not(a): b()", ["if (a): b()"]),
    ("negate_condition", "return [x for x in a if x < b]", ["return [x for x in a if not x < b]"]),
    ("negate_condition", "while not a: b()", []),
    ("change_constant", "return 7", ["return 6", "return 8"]),
    ("change_constant", "return 0", ["return 1"]),
    ("change_constant", "return 0x10", ["return 0xf", "return 0x11"]),
    ("change_constant", "return True", ["return False"]),
    ("change_constant", "return f'{a:>10}'", []),
    ("off_by_one", "return a[1:]", ["return a[2:]", "return a[0:]"]),
    ("off_by_one", "return a[b:c - 1]", ["return a[b:c]", "return a[b + 1:c - 1]", "return a[b - 1:c - 1]"]),
    ("off_by_one", "return range(a or b)", ["return range((a or b) - 1)", "return range((a or b) + 1)"]),
    ("swap_arguments", "return a(b, (c, c))", ["return a((c, c), b)"]),
    ("swap_arguments", "return a(b, x=c)", ["return a(c, x=b)"]),
    ("swap_arguments", "return a(*b, c)", []),
    ("swap_arguments", "return a(b, b)", []),
]


@pytest.mark.parametrize(("kind", "before", "after"), BODIES)
@pytest.mark.parametrize("is_plain", [True, False])
def test_mutations_of_functions_match_the_examples(kind, before, after, is_plain):
    def laid_out(inner):
        decorator = "" if is_plain else "@x(y)\n"
        text = f"import x  # \u00fc\n\n\n{decorator}def f(a, b, c):\n    {inner}\n\n\nz = 1  # end\n"
        if is_plain:
            return text
        # Names of two and three bytes a character, tabs, and line ends of Windows.
        text = re.sub(r"\b[abc]\b", lambda match: {"a": "\u00e4", "b": "\u6f22", "c": "c"}[match.group()], text)
        return text.replace("    ", "\t").replace("\n", "\r\n")

    assert mutants(kind, laid_out(before)) == {laid_out(inner) for inner in after}


WHOLE = [
    (
        "wrong_default",
        "f",
        "def f(a, b=True, *, c=70): return 1",
        {"b=False, *, c=70", "b=True, *, c=69", "b=True, *, c=71"},
    ),
    (
        "wrong_default",
        "f",
        "def f(a=None, b='x', c=()): return 1",
        {"a=False, b='x', c=()", 'a=None, b="", c=()', "a=None, b='x', c=None"},
    ),
    ("drop_await", "f", "async def f(a): return await a()", {"return a()"}),
    ("drop_await", "f", "async def f(a): return (await  (a())).b", {"return ((a())).b"}),
    ("compare_flip", "f", "def f(a): return a == 1; a", {"def f(a): return a != 1; a"}),
    ("compare_flip", "f", 'def f(a): "a == 1"; return a \\\n  == 1', {'def f(a): "a == 1"; return a \\\n  != 1'}),
    (
        "compare_flip",
        "f",
        "def f(a: 1 < 2): return [b for b in a if b > 0]",
        {"def f(a: 1 < 2): return [b for b in a if b <= 0]"},
    ),
    ("compare_flip", "f", "def f(a):\n  return f'{a == 1}' + f'''\n{a\n == 1}'''", set()),
    ("compare_flip", "f.<locals>.g", "def f(a):\n  def g(): return a == 1\n  return g() == 2", {"return a != 1"}),
    ("compare_flip", "f", "def f(a):\n  def g(): return a == 1\n  return g() == 2", {"return g() != 2"}),
    ("compare_flip", "C.f", "class C:\n  x = 1 == 1\n  def f(a): return a == 1", {"return a != 1"}),
    ("compare_flip", "f", "\ufeffdef f(a): return a == 1", {"\ufeffdef f(a): return a != 1"}),
    ("compare_flip", "f", "x = '\u2028'; y = 1\x0c\ndef f(a): return a == 1", {"return a != 1"}),
    ("remove_assign", "f", "def f(): x = 1", {"def f(): pass"}),
    ("remove_assign", "f", "def f(): x = 1;  # why", {"def f(): pass;  # why"}),
    ("remove_assign", "f", "def f():\n  x = 1\n# why", {"def f():\n  pass\n# why"}),
    ("class_remove_bases", "C", "class C(A):\n  x = 1", {"class C:\n"}),
    ("class_remove_bases", "C", "class C(\n  A,  # one\n):\n  x = 1", {"class C:\n"}),
    ("class_remove_bases", "C", "class C(A, B, m=M): pass", {"C(B, m=M)", "C(A, m=M)"}),
    ("class_remove_bases", "C", "class C: pass", set()),
    ("class_remove_funcs", "C", "class C:\n  def f(self): return 1", {"class C:\n  pass"}),
    (
        "class_remove_funcs",
        "C",
        "class C:\n  @property\n  def f(self): return 1\n  @f.setter\n  def f(self, x): self.x = x\n  y = 2",
        {"class C:\n  y = 2"},
    ),
    ("class_remove_funcs", "C", "class C:\n  def f(self): return 1\n  g = f", set()),
    (
        "class_shuffle_methods",
        "C",
        "class C:\n  def f(self):\n    return 1\n  x = 1\n  def g(self): return 2",
        {"class C:\n  def g(self): return 2\n  x = 1\n  def f(self):\n    return 1"},
    ),
    ("class_shuffle_methods", "C", "class C:\n  def f(self): return 1\n  @f\n  def g(self): return 2", set()),
    ("wrong_default", "C", "class C:\n  x: int = 3\n  __slots__ = ()", {"x: int = 2", "x: int = 4"}),
]


@pytest.mark.parametrize(("kind", "name", "before", "parts"), WHOLE)
def test_mutations_of_files_match_the_examples(kind, name, before, parts):
    mutated = mutants(kind, before + "\n", name)
    assert len(mutated) == len(parts)
    for part in parts:
        assert sum(part in text for text in mutated) == 1


def test_every_kind_has_an_example():
    assert {row[0] for row in [*BODIES, *WHOLE]} == set(MUTATIONS)


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ("return 2", True),
        ("return 1  # the same", False),
        ("(return 1)", False),
        ("break", False),
        ("return 1\nreturn 2", False),
        ("return 1\nx = 1", False),
        ("return 1\ndef g(): pass", False),
    ],
)
def test_only_a_change_inside_the_entity_that_compiles_is_accepted(text, is_accepted):
    source = SourceFile("a.py", "def f():\n    return 1\n\n\ny = f()\n")
    (entity,) = parse_entities(source)
    assert is_sound(entity, [Edit(source.text.index("return"), source.text.index("\n\n"), text)]) == is_accepted


def test_a_mutation_has_a_note():
    (entity,) = parse_entities(SourceFile("p/a.py", "def f(a, b):\n    return a - b\n"))
    (candidate,) = mutate("swap_operands", entity, seeded_random(0))
    assert candidate.kind == "mutate:swap_operands"
    assert candidate.entities == ("p/a.py::f",)
    assert candidate.removed == ("    return a - b\n",)
    assert candidate.note == "p/a.py:2, f: the operands of `a - b` were swapped"
