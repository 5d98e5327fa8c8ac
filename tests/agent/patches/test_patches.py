"""Patches are applied exactly; those that do not fit raise one sentence; no text breaks the parser."""

import difflib
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composer_jax.agent.patches.apply import apply_hunks
from composer_jax.agent.patches.envelope import parse_patch
from composer_jax.tasks.patches import FilePatch, Hunk, PatchError

LINES = st.lists(st.sampled_from(["a", "b", "-- x", "++ y", "@@ -1 +1 @@", "", " ", "\\ No", "c\r", "--- a/f", "é\f"]))
TEXTS = st.one_of(
    st.builds(lambda lines, end: "\n".join(lines) + "\n" * end, LINES, st.booleans()),
    st.text(max_size=60),
    st.text(alphabet="ab\n", max_size=80),
)


def with_ends(text):
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def unified(before, after, context=3, name="f"):
    """The unified diff of two texts, as `diff -u` writes it."""
    lines = difflib.unified_diff(with_ends(before), with_ends(after), f"a/{name}", f"b/{name}", n=context)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def envelope(before, after):
    """An envelope with one hunk of all lines; the format has no files without a final line break."""
    body = "".join(f"-{line}\n" for line in before.split("\n")[:-1]) + "".join(
        f"+{line}\n" for line in after.split("\n")[:-1]
    )
    return f"*** Begin Patch\n*** Update File: f\n@@\n{body}*** End of File\n*** End Patch\n"


@given(TEXTS, TEXTS, st.integers(0, 4))
@example("a\nb\n", "a\nb", 3)
@example("", "x", 0)
@example("-- x\n++ y\n", "++ y\n-- x\n", 0)
def test_a_unified_diff_turns_one_text_into_the_other(before, after, context):
    if before != after:
        [patch] = parse_patch(unified(before, after, context))
        result = apply_hunks(before, patch.hunks)
        if not all(hunk.old for hunk in patch.hunks):  # lines without context take the line ends of the file
            result, after = result.replace("\r", ""), after.replace("\r", "")
        assert result == after


@given(TEXTS, TEXTS)
def test_an_envelope_turns_one_text_into_the_other(before, after):
    before, after = f"{before}\n", f"{after}\n"
    [patch] = parse_patch(envelope(before, after))
    assert apply_hunks(before, patch.hunks) == after


PIECES = st.sampled_from([
    "*** Begin Patch\n", "*** End Patch", "*** Update File: f\n", "*** Add File: g\n", "*** Move to: h\n", "@@ x\n",
    "*** End of File\n", "--- a/f\n", "+++ b/f\n", "diff --git a/f b/f\n", "@@ -1,2 +1,2 @@\n", " a\n", "-a\n", "+b\n",
    "\\ No newline at end of file\n", "rename from f\n", "new file mode 100755\n", '--- "a/\\303\\2"\n', "\n", "@@\n",
    "@@ -0,0 +1,999999999 @@\n", "deleted file mode 1\n", "GIT binary patch\n", "/dev/null", "\0", "\ud800",
])  # fmt: skip
NEARLY = st.one_of(st.lists(PIECES, max_size=15).map("".join), st.text(max_size=100))


@given(NEARLY)
@settings(max_examples=500)
def test_no_text_breaks_the_parser(text):
    try:
        for patch in parse_patch(text):
            apply_hunks("a\na\n", patch.hunks)
    except PatchError as error:
        assert str(error)


