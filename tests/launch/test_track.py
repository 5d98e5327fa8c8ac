"""`python -m launch.track`, as a person starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import hosts, track
from tests.launch.in_process import run_here

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / "repository"
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / "a.py").write_text("first = call(1)\n")
    return root


@pytest.fixture
def launch(capsys, repository):
    """(exit code, stdout, stderr) of a command line."""

    def run(*words):
        words = (f"--repository={repository}", *words)
        return run_here(capsys, track, *words, arguments="COMMAND", processes=hosts.NO_DEVICES)

    return run


SERVER = "--server=http://127.0.0.1:9"


def test_start_test_stop_check_status(launch, repository):
    assert launch("--session=s", SERVER, "start")[:2] == (
        0,
        f"session s: started; {repository} is remembered as it is\n",
    )
    (repository / "a.py").write_text("first = call(1)\nsecond = call(2)\n")
    assert launch("--session=s", "test", "--", "sh", "-c", "exit 4")[0] == 4
    code, out, _ = launch("--session=s", "stop")
    assert code == 0 and "1 lines added and 0 deleted in 1 files" in out and "cannot be reached" in out
    assert launch("--session=s", "check")[0] == launch("check")[0] == 0
    assert "1 events wait" in launch("status")[1]
    assert launch("install_hook")[0] == launch("remove_hook")[0] == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "a command is missing"),
        (["--session=s", SERVER, "run"], "a command is missing"),
        (["--session=s", "test"], "a test command is missing"),
        (["start"], "--session is missing"),
        (["--session=s", "start"], "--server= is not an address"),
        (["--session=s", "stop"], "start it first"),
        (["--session=s", SERVER, "start", "now"], "unexpected argument 'now' after start"),
        (["--session=s", SERVER, "--", "no-such-agent"], "there is no program 'no-such-agent'"),
        (["--sesion=s", "start"], "sesion"),
    ],
)
def test_bad_input(launch, words, sentence):
    code, _, err = launch(*words)
    assert code == 2 and sentence in err and len(err.strip().splitlines()) == 1


def test_the_agents_command_and_ctrl_c(repository):
    """In a process of its own, which gets the signal while it follows."""
    command = ["sh", "-c", f"echo 'second = call(2)' >> {repository}/a.py"]
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.track", f"--repository={repository}", "--session=s", SERVER, "--", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    assert "1 lines added" in lines[1] and "followed for a day" in lines[2]
    process.terminate()
    process.communicate()
    assert process.returncode == 130
