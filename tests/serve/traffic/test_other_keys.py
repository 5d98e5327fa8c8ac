"""Sessions of two keys under one id, and requests without consent while other turns run or wait."""

import asyncio
import contextlib
import json

import pytest

from composer_jax.serve.traffic.database import open_database
from composer_jax.serve.traffic.events import EventBody, EventLog
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.serve.traffic.writer import TrafficLimits
from tests.serve.test_control import wait_until
from tests.serve.traffic.conftest import offer, open_request, stored
from tests.serve.traffic.test_dropped_sessions import locked


def close_as_killed(writer, folder):
    """Ends a writer so that the folder says that it was killed."""
    writer.close()
    with contextlib.closing(open_database(folder)) as database, database:
        database.execute("UPDATE runs SET closed = 0 WHERE run = ?", (writer.run,))


def test_another_key_does_not_drop_a_session_after_a_kill(new_writer, folder):
    writer = new_writer()
    offer(writer, "s")
    close_as_killed(writer, folder)
    writer = new_writer(file="")
    offer(writer, "s", key="other")
    writer.close()
    assert len(stored(folder)["s"].turns) == 1 and writer.counts.dropped_sessions == 0
    writer = new_writer(file="")
    offer(writer, "s", [1, 2, 3])
    writer.close()
    assert stored(folder) == {}, "its own key goes on with it after the kill"


def test_a_session_with_a_turn_that_a_kill_may_have_lost_is_dropped(new_writer, folder):
    writer = new_writer()
    offer(writer, "s")
    writer.close()
    close_as_killed(new_writer(file=""), folder)  # with an answer of "s" that had not ended
    writer = new_writer(file="")
    offer(writer, "new")
    offer(writer, "s", [1, 2, 9, 8, 3])
    writer.close()
    assert {*stored(folder)} == {"new"} and TrafficFolder(folder).is_forgotten("s")


@pytest.mark.parametrize("failure", ["full", "disk", "late"])
def test_a_turn_of_another_key_that_is_lost_drops_nothing(new_writer, folder, failure, monkeypatch):
    monkeypatch.setattr("composer_jax.serve.traffic.writer.RETRY_SECONDS", 0.05)
    writer = new_writer(
        TrafficLimits(flush_seconds=0.01, busy_seconds=0.05 if failure == "disk" else 5.0, queue_turns=2)
    )
    offer(writer, "s")
    wait_until(lambda: writer.counts.written_turns == 1)
    if failure == "late":
        request = open_request(writer, "s", key="other")
        writer.close()
        offer(writer, "s", request=request)
    else:
        with locked(folder):
            for i in range(1 if failure == "disk" else 4):
                offer(writer, "s", [1, 2, i], key="other")
            wait_until(lambda: writer.counts.dropped_sessions == 1)
        wait_until(lambda: not writer._dropping)
        offer(writer, "s", [1, 2, 9, 8, 3])
        writer.close()
    assert len(stored(folder)["s"].turns) == (1 if failure == "late" else 2)


def test_a_lost_turn_of_another_key_leaves_a_session_that_waits(new_writer, folder):
    writer = new_writer(TrafficLimits(flush_seconds=0.01, queue_turns=2, batch_turns=1))
    with locked(folder):
        offer(writer, "first")
        wait_until(lambda: writer._batch)
        offer(writer, "s")
        offer(writer, "s", key="other")  # it does not fit
    writer.close()
    assert {*stored(folder)} == {"first", "s"}


def test_a_request_without_consent_drops_while_a_turn_of_another_key_waits(new_writer, folder):
    writer = new_writer()
    offer(writer, "s")
    wait_until(lambda: writer.counts.written_turns == 1)
    with locked(folder):
        offer(writer, "s", key="other")
        assert open_request(writer, "s", consent="none") is None
    wait_until(lambda: TrafficFolder(folder).is_forgotten("s"))


def test_a_request_without_consent_drops_an_answer_that_still_runs(new_writer, folder):
    writer = new_writer()
    requests = {session: open_request(writer, session) for session in "ab"}
    assert open_request(writer, "a", consent="none") is open_request(writer, "b", consent="none", key="other") is None
    for session, request in requests.items():
        offer(writer, session, request=request)
        offer(writer, session, [1, 2, 9, 8, 3])
    requests["c"] = open_request(writer, "c")
    del requests["c"], request  # an answer that ended and is not written
    assert open_request(writer, "c", consent="none") is None
    offer(writer, "c")
    writer.close()
    assert {name: len(one.turns) for name, one in stored(folder).items()} == {"b": 2, "c": 1}
    assert TrafficFolder(folder).is_forgotten("a")


def test_a_request_without_consent_drops_a_stream_that_still_runs(served, text, folder):
    long = [*text.tokenizer.encode("word " * 20), *text.end_tokens[:1]]
    with served(lambda context: long, delay=0.01) as (server, writer):
        body = {"prompt": [1, 2], "max_tokens": 100, "stream": True}
        headers = {"X-Session-ID": "s", "X-Consent": "training"}
        with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            server.ask([1, 2, 9, 3], "s", "none")
            assert "data: [DONE]" in [*lines]
        server.ask([1, 2, 9, 3, 4], "s")
        server.ask([1, 2], "other")
        wait_until(lambda: writer.counts.written_turns == 1 and not writer._requests)
    assert {*stored(folder)} == {"other"} and TrafficFolder(folder).is_forgotten("s")


def test_events_find_the_turn_of_their_key_among_those_that_wait(new_writer, folder):
    writer = new_writer(TrafficLimits(flush_seconds=600.0))
    events = EventLog(writer)
    offer(writer, "s", key="other")
    offer(writer, "s")
    assert asyncio.run(events.add("k", [EventBody(id="e", session="s", kind="follow_up")])) == 1
    events.close()
    writer.close()
    assert len(stored(folder)["s"].turns) == 1 and writer.counts.refused_turns == 1


def test_every_turn_that_is_offered_is_counted(new_writer, folder):
    writer = new_writer(TrafficLimits(flush_seconds=0.01, queue_turns=2))
    offer(writer, "a")
    wait_until(lambda: writer.counts.written_turns == 1)
    with locked(folder):
        for i in range(4):  # the third does not fit
            offer(writer, "b", [1, 2, i])
    wait_until(lambda: not writer._dropping)
    offer(writer, "b", [1, 2, 3])
    offer(writer, "a", [1, 2, 9, 8, 3], key="other")
    writer.close()
    offer(writer, "a", [1, 2, 9, 8, 4])
    assert writer.counts.written_turns == 1 and writer.counts.refused_turns == 7
