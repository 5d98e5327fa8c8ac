"""Full queues, failing disks and killed servers drop whole sessions, and answers go on."""

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.serve.traffic.writer import TrafficLimits
from tests.serve.test_control import wait_until
from tests.serve.traffic.conftest import offer, open_request, stored
from tests.stages.base_model import write_base

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def locked(folder):
    """Holds the database's lock, as a disk does that takes no write."""
    with contextlib.closing(sqlite3.connect(folder / "traffic.sqlite", isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("ROLLBACK")


def test_a_full_queue_drops_the_whole_session_and_counts_it(served, text, folder):
    limits = TrafficLimits(queue_turns=3, flush_seconds=0.01)
    with served(lambda context: [9, *text.end_tokens[:1]], limits=limits) as (server, writer):
        server.ask([1, 2], "long")
        server.ask([1, 2], "other")
        wait_until(lambda: writer.counts.written_turns == 2)
        with locked(folder):
            server.ask([1, 2], "first")  # the writer waits with it for the lock
            wait_until(lambda: writer.queue_length == 1 and not writer._queue)
            for i in range(4):
                server.ask([1, 2, i], "long")
            assert writer.counts.dropped_sessions == 1
        wait_until(lambda: TrafficFolder(folder).is_forgotten("long"))
        server.ask([1, 2, 9], "long")
        wait_until(lambda: writer.counts.refused_turns == 5)
        metrics = server.client.get("/metrics").text
        assert "composer_traffic_dropped_sessions_total 1.0" in metrics
        assert "composer_traffic_written_turns_total 3.0" in metrics and "composer_traffic_queue 0.0" in metrics
    assert {*stored(folder)} == {"other", "first"}


def test_a_queue_of_too_many_bytes_drops_too(served, text, folder):
    with served(lambda context: [9, *text.end_tokens[:1]], limits=TrafficLimits(queue_bytes=20_000)) as (
        server,
        writer,
    ):
        server.ask([1] * 1000, "large")
        assert writer.counts.dropped_sessions == 1
        server.ask([1], "small")
    assert {*stored(folder)} == {"small"}


def test_a_database_that_stays_locked_drops_sessions_and_answers_go_on(served, text, folder, monkeypatch):
    monkeypatch.setattr("composer_jax.serve.traffic.events.BUSY_SECONDS", 0.05)
    monkeypatch.setattr("composer_jax.serve.traffic.writer.RETRY_SECONDS", 0.05)
    limits = TrafficLimits(flush_seconds=0.01, busy_seconds=0.05)
    with served(lambda context: [9, *text.end_tokens[:1]], limits=limits) as (server, writer):
        server.ask([1, 2], "before")
        wait_until(lambda: writer.counts.written_turns == 1)
        with locked(folder):
            for i in range(5):
                server.ask([1, 2], f"during {i}")
            answer = server.events({"id": "a", "kind": "follow_up"}, session="before")
            assert answer.status_code == 503 and writer.counts.refused_events == 1
            wait_until(lambda: writer.counts.dropped_sessions == 5)
        wait_until(lambda: not writer._dropping)
        server.ask([1, 2], "during 0")
        server.ask([1, 2], "after")
        assert server.events({"id": "a", "kind": "follow_up"}, session="before").status_code == 200
    assert {*stored(folder)} == {"before", "after"}


def test_a_turn_that_cannot_be_decoded_drops_its_session_only(text, new_writer, folder, monkeypatch):
    writer, decode = new_writer(), text.tokenizer.decode

    def fail(ids):
        if 7 in ids:
            raise ValueError("no such token")
        return decode(ids)

    monkeypatch.setattr(text.tokenizer, "decode", fail)
    offer(writer, "bad", prompt=[7])
    offer(writer, "good")
    wait_until(lambda: writer.counts.written_turns == 1)
    offer(writer, "bad")
    writer.close()
    assert {*stored(folder)} == {"good"} and TrafficFolder(folder).is_forgotten("bad")


def test_an_answer_that_ends_after_the_writer_drops_its_session(new_writer, folder):
    writer = new_writer()
    request = open_request(writer, "s")
    offer(writer, "s")
    offer(writer, "other")
    writer.close()
    assert {*stored(folder)} == {"s", "other"}
    offer(writer, "s", request=request)
    assert {*stored(folder)} == {"other"}
    new_writer(file="").close()
    assert TrafficFolder(folder).is_forgotten("s")


FULL = """
import json, resource, sys
from starlette.testclient import TestClient
from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.serve.app import new_app
from composer_jax.serve.service import ServerLimits, Service
from composer_jax.serve.traffic import writer as writing
from tests.serve.scripted_engine import ScriptedEngine

base, folder, policy = sys.argv[1:]
writing.RETRY_SECONDS = 0.0
text = open_checkpoint("hf:" + base).text
limits = writing.TrafficLimits(flush_seconds=0.001, batch_turns=2)
traffic = writing.TrafficWriter(folder, policy, text, limits=limits)
engine = ScriptedEngine(lambda context: [9, *text.end_tokens[:1]], text.end_tokens)
def ask(session):
    headers = {"X-Session-ID": session, "X-Consent": "training"}
    answer = client.post("/v1/completions", json={"prompt": [1] * 2000, "max_tokens": 4}, headers=headers)
    assert answer.status_code == 200, answer.text
with TestClient(new_app(Service(engine, text.named("m"), ServerLimits(), None, traffic)), "http://127.0.0.1") as client:
    ask("before")
    while traffic.counts.written_turns < 1: pass
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    for i in range(20): ask(f"during {i}")
    while traffic.counts.dropped_sessions < 20: pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    while traffic._dropping: pass
    ask("after")
print(json.dumps(vars(traffic.counts)))
"""


def test_a_full_disk_drops_sessions_and_answers_go_on(tmp_path, folder, policy_file):
    base = write_base(tmp_path / "small")
    command = [sys.executable, "-c", FULL, str(base), str(folder), policy_file()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, text=True)
    assert done.returncode == 0, done.stderr
    assert '"written_turns": 2, "dropped_sessions": 20' in done.stdout
    assert done.stderr.count("sessions are dropped") <= 2, "one sentence for each cause"
    assert {*stored(folder)} == {"before", "after"}
