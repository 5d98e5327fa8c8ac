"""Tools that read, on a real repository: their output, truncation and errors."""

import asyncio
import os

import pytest

from composer_jax.agent.tools import browse, glob_pattern
from composer_jax.agent.tools.truncate import HEAD, MAX_CHARACTERS, truncate_middle
from tests.agent.tools.conftest import Conversation


def test_read_file_numbers_its_lines(ask):
    answer = ask("read_file", path="README.md")
    assert answer == "     1\t# Rates\n     2\t\n     3\tHow to convert money.\n[README.md has 3 lines]"
    assert ask("read_file", path="/workspace/README.md") == ask("read_file", path="./README.md") == answer
    assert ask("read_file", path="/testbed/README.md") == answer


def test_read_file_shows_a_part(ask):
    answer = ask("read_file", path="src/rates/table.py", start=6, end=7)
    assert answer.split("\n") == [
        "     6\tclass RateTable:",
        '     7\t    """Holds the exchange rates."""',
        "[src/rates/table.py has 19 lines, shown are 6 to 7]",
    ]
    assert ask("read_file", path="README.md", start=3, end=99).startswith("     3\tHow")
    assert ask("read_file", path="README.md", start=9) == "ERROR README.md has 3 lines, so there is no line 9"
    assert ask("read_file", path="README.md", start=3, end=2) == "ERROR end 2 is before start 3"


def test_files_of_every_kind(ask):
    assert ask("read_file", path="empty.txt") == "empty.txt is empty"
    assert (
        ask("read_file", path="docs/windows.txt")
        == "     1\tone\n     2\ttwo\n     3\tthree\n[docs/windows.txt has 3 lines]"
    )
    assert ask("read_file", path="docs/no_end.txt").endswith("     2\tlast\n[docs/no_end.txt has 2 lines]")
    assert ask("read_file", path="docs/ünïcödé name.txt").startswith("     1\tgrüße\n")
    assert ask("read_file", path="latin.txt").startswith("     1\tcaf\ufffd\n")
    assert ask("read_file", path="image.bin") == "ERROR image.bin is a binary file of 350 bytes"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("nowhere.py", "ERROR there is no file nowhere.py"),
        ("table.py", "ERROR there is no file table.py; there is src/rates/table.py"),
        ("src", "ERROR src is a folder"),
        ("", "ERROR . is a folder"),
        ("/workspace", "ERROR . is a folder"),
        ("/etc/passwd", "ERROR /etc/passwd is outside of the workspace; paths are relative to it, or below /workspace"),
        ("/workspace/../etc/passwd", "'..'"),
        ("/workspace//etc/passwd", "ERROR there is no file etc/passwd"),
        ("a/../../etc/passwd", "'..'"),
        ("src/../README.md", "'..'"),
        ("passwd", "ERROR passwd is a symbolic link to /etc/passwd, which is not followed"),
        ("out/passwd", "ERROR out is a symbolic link to /etc, which is not followed"),
        ("docs/table", "ERROR docs/table is a symbolic link to ../src/rates/table.py, which is not followed"),
        ("pipe", "ERROR there is no file pipe"),
        ("README.md\0", "is not a file name"),
        ("README.md/x", "ERROR there is no file README.md/x"),
        ("\ud800", "ERROR path holds half of a surrogate pair"),
        ("x" * 300, "is longer than a path may be"),
        ("a/" * 200 + "b", "is longer than a path may be"),
    ],
)
def test_missing_paths_and_paths_outside_are_errors(ask, path, expected):
    answer = ask("read_file", path=path)
    assert answer.startswith("ERROR ") and expected in answer and "root:" not in answer


async def test_long_lines_and_files_are_truncated(chat):
    chat.workspace.write("long.txt", b"x" * 2000 + b"\n")
    chat.workspace.write("many.txt", b"line\n" * 5000)
    chat.workspace.write("huge.txt", b"x" * (browse.MAX_BYTES + 1))
    answer = await chat.ask("read_file", path="long.txt")
    assert f"{'x' * browse.MAX_LINE} [1500 characters more]\n" in answer
    answer = await chat.ask("read_file", path="many.txt")
    assert answer.endswith("[many.txt has 5000 lines, shown are 1 to 1000]")
    assert (await chat.ask("read_file", path="huge.txt")).startswith("ERROR huge.txt has 10485761 bytes")


