"""Unified diffs of files, and the paths in their headers. tests/agent/patches reads them as a model writes them."""

import pytest

from composer_jax.tasks.patches import FilePatch, Hunk, format_unified, header_paths, parse_unified

DIFF = """\
--- a/one.txt\t2026-01-01 00:00:00
+++ b/one.txt\t2026-01-02 00:00:00
@@ -1 +1 @@
-a
+b
diff --git "a/t\\303\\266.bin" "b/t\\303\\266.bin"
Binary files a and b differ
diff --git a/x y b/x y
old mode 100644
new mode 100755
diff --git a/old b/new
similarity index 100%
rename from old
rename to new
--- /dev/null
+++ b/dir/born
@@ -0,0 +1 @@
+1
"""


def test_header_paths_are_all_paths_of_a_diff():
    named = {"one.txt", "tö.bin", "x y", "old", "new", "dir/born"}
    paths = set(header_paths(DIFF))
    assert named <= paths and "/dev/null" not in paths and "dev/null" not in paths


def test_bytes_of_a_path_that_are_not_utf_8_are_surrogate_escapes():
    assert "caf\udce9" in set(header_paths('--- "a/caf\\351"\n'))


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        ("a\nb\n", "a\nc\n", FilePatch("f", "f", (Hunk(("a\n", "b\n"), ("a\n", "c\n"), 1),))),
        (None, "a", FilePatch(None, "f", (Hunk((), ("a",), 0),))),
        ("a\n", None, FilePatch("f", None, (Hunk(("a\n",), (), 1),))),
        ("a\fb\n", "a\u2028c\n", FilePatch("f", "f", (Hunk(("a\fb\n",), ("a\u2028c\n",), 1),))),
    ],
)
def test_what_is_written_is_read(before, after, patch):
    assert parse_unified(format_unified("f", before, after)) == [patch]


@pytest.mark.parametrize(
    ("headers", "first"),
    [
        ("diff --git a/x b/y\nrename from x\nrename to y\n", FilePatch("x", "y")),
        ("diff --git a/x b/x\ndeleted file mode 100644\n", FilePatch("x", None)),
        ("diff --git a/x b/x\nold mode 100644\nnew mode 100755\n", FilePatch("x", "x", executable=True)),
    ],
)
def test_a_change_without_hunks_does_not_take_those_of_the_next_file(headers, first):
    second = FilePatch("f", "f", (Hunk(("a\n",), ("b\n",), 1),))
    assert parse_unified(f"{headers}--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n") == [first, second]
