"""Tools that change files: they make the exact change, or none and explain why."""

import pytest

from composer_jax.agent import workspace as workspaces
from composer_jax.agent.similar_lines import MAX_COMPARED, describe_similar_lines
from composer_jax.agent.workspace import Workspace
from composer_jax.sandbox import Change, SandboxFileError
from tests.agent.conftest import task_of

TABLE = "src/rates/table.py"


async def test_a_text_that_occurs_once_is_replaced(chat):
    before = chat.workspace.files[TABLE]
    answer = await chat.ask("edit_file", path=TABLE, old="amount * self.rates[currency]", new="(\n  1\n)")
    assert answer == f"edited {TABLE}: lines 14 to 16 are new"
    after = before.replace(b"amount * self.rates[currency]", b"(\n  1\n)")
    assert chat.workspace.changes == {TABLE: Change("file", after)}
    assert await chat.ask("edit_file", path=TABLE, old="(\n  1\n)", new="amount * self.rates[currency]")
    assert chat.workspace.changes == {}, "a file with its first content is not a change"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"path": TABLE, "old": "name", "new": "x"}, "old is 2 times in src/rates/table.py, at lines 18, 19; make it"),
        ({"path": TABLE, "old": "x", "new": "x"}, "old and new are the same"),
        ({"path": TABLE, "new": "x"}, "src/rates/table.py is there; say in old which text of it is to be replaced"),
        ({"path": "passwd", "old": "root", "new": "x"}, "passwd is a symbolic link to /etc/passwd"),
        ({"path": "out/x", "new": "x"}, "out is a symbolic link to /etc"),
        ({"path": "passwd", "new": "x"}, "passwd is a symbolic link"),
        ({"path": "src", "new": "x"}, "src is a folder, not a file"),
        ({"path": "README.md/x", "new": "x"}, "README.md is a file, not a folder"),
        ({"path": "", "new": "x"}, "the workspace itself is a folder"),
        ({"path": "image.bin", "old": "x", "new": "y"}, "image.bin is not UTF-8 text"),
        (
            {"path": "latin.txt", "old": "caf", "new": "é"},
            "latin.txt is not UTF-8 text, so 'é' cannot be written into it",
        ),
        ({"path": "nowhere", "old": "x", "new": "y"}, "there is no file nowhere"),
        ({"path": "nowhere", "delete": True}, "there is no file nowhere"),
        ({"path": "src", "delete": True}, "src is a folder"),
        ({"path": "", "delete": True}, ". is a folder"),
        ({"path": TABLE, "delete": True, "old": "x"}, "delete removes the whole file and takes neither old nor new"),
        ({"path": TABLE, "old": "x", "new": "y", "count": 2}, "edit_file takes no count"),
        ({"path": TABLE, "old": "x", "new": "y", "delete": "yes"}, "delete must be true or false"),
        ({"path": "new.txt", "new": "\ud800"}, "new holds half of a surrogate pair"),
        ({"path": "new\0.txt", "new": "x"}, "is not a file name"),
    ],
)
async def test_mistakes_change_nothing(chat, arguments, expected):
    answer = await chat.ask("edit_file", **arguments)
    assert answer.startswith("ERROR ") and expected in answer
    assert chat.workspace.changes == {}


def test_a_missing_text_is_answered_with_similar_lines(ask):
    answer = ask(
        "edit_file", path=TABLE, old="def parse_header(line):\n  name, _, value = line.partition(':')", new="x"
    )
    assert answer.startswith(f"ERROR old is not in {TABLE}; the nearest to its first line is in\n")
    assert "    17\t'def parse_header(line):'" in answer
    answer = ask("edit_file", path=TABLE, old='def convertAmount(self, amount, currency):\n  """Money in', new="x")
    assert "'    def convertAmount(self, amount, currency):'" in answer
    answer = ask("edit_file", path=TABLE, old='class RateTable:\n  """Holds the exchange rates."""', new="x")
    assert "; these lines differ from it in white space only:\n     6\t'class RateTable:'\n     7\t'    " in answer
    assert ask("edit_file", path=TABLE, old="%%%%", new="x") == f"ERROR old is not in {TABLE}; copy it from the file"


