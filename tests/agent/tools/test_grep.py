"""grep: Python and ripgrep find the same lines, in time for any pattern, whatever the workspace holds."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from composer_jax.agent.tools import grep
from composer_jax.tasks.result_cache import ResultCache
from tests.agent.tools.conftest import Conversation


def test_matches_show_path_line_and_text(ask):
    assert ask("grep", pattern="def .*header") == (
        "src/rates/table.py:17:def parse_header(line):\n[1 lines match in 1 files]"
    )
    assert (
        ask("grep", pattern="RATES", ignore_case=True, glob="*.md") == "README.md:1:# Rates\n[1 lines match in 1 files]"
    )
    assert ask("grep", pattern="nothing like it") == "no match"
    assert ask("grep", pattern="two$", path="docs") == "docs/windows.txt:2:two\n[1 lines match in 1 files]"
    assert ask("grep", pattern="grüße", path="/workspace/docs/ünïcödé name.txt").startswith(
        "docs/ünïcödé name.txt:1:grüße"
    )


def test_context(ask):
    answer = ask("grep", pattern="self.rates", path="src/rates/table.py", context=1)
    assert answer.split("\n") == [
        "--",
        "src/rates/table.py-9-    def __init__(self, rates):",
        "src/rates/table.py:10:        self.rates = rates",
        "src/rates/table.py-11-",
        "--",
        'src/rates/table.py-13-        """Money in another currency."""',
        "src/rates/table.py:14:        return amount * self.rates[currency]",
        "src/rates/table.py-15-",
        "[2 lines match in 1 files]",
    ]


def test_mistakes(ask):
    assert ask("grep", pattern="(").startswith("ERROR the pattern is no regular expression: missing )")
    assert ask("grep", pattern="a{4294967296}").startswith("ERROR the pattern is no regular expression")
    assert ask("grep", pattern="") == "ERROR pattern is empty"
    assert ask("grep", pattern="a\0") == "ERROR pattern has a zero byte in it, which no text file has"
    assert ask("grep", pattern="a", path="nowhere") == "ERROR there is no file or folder nowhere"
    assert ask("grep", pattern="root", path="passwd").startswith("ERROR passwd is a symbolic link")
    assert ask("grep", pattern="root", path="out").startswith("ERROR out is a symbolic link")
    assert ask("grep", pattern="a", path="../..").startswith("ERROR ../.. has '..'")
    assert ask("grep", pattern="root:x") == "no match", "links are not followed"


async def test_changed_files_are_searched_and_results_are_cached(repository, roomy_pool):
    cache = ResultCache()
    for _ in range(2):
        chat = Conversation(repository, roomy_pool, cache)
        assert await chat.ask("grep", pattern="NEEDLE") == "no match"
        await chat.ask("edit_file", path="n.txt", new="a NEEDLE\n")
        assert (await chat.ask("grep", pattern="NEEDLE")).startswith("n.txt:1:a NEEDLE\n")
        await chat.workspace.close()
    assert (cache.runs, cache.hits) == (2, 2)


async def test_many_and_long_lines_are_truncated(chat):
    chat.workspace.write("many.txt", b"needle\n" * 500)
    chat.workspace.write("wide.txt", b"needle" + b"x" * 5000)
    answer = (await chat.ask("grep", pattern="needle")).split("\n")
    assert len(answer) == 101 and answer[-1] == "[501 lines match in 2 files; shown are the first 100]"
    answer = await chat.ask("grep", pattern="needle", path="wide.txt")
    assert answer.startswith("wide.txt:1:needlexxx") and "[4706 characters more]" in answer and len(answer) < 500


async def test_a_catastrophic_pattern_is_stopped(chat, monkeypatch):
    monkeypatch.setattr(grep, "TIMEOUT_S", 1.0)
    chat.workspace.write("evil.txt", b"a" * 60 + b"!\n")
    # ripgrep is never slow, and leaves what looks ahead to Python.
    answer = await chat.ask("grep", pattern="(?=a)(a|a)+$", path="evil.txt")
    assert answer == "ERROR the search was stopped after 1 s; use a simpler pattern, or search in fewer files"
    assert "evil.txt:1" in await chat.ask("grep", pattern="a!", path="evil.txt")


SHADOWS = ("json", "re", "os", "stat", "sys", "shutil", "subprocess", "fnmatch", "sitecustomize", "encodings", "codecs")


async def test_modules_of_the_workspace_are_not_imported(chat):
    for name in SHADOWS:
        chat.workspace.write(f"{name}.py", b"raise SystemExit('fooled NEEDLE')\n")
    chat.workspace.write("rg", b"#!/bin/sh\necho fooled NEEDLE\n", 0o755)
    answer = await chat.ask("grep", pattern="fooled N[E]+DLE", glob="*.py")
    assert answer.endswith(f"[{len(SHADOWS)} lines match in {len(SHADOWS)} files]")
    assert (await chat.ask("shell", command="export PATH=/workspace:$PATH")).endswith("[exit 0]")
    assert await chat.ask("grep", pattern="fooled N[E]+DLE", glob="*.py") == answer


def searched(folder, programs, **request):
    wanted = {"path": "", "glob": "", "ignore_case": False, "context": 0, **request}
    command = [sys.executable, *grep.COMMAND[1:], json.dumps(wanted)]
    return subprocess.run(command, cwd=folder, env={"PATH": programs}, capture_output=True, text=True)


OPTIONS = ({}, {"ignore_case": True, "context": 2}, {"glob": "*.py"}, {"path": "docs"})
PATTERNS = ("def ", "^one$", "RATE", "grüße", "(?=def)d", "s\\b", "^$", "\\w+\\(")


@pytest.mark.skipif(shutil.which("rg") is None, reason="needs ripgrep")
@pytest.mark.parametrize(("number", "pattern"), list(enumerate(PATTERNS)))
def test_ripgrep_finds_the_same(repository, number, pattern):
    for options in (OPTIONS[number % 4], OPTIONS[(number // 4 + number + 1) % 4]):
        with_rg = searched(repository, os.path.dirname(shutil.which("rg")), pattern=pattern, **options)
        without = searched(repository, "/nowhere", pattern=pattern, **options)
        assert with_rg.returncode == without.returncode in (0, 1)
        assert with_rg.stdout == without.stdout


@pytest.mark.parametrize("program", ["rg", "python"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path, program):
    if program == "rg" and shutil.which("rg") is None:
        pytest.skip("needs ripgrep")
    (tmp_path / "f").write_bytes("\ufeffimport os\nimport é\n".encode())
    programs = os.path.dirname(shutil.which("rg") or "") if program == "rg" else ""
    done = searched(tmp_path, programs, pattern="^import .*", path="", glob="", ignore_case=False, context=0)
    assert done.stdout == "f:1:import os\nf:2:import é\n[2 lines match in 1 files]\n"
