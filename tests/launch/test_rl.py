"""launch.rl with workers: its flags, and the same run as without them."""

import contextlib
import socket
import subprocess
import sys
import time

import pytest

from composer_jax.errors import UserError
from composer_jax.observe.metrics import read_metrics
from composer_jax.rl.workers.pool import PoolOptions
from launch import flags, rl
from launch.host_port import parse_host_port
from tests.stages.command_line import ROOT, finish, start

SMOKE = ["--config=configs/tiny.py:smoke", "--workdir=w"]


def options_of(*arguments):
    define = flags._with(flags._define_run, rl.define_options)
    values, _ = flags.parse_flags(["launch/rl.py", *SMOKE, *arguments], define)
    with contextlib.ExitStack() as stack:
        return rl.worker_options(values.config, values, stack)


def test_the_flags_of_workers(tmp_path):
    assert options_of() is None
    token_file = tmp_path / "token"
    options = options_of("--listen=10.0.0.5:7411", f"--token_file={token_file}", "--local_episodes=3")
    assert options.pool == PoolOptions("10.0.0.5", 7411, local_episodes=3) and options.cluster is None
    assert options.token == token_file.read_text().strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--token_file=t"], "--token_file is about workers; give --listen or --cluster, too"),
        (["--local_episodes=1"], "--local_episodes is about workers"),
        (["--worker_patience=9"], "--worker_patience is about workers"),
        (["--listen=h:1"], "--listen needs --token_file"),
        (["--listen=h:1", "--token_file={}", "--local_episodes=-1"], "--local_episodes=-1 is negative"),
        (["--listen=h:1", "--token_file={}", "--worker_patience=0"], "--worker_patience=0 ends the run at once"),
        (["--listen=h", "--token_file={}"], "--listen=h is not an address; use HOST:PORT"),
        (["--cluster=nonsense"], "--cluster=nonsense (is no address of a Ray cluster|needs Ray)"),
    ],
)
def test_bad_flags_of_workers(tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        options_of(*(argument.format(tmp_path / "token") for argument in arguments))


def test_addresses():
    assert parse_host_port("a.b:7", "f") == ("a.b", 7)
    assert parse_host_port(":7", "f") == ("", 7)
    assert parse_host_port("[::1]:7", "f") == ("::1", 7)
    for text in ("a", "a:", "a:b", "a:70000", "::1:7", "a:-1"):
        with pytest.raises(UserError, match="is not an address; use HOST:PORT"):
            parse_host_port(text, "f")


def worker_of(address, token) -> subprocess.Popen:
    command = [sys.executable, "-m", "launch.worker", f"--connect={address}", token, "--episodes=4"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_run_with_workers_trains_the_batches_of_one_without(tmp_path):
    """The engine is real; the episodes of one run play in this machine's trainer, those of the other in two workers."""
    cache = tmp_path / "xla"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    token = f"--token_file={tmp_path / 'token'}"
    config = [
        "--config=tests/stages/smoke_config.py:smoke",
        "--config.stages=('rl',)",
        "--config.rl.deterministic=True",
    ]
    alone = finish(start(tmp_path / "alone", *config, cache=cache, entry="launch.rl"), 300)
    assert alone.returncode == 0, alone.stderr
    trainer = start(tmp_path / "workers", *config, f"--listen={address}", token, cache=cache, entry="launch.rl")
    workers = []
    try:
        while not (tmp_path / "token").exists():
            assert trainer.poll() is None, trainer.communicate()[1]
            time.sleep(0.1)
        workers = [worker_of(address, token) for _ in range(2)]
        with_workers = finish(trainer, 300)
        assert with_workers.returncode == 0, with_workers.stderr
        assert [finish(worker, 60).returncode for worker in workers] == [0, 0]
    finally:
        for process in (trainer, *workers):
            process.kill()
    batches = [(tmp_path / name / "batches.jsonl").read_bytes() for name in ("alone", "workers")]
    assert batches[0] and batches[0] == batches[1]
    records = [(tmp_path / name / "episodes" / "rl.jsonl").read_bytes() for name in ("alone", "workers")]
    assert records[0] and records[0] == records[1]
    suites = [read_metrics(tmp_path / name / "metrics" / "evaluate_rl.jsonl") for name in ("alone", "workers")]
    assert [len(rows) for rows in suites] == [1, 1], "the suite after step 2"
    for column in ("step", "version", "pass_at_1_bugfix", "tokens_bugfix", "lost_bugfix"):
        assert suites[0][0][column] == suites[1][0][column], column
