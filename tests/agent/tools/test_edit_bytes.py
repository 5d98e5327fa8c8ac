"""Edits keep the line ends, the byte order mark and the encoding of a file, in every mixture with those of the edit."""

import asyncio

import pytest

from composer_jax.agent.tools import execute_call, select_tools
from composer_jax.agent.workspace import Workspace
from composer_jax.data.chat.messages import ToolCall
from tests.agent.conftest import task_of

TOOLS = select_tools(("repository/*",))
BOM = b"\xef\xbb\xbf"


def call(files, tool, **arguments):
    """(observation, files afterwards) of one call on a workspace with files of these bytes."""
    workspace = Workspace(task_of({}), None)
    for path, data in files.items():
        workspace.write(path, data)
    answer = asyncio.run(execute_call(ToolCall(tool, arguments), TOOLS, workspace))
    return answer, dict(workspace.files)


def patched(data, patch):
    """The bytes of the file f after a patch, or its error."""
    answer, files = call({"f": data}, "apply_patch", patch=patch)
    assert answer == "edited f" or (answer.startswith("ERROR ") and files == {"f": data})
    return files["f"] if answer == "edited f" else answer


def edited(data, old, new):
    """The bytes of the file f after an edit, or its error."""
    answer, files = call({"f": data}, "edit_file", path="f", old=old, new=new)
    assert answer.startswith("edited f: ") or (answer.startswith("ERROR ") and files == {"f": data})
    return files["f"] if answer.startswith("edited") else answer


def envelope(*lines, end="\n"):
    return end.join(["*** Begin Patch", "*** Update File: f", "@@", *lines, "*** End Patch", ""])


def unified(*lines, end="\n"):
    return end.join(["--- a/f", "+++ b/f", *lines, ""])


@pytest.mark.parametrize("form", [envelope, unified])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"a\nb\nc\n", b"a\nB\nB2\nc\n"),
        (b"a\r\nb\r\nc\r\n", b"a\r\nB\r\nB2\r\nc\r\n"),
        (b"a\rb\rc\r", b"a\rB\rB2\rc\r"),
        (b"a\nb\r\nc\r", b"a\nB\r\nB2\r\nc\r"),
        (b"a\r\nb\nc", b"a\r\nB\nB2\nc"),
        (b"0\r\na\r\nb\r\nc", b"0\r\na\r\nB\r\nB2\r\nc"),
        (BOM + b"a\r\nb\r\nc\r\n", BOM + b"a\r\nB\r\nB2\r\nc\r\n"),
    ],
)
def test_a_patch_with_any_line_ends_keeps_those_of_the_file(before, after, end, form):
    lines = [" a", "-b", "+B", "+B2", " c"]
    assert patched(before, form(*(["@@ -1,3 +1,4 @@"] if form is unified else []), *lines, end=end)) == after
    old, new = end.join("abc"), end.join(["a", "B", "B2", "c"])
    assert edited(before, old, new) == after
    if end != "\r":  # which in a line is a character like any other
        assert edited(before, "b", f"B{end}B2") == after


def test_the_end_of_a_last_line_without_one():
    assert patched(b"a\nb", envelope(" b", "+c")) == b"a\nb\nc"
    assert patched(b"a\r\nb", envelope("-b", "+c", "+d")) == b"a\r\nc\r\nd"
    assert patched(b"a\nb", envelope("-b", "+c", "*** End of File")) == b"a\nc"
    assert patched(b"a\r\nb", envelope("+c", "*** End of File")) == b"a\r\nb\r\nc"
    assert patched(b"a\nb", unified("@@ -2 +2 @@", "-b", "\\ No newline at end of file", "+b")) == b"a\nb\n"
    assert edited(b"a\nb", "b\n", "c\nd\n") == b"a\nc\nd"
    assert edited(b"a\nb", "b\n", "c\nd") == b"a\nc\nd"
    assert edited(b"a\nb", "a\nb\n", "a\n") == b"a"
    assert edited(b"a", "\n", "b\n") == b"ab"
    assert "differ in line ends only" in edited(b"a\nb\n", "a\r\n", "a\n")


def test_a_patch_that_shows_line_ends_changes_them():
    assert patched(b"a\r\nb\r\n", unified("@@ -1,2 +1,2 @@", "-a\r", "+a", " b\r")) == b"a\nb\r\n"
    assert "changes only line ends" in patched(b"a\nb\n", unified("@@ -1,2 +1,2 @@", "-a\r", "+a", " b\r"))