def test_only_the_first_lines_of_a_long_file_are_compared_by_words():
    near = "def parse(line, sep):"
    rest = ["#"] * (MAX_COMPARED - 1)
    assert f"{MAX_COMPARED:6}\t{near!r}" in describe_similar_lines("\n".join([*rest, near]), "def parse(line):")
    text = "\n".join([*rest, "#", near, "  x = 1"])
    assert describe_similar_lines(text, "def parse(line):") == ""
    described = describe_similar_lines(text, f"{near}\n    x = 1\n")
    assert f"white space only:\n{MAX_COMPARED + 1:6}\t{near!r}\n" in described
    assert "white space only" not in describe_similar_lines("ab\nc", "b\nc")  # whole lines, not ends of lines


async def test_files_are_created_and_deleted(chat):
    workspace = chat.workspace
    assert await chat.ask("edit_file", path="new/a.py", new="one\ntwo") == "created new/a.py with 2 lines"
    assert await chat.ask("edit_file", path="/workspace/empty.txt", new="filled\n") == "created empty.txt with 1 lines"
    assert await chat.ask("edit_file", path="README.md", delete=True) == "deleted README.md"
    assert await chat.ask("edit_file", path="passwd", delete=True) == "deleted passwd"
    assert await chat.ask("edit_file", path="passwd", new="mine") == "created passwd with 1 lines"
    assert {path: change.kind for path, change in workspace.changes.items()} == {
        "new/a.py": "file", "empty.txt": "file", "README.md": "gone", "passwd": "file",
    }  # fmt: skip
    assert await chat.ask("edit_file", path="new/a.py", delete=True) == "deleted new/a.py"
    assert "new/a.py" not in workspace.changes and workspace.kind("new") is None
    answer = await chat.ask("shell", command="cat README.md; cat passwd empty.txt; ls new; tail -1 /etc/passwd >&2")
    assert "cat: README.md: No such file" in answer and "minefilled" in answer and "cannot access 'new'" in answer


async def test_crlf_line_ends_are_kept(chat):
    await chat.ask("edit_file", path="docs/windows.txt", old="one\ntwo", new="1\n2\n2.5")
    assert chat.workspace.files["docs/windows.txt"] == b"1\r\n2\r\n2.5\r\nthree\r\n"
    answer = await chat.ask(
        "apply_patch", patch="--- docs/windows.txt\n+++ docs/windows.txt\n@@ -3,2 +3,2 @@\n 2.5\n-three\n+3\n"
    )
    assert answer == "edited docs/windows.txt"
    assert chat.workspace.files["docs/windows.txt"] == b"1\r\n2\r\n2.5\r\n3\r\n"


async def test_executable_files_stay_executable(chat):
    await chat.ask("edit_file", path="tool.sh", old="echo tool", new="echo changed")
    assert chat.workspace.changes["tool.sh"].mode & 0o100
    assert await chat.ask("shell", command="./tool.sh") == "changed\n[exit 0]"


PATCH = """\
*** Begin Patch
*** Update File: README.md
@@
-# Rates
+# Rates and more
*** Add File: new/b.py
+B = 1
*** Delete File: empty.txt
*** Update File: tool.sh
*** Move to: bin/tool
@@
-echo tool
+echo moved
*** End Patch"""


