"""Removal of statements and list elements, whatever text is around them."""

import ast

import pytest

from composer_jax.tasks.repository.layout import remove_elements, remove_statements
from composer_jax.tasks.repository.source import Edit, SourceFile, apply_edits

D = "def {}():\n    return 1\n"
F, G, H = D.format("f"), D.format("g"), D.format("h")


@pytest.mark.parametrize(
    ("before", "gone", "after"),
    [
        (f"{F}\n\n{G}\n\n{H}", "g", f"{F}\n\n{H}"),
        (f"{F}\n\n{G}\n\n{H}", "f", f"{G}\n\n{H}"),
        (f"{F}\n\n{G}\n\n{H}", "h", f"{F}\n\n{G}"),
        (f"{F}\n\n{G}\n\n{H}", "gh", F),
        (f"{F}\n\n{G}\n\n{H}", "fh", G),
        (f"{F}\n\n{G}\n\n{H}", "fgh", ""),
        (f"{F}\n\n# on g\n# and more\n@x\n{G}\n\n{H}", "g", f"{F}\n\n{H}"),
        (f"{F}\n\n# ---- chapter\n\n{G}\n\n{H}", "g", f"{F}\n\n# ---- chapter\n\n\n{H}"),
        (f"#!/usr/bin/python\n{F}\n\n{G}", "f", f"#!/usr/bin/python\n{G}"),
        (f"f = 1; g = 2; h = 3\n{F}", "g", f"f = 1; h = 3\n{F}"),
        (f"import x\n\nf = 1\ng = 1\n\n\n{H}", "fg", f"import x\n\n\n{H}"),
        (f"{F}x = 1\n{G}", "g", f"{F}x = 1\n"),
        (f"{F}\n\nx = '''\n\n'''\n{G}", "g", f"{F}\n\nx = '''\n\n'''\n"),
        (f"{F}\n\n{G}".removesuffix("\n"), "g", F),
    ],
)
def test_statements_of_a_module_are_removed_with_the_empty_lines_between(before, gone, after):
    source = SourceFile("a.py", before)
    body = source.tree.body

    def name(node):
        if isinstance(node, ast.Import):
            return "import"
        return node.targets[0].id if isinstance(node, ast.Assign) else node.name

    nodes = [node for node in body if name(node) in gone]
    assert apply_edits(before, remove_statements(source, body, nodes, may_be_empty=True)) == after


@pytest.mark.parametrize(
    ("before", "gone", "after"),
    [
        ("[a, b, c]", "a", "[b, c]"),
        ("[a, b, c]", "b", "[a, c]"),
        ("[a, b, c]", "c", "[a, b]"),
        ("[a, b, c,]", "bc", "[a,]"),
        ("[a, b, c,]", "ac", "[b,]"),
        ("[a, b, ]", "ab", "[ ]"),
        ("[\n    a,  # one\n    b,  # two\n    c,\n]", "b", "[\n    a,  # one\n    c,\n]"),
        ("[\n    a,\n    b,  # two\n]", "b", "[\n    a,  # two\n]"),
    ],
)
def test_elements_are_removed_with_their_commas(before, gone, after):
    source = SourceFile("a.py", before)
    elements = source.tree.body[0].value.elts
    edits = remove_elements(source, elements, [element for element in elements if element.id in gone])
    assert apply_edits(before, edits) == after


def test_overlapping_edits_are_refused():
    with pytest.raises(ValueError, match="overlaps"):
        apply_edits("abc", [Edit(0, 2), Edit(1, 3)])
