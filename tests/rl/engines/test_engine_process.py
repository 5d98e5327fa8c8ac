"""EngineProcess, with small programs in place of launch.serve."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_jax.errors import UserError
from composer_jax.rl.engines import engine_process
from composer_jax.rl.engines.engine_process import EngineCommand, EngineEnded, EngineProcess

TOKEN = "a token of the tests"
SERVES = """
import sys, time
flags = dict(flag.split("=", 1) for flag in sys.argv[1:])
print(open(flags["--token_file"]).read(), *sys.argv[1:], file=sys.stderr)
print("m listens on http://h:1/ (context), for learners on 127.0.0.1:4321", file=sys.stderr, flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "weights" / "version-00000003").mkdir(parents=True)
    (tmp_path / "weights" / "version-00000003" / "manifest.json").write_text("{}")
    return str(tmp_path / "weights")


def process(folder, code):
    return EngineProcess(EngineCommand(folder, ("--slots=4",), TOKEN, ("-c", code)), "127.0.0.1")


def test_an_engine_says_its_address_and_its_token_is_in_no_command_line(folder, capsys):
    engine = process(folder, SERVES)
    assert engine.start() == "127.0.0.1:4321"
    token, *flags = capsys.readouterr().err.splitlines()[0].removeprefix(TOKEN).split()
    assert token == f"--checkpoint=patches:{folder}" and TOKEN not in flags
    flags = dict(flag.split("=", 1) for flag in flags)
    assert flags["--host"] == "127.0.0.1" and flags["--port"] == flags["--engine_port"] == "0"
    assert flags["--slots"] == "4" and len(flags["--api_key"]) == 64
    assert not os.path.exists(flags["--token_file"]), "it stays no longer than it is read"
    os.kill(engine._process.pid, signal.SIGKILL)
    with pytest.raises(EngineEnded, match="exit code -9: m listens"):
        engine.wait()


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        ("import sys; sys.stderr.write('\\nlaunch.serve: no room.\\n'); sys.exit(2)", UserError, "^no room.$"),
        ("raise ValueError('broken')", EngineEnded, "its process has ended with exit code 1: ValueError: broken"),
        ("", EngineEnded, "exit code 0: it has said nothing"),
    ],
    ids=["refused", "failed", "ended"],
)
def test_an_engine_that_does_not_serve_says_why(folder, code, error, says):
    with pytest.raises(error, match=says):
        process(folder, code).start()


def test_a_folder_that_the_node_does_not_see_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_process, "VISIBLE_S", 0.1)
    says = f"127.0.0.1 reads no version .* rl.publish={tmp_path} .it has none.; use a folder or URL that all nodes"
    with pytest.raises(UserError, match=says):
        process(str(tmp_path), SERVES).start()
    with pytest.raises(UserError, match="rl.publish=nowhere://x .UserError: nowhere://x is neither"):
        process("nowhere://x", SERVES).start()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends a process with its parent")
def test_an_engine_ends_with_the_process_that_has_started_it(folder):
    code = (
        "import sys, time; from tests.rl.engines.test_engine_process import process, SERVES\n"
        "engine = process(sys.argv[1], SERVES); engine.start(); print(engine._process.pid, flush=True); time.sleep(600)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    parent = subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid):
    """Whether there is such a process that has not ended; nobody may have waited for one that has."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