def test_git_diff_and_format_patch_are_parsed(tmp_path):
    def git(*words):
        base = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(tmp_path)]
        return subprocess.run([*base, *words], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    for name, text in {"edit me": "1\n2\n3\n", "gone": "x\n", "old/ü": "same\nsame\nlines\n", "empty": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git("add", "-A")
    git("commit", "-qm", "first")
    (tmp_path / "edit me").write_text("1\n2\n4")
    (tmp_path / "edit me").chmod(0o755)
    (tmp_path / "gone").unlink()
    (tmp_path / "empty").unlink()
    (tmp_path / "old/ü").rename(tmp_path / "new")
    (tmp_path / "born").write_text("b\n")
    (tmp_path / "blank").write_text("")
    git("add", "-A")
    patches = {patch.path: patch for patch in parse_patch(git("diff", "--cached", "-M", "--no-rename-empty"))}
    assert patches == {
        "edit me": FilePatch(
            "edit me", "edit me", (Hunk(("1\n", "2\n", "3\n"), ("1\n", "2\n", "4"), 1),), executable=True
        ),
        "gone": FilePatch("gone", None, (Hunk(("x\n",), (), 1),)),
        "empty": FilePatch("empty", None),
        "new": FilePatch("old/ü", "new"),
        "born": FilePatch(None, "born", (Hunk((), ("b\n",), 0),), executable=False),
        "blank": FilePatch(None, "blank", executable=False),
    }
    git("commit", "-qm", "second")
    assert {
        patch.path: patch for patch in parse_patch(git("format-patch", "--stdout", "-M", "--no-rename-empty", "HEAD~"))
    } == patches


def test_an_envelope_with_every_header():
    text = """\
*** Begin Patch
*** Update File: a.py
*** Move to: b.py
@@ class A:
@@ def f(self):
-        1
+        2

@@
 tail
+end
*** End of File
*** Add File: c.py
+one
+
*** Delete File: d.py
*** End Patch"""
    first = Hunk(("        1\n", "\n"), ("        2\n", "\n"), None, ("class A:", "def f(self):"), edge_blanks=(0, 1))
    last = Hunk(("tail\n",), ("tail\n", "end\n"), at_end=True)
    assert parse_patch(text) == [
        FilePatch("a.py", "b.py", (first, last)),
        FilePatch(None, "c.py", (Hunk((), ("one\n", "\n")),)),
        FilePatch("d.py", None),
    ]
    before = "def f(self):\n        1\n\nclass A:\n    def f(self):\n        1\n\ntail\ntail\n"
    assert apply_hunks(before, (first, last)) == before[:47] + before[47:].replace("1", "2") + "end\n"


def test_wrong_line_numbers_are_ignored_where_the_place_is_unique():
    text = "--- a/f\n+++ b/f\n@@ -90,7 +2,1 @@ def f():\n b\n-c\n+C\n"
    [patch] = parse_patch(text)
    assert apply_hunks("a\nb\nc\nd\n", patch.hunks) == "a\nb\nC\nd\n"
    assert apply_hunks("a\nb\nc", patch.hunks) == "a\nb\nC", "the last line had no end and has none"


N = ("n\n",)
SECOND, FIRST = Hunk(("b\n",), ("B\n",), 2), Hunk(("a\n",), ("A\n",), 1)


@pytest.mark.parametrize(
    ("before", "hunks", "words"),
    [
        ("b\nc\nb\nc\n", [Hunk(("b\n", "c\n"), N, 90)], "1 fits in several places, such as lines 1 and 3"),
        ("a\nxb\nc\n", [Hunk(("b\n", "c\n"), N, 90)], "1 does not fit: its old lines are not in the file"),
        ("a\nb\n", [Hunk(("b\n",), N), Hunk(("a\n",), N)], "2 does not fit: .* behind line 2"),
        ("a\nb\n", [SECOND, Hunk(("x\n",), N, 1)], "2 does not fit: .* such as 'x'"),
        ("a\nb\n", [SECOND, SECOND], "2 does not fit"),
        ("a\nb\n", [Hunk((), N)], "1 only adds lines and does not say where"),
        ("a\nb\n", [Hunk((), N, None, ("class X",))], "no line starts with its @@ 'class X'"),
    ],
)
def test_hunks_that_fit_nowhere_or_twice_are_refused(before, hunks, words):
    with pytest.raises(PatchError, match=words):
        apply_hunks(before, hunks)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "this is no patch"),
        ("hello\nworld", "this is no patch"),
        ("@@ -1 +1 @@\n-a\n+b\n", "line 1 of the patch starts a hunk"),
        ("--- a/f\n+++ b/f\n", "nothing is said of what to change in f"),
        ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n", "hunk 1 of f has no lines"),
        ("diff --git a/f b/f\nBinary files a/f and b/f differ\n", "is changed in binary"),
        ("diff --git a/f b/f\nnew file mode 120000\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n", "has mode '120000'"),
        ("--- /dev/null\n+++ /dev/null\n", "does not say which file"),
        ("diff --git a/f b/g\nrename from f\nrename to g\n a\n-b\n+c\n", "the change of g starts without"),
        (
            "diff --git a/f b/g\nrename from f\nrename to g\n--- a/f\n+++ b/g\n-a\n+b\n",
            "the change of g starts without",
        ),
        (
            "--- a/f\n+++ b/f\n@@ -1,4 +1,4 @@\n a\n-b\n+B\nc\n-d\n+D\n",
            "hunk 1 of f has a line that starts with neither",
        ),
        ("--- a/f\n+++ b/f\n@@\n a\n-b\n+B\n\nc\nd\n-e\n", "starts with neither blank, + nor -: 'c'"),
        ("*** Begin Patch\n*** Update File: f\n", "must start with"),
        ("*** Begin Patch\nhello\n*** End Patch", "line 2 of the patch is not a header"),
        ("*** Begin Patch\n*** End Patch", "the patch changes no file"),
        ("*** Begin Patch\n*** Add File: f\nx\n*** End Patch", "f is added, so its lines start with +"),
        (
            "*** Begin Patch\n*** Update File: f\n@@\n-a\nb\n*** End Patch",
            "hunk 1 of f has a line that starts with neither",
        ),
        ("*** Begin Patch\n*** Update File: f\n*** End Patch", "nothing is said of what to change in f"),
    ],
)
def test_invalid_patches_are_refused_in_one_sentence(text, expected):
    with pytest.raises(PatchError) as error:
        parse_patch(text)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_hunks_with_line_numbers_may_come_in_any_order():
    assert apply_hunks("a\nb\na\n", [SECOND, FIRST]) == "A\nB\na\n"


