"""Sandboxes that are killed from outside while episodes are played: the benchmark in short."""

import asyncio
import tempfile

import pytest

from benchmarks import episodes
from tests.many import many


@pytest.mark.parametrize(("count", "share"), [(80, 0.2), pytest.param(many(1200), 0.1, marks=pytest.mark.slow)])
def test_every_episode_ends_once_and_nothing_is_left(tmp_path, monkeypatch, count, share):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = asyncio.run(episodes.measure(count, share, tmp_path))
    assert (found["events"], found["not_once"], found["stray"]) == (count, {}, [])
    assert found["solved"] == count - found["infrastructure"] - found["killed_sandbox"]
    assert found["killed_sandbox"] <= count * share / 10  # two crashes under the same command
    assert found["infrastructure"] <= count // 100  # three sandboxes in a row, three times in a row
    assert found["crashes"] >= 0.7 * share * count  # at the end some are still owed
