"""`python -m launch.sandbox`: without --write-back nothing changes, with it nothing outside of the folder does."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_jax.sandbox import Change, SandboxFileError, SandboxLimits, cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of somebody's, beside which lies what is not to be touched."""
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "a.txt").write_text("a\n")
    (root / "run.sh").write_text("echo run\n")
    (root / "run.sh").chmod(0o755)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("outside\n")
    (root / "link").symlink_to(outside / "file")
    (root / "linked").symlink_to(outside)
    return root


def state(folder: Path) -> dict[str, tuple]:
    """Everything in it, with modes, owners and times."""
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[path.relative_to(folder).as_posix()] = (status.st_mode, status.st_uid, status.st_mtime_ns, content)
    return found


COMMANDS = {
    "overwrite": "echo x > run.sh; echo x >> src/a.txt",
    "remove": "rm -rf src link linked run.sh /workspace/* /workspace",
    "through_a_link": "echo x > link; echo x > linked/file; echo x > linked/new; true",
    "through_a_new_link": "rm -r src; ln -s {outside} src; echo x > src/file; true",
    "through_a_link_upwards": "ln -s .. up; echo x > up/outside/file; true",
    "by_the_path_of_the_host": "echo x > {folder}/run.sh; echo x > {outside}/file; true",
    "by_hard_links": "ln run.sh twin; echo x > twin; ln -L link other; true",
    "modes": "chmod -R 0 .; chmod 777 /workspace; true",
    "times": "touch -d 2001-01-01 . run.sh src/a.txt; true",
    "open_descriptors": "exec 3<>run.sh 4>>src/a.txt; rm run.sh; echo x >&3; echo x >&4;"
    " for f in /proc/self/fd/*; do echo x > $f; done; true",
    "descriptors_of_the_worker": "for f in /proc/1/fd/* /proc/1/cwd/run.sh /proc/1/root/workspace/run.sh;"
    " do echo x > $f; done; true",
    "shared_memory": "python -c \"import mmap; m = mmap.mmap(open('run.sh', 'r+b').fileno(), 0); m[0] = 42\"",
    "a_job_left_behind": "setsid sh -c 'while :; do echo x >> run.sh; done' & true",
    "special_files": "rm run.sh; mkfifo run.sh; python -c \"import socket; socket.socket(socket.AF_UNIX).bind('s')\"",
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("write_back", [False, True], ids=["without_write_back", "with_write_back"])
def test_a_command(host, folder, tmp_path, command, write_back):
    outside = tmp_path / "outside"
    before, beside = state(folder), state(outside)
    script = command.format(folder=folder, outside=outside)
    result = asyncio.run(cli.run_command(["sh", "-c", script], folder, SandboxLimits(), write_back=write_back))
    assert result.outcome in ("ok", "nonzero"), result
    assert state(outside) == beside
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "project", "secret.txt"]
    if write_back:
        assert not [path for path in folder.rglob("*") if path.name.startswith(".composer-")]
    else:
        assert state(folder) == before


def test_that_commands_do_change_the_folder_when_they_may(host, folder):
    asyncio.run(cli.run_command(["sh", "-c", COMMANDS["overwrite"]], folder, SandboxLimits(), write_back=True))
    assert (folder / "run.sh").read_text() == "x\n" and (folder / "src" / "a.txt").read_text() == "a\nx\n"


PATHS = {
    "up": "../outside/file", "absolute": "/etc/x", "up_from_below": "src/../../outside/file",
    "by_a_link": "linked/file", "by_a_new_file": "linked/new/file", "zero": "a\0b", "nothing": "", "itself": ".",
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("kind", ["file", "link", "folder", "gone"])
def test_a_report_that_lies(host, folder, tmp_path, path, kind):
    """Even if a worker were taken over, the host writes only below the folder."""
    before, beside = state(folder), state(tmp_path / "outside")
    with pytest.raises(SandboxFileError, match="writing back stopped"):
        cli.apply_changes(folder, {path: Change(kind, b"/etc/passwd", 0o4777)}, SandboxLimits())
    assert (state(folder), state(tmp_path / "outside")) == (before, beside)


def test_a_report_that_makes_a_link_and_then_goes_through_it(host, folder, tmp_path):
    beside = state(tmp_path / "outside")
    changes = {"new": Change("link", str(tmp_path / "outside").encode()), "new/file": Change("file", b"x")}
    with pytest.raises(SandboxFileError, match="symbolic link"):
        cli.apply_changes(folder, changes, SandboxLimits())
    assert state(tmp_path / "outside") == beside


def test_a_mode_that_would_give_rights_away_is_cut(host, folder):
    cli.apply_changes(folder, {"x": Change("file", b"x", 0o6777), "d": Change("folder", b"", 0o7777)}, SandboxLimits())
    assert (folder / "x").stat().st_mode & 0o7000 == (folder / "d").stat().st_mode & 0o7000 == 0


def test_a_person_at_a_terminal(host, folder):
    """The entry point itself, once: the other tests call what it calls."""
    before = state(folder)
    command = [sys.executable, "-m", "launch.sandbox", f"--workspace={folder}", "--", "sh", "-c", COMMANDS["remove"]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 1 and "/workspace" in done.stderr, done
    assert state(folder) == before
