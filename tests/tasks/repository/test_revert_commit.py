"""Undone commits in real git repositories."""

import os
import subprocess

import pytest

from composer_jax.errors import UserError
from composer_jax.tasks.repository.revert_commit import revert_commits

OLD = "def f(x):\n    return x\n\n\ndef g(x):\n    return 2 * x\n\n\ndef h(x):\n    return 3 * x\n"
NEW = OLD.replace("return x\n", "return abs(x)\n")


@pytest.fixture
def git(tmp_path):
    """commit(files, subject): writes files (None deletes) and commits them; returns the hash."""

    def run(*arguments):
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}
        for role in ("AUTHOR", "COMMITTER"):
            environment |= {f"GIT_{role}_NAME": "T", f"GIT_{role}_EMAIL": "t@example.org"}
            environment[f"GIT_{role}_DATE"] = "2020-01-01T00:00:00Z"
        return subprocess.check_output(["git", "-C", str(tmp_path), *arguments], env=environment, text=True).strip()

    def commit(files, subject):
        for path, text in files.items():
            place = tmp_path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink() if text is None else place.write_bytes(text.encode())
        run("add", "-A")
        run("commit", "-q", "-m", subject)
        return run("rev-parse", "HEAD")

    run("init", "-q")
    commit({"p/a.py": OLD, "tests/test_a.py": "1\n"}, "Start")
    return commit


def test_a_commit_is_undone_in_its_code_and_not_in_its_tests(git, tmp_path):
    name = git({"p/a.py": NEW, "tests/test_a.py": "2\n", "CHANGES": "f is absolute\n"}, "f: absolute value")
    git({"p/a.py": NEW.replace("3 *", "4 *")}, "Later, elsewhere")
    (reverted,) = revert_commits(tmp_path)
    assert reverted.kind == "revert_commit"
    assert reverted.files == {"p/a.py": OLD.replace("3 *", "4 *")}
    assert reverted.entities == ("p/a.py::f",)
    assert reverted.removed == ("    return abs(x)\n",)
    assert reverted.note == f"commit {name[:12]} was undone: f: absolute value"


def test_a_commit_that_later_ones_changed_is_not_a_candidate(git, tmp_path):
    git({"p/a.py": NEW, "tests/test_a.py": "2\n"}, "f: absolute value")
    git({"p/a.py": NEW.replace("abs(x)", "abs(x) + 1")}, "f: one more")
    assert list(revert_commits(tmp_path)) == []


@pytest.mark.parametrize("files", [{"p/a.py": NEW}, {"tests/test_a.py": "2\n"}, {"p/a.py": NEW, "CHANGES": "x\n"}])
def test_a_commit_without_code_or_without_tests_is_not_a_candidate(git, tmp_path, files):
    git(files, "Half")
    assert list(revert_commits(tmp_path)) == []


def test_added_and_deleted_files_are_undone(git, tmp_path):
    git({"p/a.py": None, "p/b c.py": NEW, "tests/test_a.py": "2\n"}, "a became b c")
    (reverted,) = revert_commits(tmp_path)
    assert reverted.files == {"p/a.py": OLD, "p/b c.py": None}
    assert set(reverted.entities) == {f"p/{name}.py::{function}" for name in ("a", "b c") for function in "fgh"}


def test_line_ends_and_every_character_are_kept(git, tmp_path):
    text = "x = '\u00e4\u2028'\r\n\r\n\r\ndef f():\r\n    return 1\r\n"
    git({"p/c.py": text, "tests/test_c.py": "1\n"}, "c")
    git({"p/c.py": text.replace("1", "2"), "tests/test_c.py": "2\n"}, "c is 2")
    (reverted,) = revert_commits(tmp_path)  # the one before made the file, and something was built on it
    assert reverted.files == {"p/c.py": text}


def test_commits_are_read_newest_first_up_to_the_limit(git, tmp_path):
    git({"p/a.py": NEW, "tests/test_a.py": "2\n"}, "First")
    git({"p/a.py": NEW.replace("3 *", "4 *"), "tests/test_a.py": "3\n"}, "Second")
    assert [reverted.note.split(": ")[1] for reverted in revert_commits(tmp_path)] == ["Second", "First"]
    assert [reverted.note.split(": ")[1] for reverted in revert_commits(tmp_path, limit=1)] == ["Second"]


def test_settings_of_the_repository_run_nothing(git, tmp_path, monkeypatch):
    git({"p/a.py": NEW, "tests/test_a.py": "2\n"}, "f: absolute value")
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\n")
    trap.chmod(0o755)
    with open(tmp_path / ".git" / "config", "a") as config:
        config.write(f"[core]\n\tfsmonitor = {trap}\n\tpager = {trap}\n\tsshCommand = {trap}\n")
        config.write(f"[diff]\n\texternal = {trap}\n[gpg]\n\tprogram = {trap}\n[log]\n\tshowSignature = true\n")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(trap))
    assert len(list(revert_commits(tmp_path))) == 1
    assert not (tmp_path / "sprung").exists()


def test_a_folder_inside_a_repository_is_refused(git, tmp_path):
    with pytest.raises(UserError, match="is not a git repository with a commit; give the folder that holds .git"):
        list(revert_commits(tmp_path / "p"))