@pytest.mark.parametrize("form", [envelope, unified])
def test_a_byte_order_mark_stays_where_it_is(form):
    head = ["@@ -1,2 +1,2 @@"] if form is unified else []
    first = form(*head, "-import os", "+import sys", " x")
    assert patched(BOM + b"import os\nx\n", first) == BOM + b"import sys\nx\n"
    assert patched(b"import os\nx\n", "\ufeff" + first) == b"import sys\nx\n"
    assert patched(BOM + b"import os\nx\n", form(*head, "-\ufeffimport os", "+import sys", " x")) == b"import sys\nx\n"
    assert edited(BOM + b"import os\nx\n", "import os\n", "import sys\n") == BOM + b"import sys\nx\n"


def test_a_byte_order_mark_is_not_shown():
    files = {"f": BOM + b"import os\n"}
    assert call(files, "read_file", path="f")[0] == "     1\timport os\n[f has 1 lines]"
    assert call({"f": b"a\rb\r"}, "read_file", path="f")[0].startswith("     1\ta\n     2\tb\n")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_are_numbered_as_read_file_numbers_them(end):
    files = {"f": end.join(["a", "b", "c", "b", "a", ""]).encode()}
    for old, first in (("c", 3), ("c\n", 3), (f"c{end}b{end}a", 3)):
        answer, _ = call(files, "edit_file", path="f", old=old, new=f"C{end}C2")
        assert answer == f"edited f: lines {first} to {first + 1} are new"
    assert call(files, "edit_file", path="f", old="c", new="")[0] == "edited f: text at line 3 is gone"
    assert "old is 2 times in f, at lines 2, 4;" in call(files, "edit_file", path="f", old="b", new="x")[0]


LATIN = "name = 'café'\r\nx = 1\r\n".encode("latin-1")


def test_bytes_that_are_not_utf_8_are_kept():
    after = LATIN.replace(b"x = 1", b"x = 2")
    assert edited(LATIN, "x = 1", "x = 2") == after
    assert edited(LATIN, "name = 'caf\ufffd'\nx = 1\n", "name = 'caf\ufffd'\nx = 2\n") == after
    assert patched(LATIN, envelope(" name = 'caf\ufffd'", "-x = 1", "+x = 2")) == after
    renamed = LATIN.replace(b"name", b"title")
    assert patched(LATIN, envelope("-name = 'caf\ufffd'", "+title = 'caf\ufffd'")) == renamed
    assert edited("x = 'ア' # ¥\nb = 1\n".encode("shift-jis"), "b = 1", "b = 2") == "x = 'ア' # ¥\nb = 2\n".encode(
        "shift-jis"
    )


@pytest.mark.parametrize(
    ("data", "old", "new", "words"),
    [
        (LATIN, "x = 1", "x = 'é'", "f is not UTF-8 text, so 'é' cannot be written into it; use ASCII, or shell"),
        (LATIN, "x = 1", "x = '\ufffd'", "cannot be written into it"),
        (LATIN, "'\r\nx", "", "old begins at a byte of f that is not UTF-8"),
        (LATIN, "caf\ufffd", "cafe", "old ends at a byte of f that is not UTF-8"),
        ("ア = 1\n".encode("shift-jis"), "A = 1", "B = 1", "old begins at a byte"),
        ("x = 1\n".encode("utf-16"), "x = 1", "x = 2", "f is not UTF-8 text; change it with shell"),
        (b"\n\n\n", "\n\n", "\n", "old is 2 times in f, at lines 1, 2; make it longer"),
    ],
)
def test_what_an_encoding_cannot_take_changes_nothing(data, old, new, words):
    assert words in edited(data, old, new)


def test_an_indented_header_is_a_line_of_a_file_where_the_file_has_it():
    patch = "*** Begin Patch\n*** Update File: a\n@@\n-x\n+y\n *** Update File: b\n@@\n-x\n+y\n*** End Patch"
    files = {"a": b"x\n", "b": b"x\n"}
    assert call(files, "apply_patch", patch=patch) == ("edited a\nedited b", {"a": b"y\n", "b": b"y\n"})
    files = {"a": b"x\n*** Update File: b\nx\n", "b": b"x\n"}
    after = {"a": b"y\n*** Update File: b\ny\n", "b": b"x\n"}
    assert call(files, "apply_patch", patch=patch) == ("edited a", after)
    answer, after = call({"a": b"x\n"}, "apply_patch", patch=patch)
    assert answer.startswith("ERROR a: hunk 1 does not fit: its old lines are not in the file") and after == {
        "a": b"x\n"
    }
