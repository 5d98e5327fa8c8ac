"""What a stage used: all attempts at it, also one that was killed without a chance to say so."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from composer_jax.errors import UserError
from composer_jax.stages import usage as usage_module
from composer_jax.stages.usage import peak_rss_gb, track_usage

ATTEMPT = """
import pathlib, sys, time
from composer_jax.stages import usage
usage.EVERY_S = 0.05
with usage.track_usage(pathlib.Path(sys.argv[1])):
    grown = bytearray(200_000_000)
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    print("counting", flush=True)
    time.sleep(60)
"""


def test_a_killed_attempt_is_counted(tmp_path):
    path = tmp_path / "stages" / "rl.used"
    attempt = subprocess.Popen([sys.executable, "-c", ATTEMPT, str(path)], stdout=subprocess.PIPE, text=True)
    assert attempt.stdout.readline() == "counting\n"
    while (found := json.loads(path.read_text()))["seconds"] < 0.3:
        assert attempt.poll() is None
    attempt.send_signal(signal.SIGKILL)
    assert attempt.wait(20) == -signal.SIGKILL
    with track_usage(path) as usage:
        assert usage()["seconds"] > found["seconds"] >= 0.3
        assert usage()["peak_rss_gb"] >= max(found["peak_rss_gb"], 0.2)
    assert json.loads(path.read_text())["seconds"] > found["seconds"]


def test_the_largest_of_all_attempts_is_kept(tmp_path):
    path = tmp_path / "rl.used"
    path.write_text('{"seconds": 7.0, "peak_rss_gb": 1000.0}')
    with track_usage(path) as usage:
        assert usage()["peak_rss_gb"] == 1000.0 and usage()["seconds"] >= 7.0
    assert json.loads(path.read_text())["peak_rss_gb"] == 1000.0


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")])
def test_what_went_wrong_is_what_is_raised_even_if_the_account_cannot_be_written(tmp_path, monkeypatch, error):
    def full(path, data):
        raise UserError("disk full")

    monkeypatch.setattr(usage_module, "write_atomically", full)
    with pytest.raises(type(error) if isinstance(error, Exception) else error), track_usage(tmp_path / "rl.used"):
        raise error
    with pytest.raises(UserError, match="disk full"), track_usage(tmp_path / "rl.used"):
        pass


def test_the_first_attempt_starts_at_zero(tmp_path):
    with track_usage(tmp_path / "stages" / "sft.used") as usage:
        assert 0 <= usage()["seconds"] < 5 and usage()["peak_rss_gb"] >= peak_rss_gb() * 0.99 > 0
    assert os.listdir(tmp_path / "stages") == ["sft.used"]
