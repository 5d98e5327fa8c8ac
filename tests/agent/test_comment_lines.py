"""Counts of added lines and comment lines."""

import pytest

from composer_jax.agent.comment_lines import MAX_SOURCE, count_added_lines

BEFORE = b"""import os

# Kept.
def f():
    return 1
"""
AFTER = b'''import os

# Kept.
# I think it is 2,
  # because it was 1.

LIMIT = 3
"""Documents LIMIT."""

def f():
    """Documents f."""
    """No documentation
    but a thought.
    """
    text = """
# a line of a string
"""
    return 2  # at the end of a line
'''


def test_python_comments_are_those_of_the_tokenizer_and_strings_without_use():
    """Added: two comments, LIMIT and its text, f's docstring, a string of three lines, text of three, return."""
    assert count_added_lines("a.py", BEFORE, AFTER) == (12, 5)
    assert count_added_lines("a.py", b"", b"") == (0, 0)
    assert count_added_lines("a.py", AFTER, AFTER) == (0, 0)


def test_a_moved_line_is_not_added_and_a_repeated_one_is():
    assert count_added_lines("a.py", b"a = 1\n# b\n", b"# b\r\na = 1\r\n") == (0, 0)
    assert count_added_lines("a.py", b"# b\n", b"# b\n\n# b\n# b\n") == (2, 2)


def test_python_that_does_not_parse_is_counted_by_the_beginnings_of_lines():
    assert count_added_lines("a.py", b"", b"def f(:\n  # why\n") == (2, 1)


@pytest.mark.parametrize(
    ("path", "text", "counts"),
    [
        ("src/a.c", "int a; // x\n/* why\n * so\n */\n# define A\n", (5, 3)),
        ("a.rs", "// why\nlet a = 1;\n", (2, 1)),
        ("run.sh", "# why\necho '#'\n", (2, 1)),
        ("a.sql", "-- why\nselect 1\n", (2, 1)),
        ("README.md", "# Title\n", (0, 0)),
        ("Makefile", "# all\n", (0, 0)),
    ],
)
def test_other_languages_by_the_marker_of_their_comments(path, text, counts):
    assert count_added_lines(path, b"", text.encode()) == counts


def test_a_huge_file_is_data():
    assert count_added_lines("a.py", b"", b"#\n" * MAX_SOURCE) == (0, 0)