def test_a_file_that_claims_to_be_endless_is_not_read(tmp_path, pool):
    with open(tmp_path / "sparse", "wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    chat = Conversation(tmp_path, pool)
    assert "bytes, more than" in asyncio.run(chat.ask("read_file", path="sparse"))
    assert asyncio.run(chat.ask("semantic_search", query="anything")) == "no match"


def test_list_dir_shows_kinds_and_depth(ask):
    top = ask("list_dir").split("\n")
    assert {"README.md", "src/", "out -> /etc", "empty.txt", ".git/"} <= set(top) and "pipe" not in top
    assert not any(path.startswith("src/r") for path in top)
    assert [path for path in ask("list_dir", depth=5).split("\n") if path.startswith(".git/")] == [".git/"]
    assert "HEAD" in ask("list_dir", path=".git").split("\n")
    assert ask("list_dir", path="src", depth=2).split("\n") == [
        "rates/", "rates/__init__.py", "rates/deep/", "rates/table.py", "web/", "web/server.py",
    ]  # fmt: skip
    assert ask("list_dir", path="README.md") == "ERROR there is no folder README.md"
    assert ask("list_dir", path="out").startswith("ERROR out is a symbolic link")
    assert ask("list_dir", path="..").startswith("ERROR .. has '..'")


async def test_listings_show_changes(chat):
    await chat.ask("edit_file", path="new/folder/a.py", new="x\n")
    await chat.ask("edit_file", path="src/web/server.py", delete=True)
    assert await chat.ask("list_dir", path="new", depth=9) == "folder/\nfolder/a.py"
    assert await chat.ask("list_dir", path="src/web") == "src/web is empty"
    assert await chat.ask("glob", pattern="{a,server}.py") == "new/folder/a.py"


def test_glob(ask):
    assert ask("glob", pattern="**/leaf.py") == ask("glob", pattern="leaf.py") == "src/rates/deep/er/leaf.py"
    assert ask("glob", pattern="/workspace/src/*/*.py").split("\n") == [
        "src/rates/__init__.py", "src/rates/table.py", "src/web/server.py",
    ]  # fmt: skip
    assert ask("glob", pattern="*.{md,sh}") == "README.md\ntool.sh"
    assert ask("glob", pattern="*.rs") == ask("glob", pattern="HEAD") == "no match"
    assert ask("glob", pattern=".git/HEAD") == ".git/HEAD"
    assert ask("glob", pattern="../*").startswith("ERROR ../* has '..'")
    assert ask("glob", pattern="{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}").startswith("ERROR the pattern has more than")
    assert ask("glob", pattern="docs/*e.txt") == "docs/ünïcödé name.txt"


@pytest.mark.parametrize(
    ("pattern", "path", "wanted"),
    [
        ("*.py", "a/b.py", True),
        ("a/*.py", "a/b.py", True),
        ("a/*.py", "a/c/b.py", False),
        ("a/**/*.py", "a/b.py", True),
        ("a/**/*.py", "a/c/d/b.py", True),
        ("**", "a/b", True),
        ("a/**", "a/b/c", True),
        ("a/**", "b/a", False),
        ("**/**/b", "b", True),
        ("a?c/[xy]", "abc/y", True),
        ("a?c/[!xy]", "abc/y", False),
        ("{a,b}/c", "b/c", True),
        ("x{a{b,c},d}", "xac", True),
    ],
)
def test_patterns(pattern, path, wanted):
    assert glob_pattern.compile_glob(pattern)(path) is wanted


def test_a_hostile_glob_takes_little_time():
    matches = glob_pattern.compile_glob("*a" * 100 + "/" + "**/" * 90 + "b")
    assert not matches("a" * 200 + "/" + "a/" * 50 + "c")


def test_long_observations_keep_both_ends():
    text = "".join(f"line {number}\n" for number in range(10_000))
    answer = truncate_middle(text)
    assert answer.startswith(text[:HEAD]) and answer.endswith(text[-(MAX_CHARACTERS - HEAD) :])
    assert f"[{len(text) - MAX_CHARACTERS} characters with" in answer
    assert truncate_middle("x" * MAX_CHARACTERS) == "x" * MAX_CHARACTERS