async def test_a_patch_over_several_files(chat):
    answer = await chat.ask("apply_patch", patch=PATCH)
    assert answer == "edited README.md\ncreated new/b.py\ndeleted empty.txt\nmoved tool.sh to bin/tool"
    files = chat.workspace.files
    assert files["README.md"].startswith(b"# Rates and more\n\n") and files["new/b.py"] == b"B = 1\n"
    assert "empty.txt" not in files and "tool.sh" not in files
    assert await chat.ask("shell", command="bin/tool; ls empty.txt tool.sh 2>/dev/null") == "moved\n[exit 2]"


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        (
            PATCH.replace("-echo tool", "-echo other"),
            "bin/tool: hunk 1 does not fit: its old lines are not in the file",
        ),
        (PATCH.replace("empty.txt", "gone.txt"), "there is no file gone.txt; nothing was changed"),
        (PATCH.replace("new/b.py", "README.md"), "README.md is there already"),
        (PATCH.replace("new/b.py", "../b.py"), "'..'"),
        (PATCH.replace("new/b.py", "/etc/b.py"), "outside of the workspace"),
        (PATCH.replace("new/b.py", "out/b.py"), "out is a symbolic link"),
        (PATCH.replace("new/b.py", "tests"), "tests is there already"),
        (PATCH.replace("new/b.py", "README.md/b"), "README.md is a file, not a folder"),
        (PATCH.replace("new/b.py", "/workspace"), "names the workspace itself"),
        (PATCH.replace("new/b.py", "n" * 300), "longer than a path may be"),
        (
            "--- a/latin.txt\n+++ b/latin.txt\n@@ -1 +1 @@\n-caf\ufffd\n+é\n",
            "latin.txt is not UTF-8 text, so 'é' cannot",
        ),
        ("--- a/README.md\n+++ /dev/null\n@@ -1 +0,0 @@\n-# Rates\n", "does not remove all of its lines"),
        ("--- /dev/null\n+++ b/README.md\n@@ -0,0 +1 @@\n+x\n", "README.md is there already"),
        ("--- a/README.md\n+++ b/\n@@ -1 +1 @@\n-# Rates\n+x\n", "names the workspace itself"),
        ("nonsense", "this is no patch"),
    ],
)
async def test_a_patch_that_does_not_fit_changes_nothing(chat, patch, expected):
    answer = await chat.ask("apply_patch", patch=patch)
    assert answer.startswith("ERROR ") and expected in answer
    assert chat.workspace.changes == {}


async def test_a_patch_of_many_files_takes_no_quadratic_time(chat):
    names = [f"many/{number}/a" for number in range(5000)]
    added = "".join(f"*** Add File: {name}\n+x\n" for name in names)
    answer = await chat.ask("apply_patch", patch=f"*** Begin Patch\n{added}*** End Patch")
    assert answer.startswith("created many/0/a\n") and len(chat.workspace.changes) == len(names)


def test_folders_and_room_follow_every_change(monkeypatch):
    monkeypatch.setattr(workspaces, "MAX_CHANGED", 6)
    workspace = Workspace(task_of({}), None)
    workspace.write("x/y/a", b"123")
    workspace.write("x/b", b"456")
    with pytest.raises(SandboxFileError, match="no space left for c"):
        workspace.write("c", b"7")
    workspace.write("x/b", b"45")
    workspace.delete("x/y/a")
    assert (workspace.kind("x"), workspace.kind("x/y")) == ("folder", None)
    with pytest.raises(SandboxFileError, match="no space left for c"):
        workspace.replace({"x/b": None, "c": (b"1234567", None)})
    assert workspace.kind("x") == "folder"
    workspace.replace({"x/b": None, "c": (b"123456", None)})
    assert workspace.kind("x") is None and workspace.files["c"] == b"123456"


async def test_a_patch_may_change_a_file_twice(chat):
    add = "--- /dev/null\n+++ b/n.txt\n@@ -0,0 +1,2 @@\n+one\n+two\n"
    edit = "--- a/n.txt\n+++ b/n.txt\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"
    move = "diff --git a/n.txt b/m.txt\nrename from n.txt\nrename to m.txt\n"
    assert await chat.ask("apply_patch", patch=add + edit + move) == (
        "created n.txt\nedited n.txt\nmoved n.txt to m.txt"
    )
    assert {path: change.data for path, change in chat.workspace.changes.items()} == {"m.txt": b"one\n2\n"}