def test_text_after_a_hunk_with_wrong_counts_is_no_part_of_it():
    text = "```diff\n--- a/f\n+++ b/f\n@@ -1,9 +1,9 @@\n a\n-b\n+B\n```\nIt mends:\n- a list\n"
    [patch] = parse_patch(text)
    assert apply_hunks("a\nb\n", patch.hunks) == "a\nB\n"


def test_a_list_below_a_blank_line_is_prose_only_behind_a_hunk_with_true_counts():
    """Where the counts are wrong, the blank line may be context of the hunk and `- done` one of its lines."""
    text = "--- a/f\n+++ b/f\n@@ -1,{0} +1,{0} @@\n a\n-b\n+B\n\nNotes:\n- done\n"
    [patch] = parse_patch(text.format(2))
    assert apply_hunks("a\nb\n", patch.hunks) == "a\nB\n"
    with pytest.raises(PatchError, match="starts with neither blank, [+] nor -: 'Notes:'"):
        parse_patch(text.format(9))


MANY = 10_000


def test_many_anchors_and_hunks_take_no_quadratic_time():
    lines = [f"{number}\n" for number in range(2 * MANY)]
    anchors = Hunk(("x\n",), N, None, ("1",) * 5000)
    with pytest.raises(PatchError, match="old lines are not in the file behind line "):
        apply_hunks("".join(lines), [anchors])
    hunks = [Hunk((lines[at],), N, at + 1) for at in range(0, 2 * MANY, 2)]
    assert apply_hunks("".join(lines), hunks) == "".join(f"n\n{line}" for line in lines[1::2])


def test_the_place_of_a_hunk_without_old_lines():
    after = Hunk((), ("n\n",), 1)
    assert apply_hunks("a\nb\n", (after,)) == "a\nn\nb\n"
    assert apply_hunks("a\nb\n", (Hunk((), ("n\n",), None, ("a",)),)) == "a\nn\nb\n"
    assert apply_hunks("a\nb\n", (Hunk((), ("n\n",), at_end=True),)) == "a\nb\nn\n"
