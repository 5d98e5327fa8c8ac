"""POST /events: what is stored, once, and what is refused or bounded."""

import httpx2 as httpx
import pytest

from composer_jax.serve.traffic import events as events_module
from composer_jax.serve.traffic.events import MOST_AGE, RATES, EventBody, EventLog
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.serve.traffic.records import EVENT_FIELDS
from tests.serve.traffic.conftest import stored

VALUES = {"hashes": ["0" * 64], "count": 3, "seconds": 600, "integer": -1}


def payload_of(kind):
    return {name: VALUES.get(form, form.split("|")[0]) for name, form in EVENT_FIELDS[kind].items()} | (
        {"value": -1} if kind == "thumb" else {}
    )


def event(i, kind="follow_up", **fields):
    return {"id": f"e{i}", "kind": kind, "payload": payload_of(kind) if kind in EVENT_FIELDS else {}, **fields}


@pytest.fixture
def open_server(served, text):
    with served(lambda context: [9, *text.end_tokens[:1]], api_keys=("k1", "k2")) as (server, writer):
        server.answer = server.ask([1, 2], "s", key="k1")["id"]
        yield server, writer


def test_every_kind_is_stored_once_and_at_once(open_server, folder):
    server, _ = open_server
    rows = [event(i, kind, turn=server.answer) for i, kind in enumerate(EVENT_FIELDS)]
    assert server.events(*rows, key="k1").json() == {"stored": len(rows)}  # the turn may still wait to be written
    assert server.events(*rows[:3], event(99), key="k1").json() == {"stored": 1}
    server.client.close()
    written = TrafficFolder(folder).read("s").events
    assert [(one.id, one.kind, one.payload) for one in written[: len(rows)]] == [
        (row["id"], row["kind"], row["payload"]) for row in rows
    ]
    assert len(written) == len(rows) + 1 and written[0].turn == server.answer


def test_events_belong_to_the_key_of_the_session(open_server, folder):
    server, _ = open_server
    other = server.events(event(0), key="k2")
    unknown = server.events(event(0), session="t", key="k1")
    mixed = server.post("/events", {"events": [{**event(1), "session": "s"}, {**event(1), "session": "t"}]}, key="k1")
    assert [answer.status_code for answer in (other, unknown, mixed)] == [403, 404, 404]
    assert server.events(event(0)).status_code == 401
    assert stored(folder)["s"].events == [], "all or none"


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "liked"},
        {"payload": {"text": "def f(): ..."}},
        {"kind": "thumb", "payload": {"value": 2}},
        {"kind": "thumb", "payload": {}},
        {"kind": "thumb", "payload": {"value": "1"}},
        {"kind": "session_closed", "payload": {"reason": ["user"]}},
        {"kind": "accepted", "payload": {"hunks": ["my code"]}},
        {"kind": "accepted", "payload": {"hunks": ["ab12"] * 1001}},
        {"kind": "commit", "payload": {"added_kept": -1}},
        {"kind": "commit", "payload": {"added_kept": True}},
        {"kind": "tests_run", "payload": {"exit_code": 0.5, "phase": "before"}},
        {"id": "a@b.org"},
        {"id": ""},
        {"turn": "the second one"},
        {"age": "long"},
        {"time": 3},
    ],
)
def test_an_event_of_another_form_is_refused(open_server, fields):
    answer = open_server[0].events(event(0, **fields), key="k1")
    assert answer.status_code == 400 and answer.json()["error"]["message"].endswith(".")


@pytest.mark.parametrize("count", [0, 101])
def test_a_request_has_between_one_and_a_hundred_events(open_server, count):
    assert open_server[0].events(*map(event, range(count)), key="k1").status_code == 400


def test_a_burst_of_ten_thousand_is_bounded(open_server, folder):
    server, _ = open_server
    statuses = [server.events(*map(event, range(i, i + 100)), key="k1").status_code for i in range(0, 10_000, 100)]
    assert statuses[:5] == [200] * 5 and statuses.count(429) > 80
    assert server.ask([1, 2], "t", key="k2")["choices"]
    assert 500 <= len(stored(folder)["s"].events) < 2000


def test_rates_are_per_server_key_and_session():
    now = [0.0]
    limit = events_module.RateLimit(lambda: now[0])
    for kind, (burst, rate) in RATES.items():
        limit.take(kind, "a", burst)
        limit.take(kind, "b", 1)
        with pytest.raises(events_module.ApiError, match=f"more than {burst}"):
            limit.take(kind, "a", 1)
        now[0] += 1.0
        limit.take(kind, "a", int(rate))
        with pytest.raises(events_module.ApiError):
            limit.take(kind, "a", 1)
        now[0] -= 100.0  # a clock that goes backwards gives nothing
        with pytest.raises(events_module.ApiError):
            limit.take(kind, "a", 1)


def test_a_key_that_sends_too_much_takes_nothing_from_others(open_server):
    server, writer = open_server
    server.service.events.limit = events_module.RateLimit(lambda: 0.0)
    server.ask([1, 2], "t", key="k2")
    for _ in range(RATES["server"][0] // 100):
        server.events(*map(event, range(100)), session="t", key="k2")
    assert server.events(event(0), key="k1").status_code == 200


def test_large_events_count_for_more(open_server):
    server, _ = open_server
    server.service.events.limit = events_module.RateLimit(lambda: 0.0)
    large = [event(i, "shown", payload={"hunks": ["0" * 64] * 1000}) for i in range(5)]
    assert [server.events(one, key="k1").status_code for one in large] == [200] * 4 + [429]


def test_a_session_holds_a_bounded_number_of_events(open_server, monkeypatch):
    monkeypatch.setattr(events_module, "MOST_SESSION_EVENTS", 3)
    server, _ = open_server
    assert server.events(event(0), event(1), key="k1").status_code == 200
    assert server.events(event(2), event(3), key="k1").status_code == 409
    large = event(2, "shown", payload={"hunks": ["0" * 64] * 10})
    assert server.events(large, key="k1").status_code == 409
    assert server.events(event(2), key="k1").status_code == 200


def test_ages_are_capped(served, text, folder, new_writer):
    start = 1e9
    writer = new_writer(clock=lambda: start)
    now = start + 10 * MOST_AGE
    with served(lambda context: [9, *text.end_tokens[:1]], writer=writer) as (server, _):
        server.ask([1], "s", key="k")
        log = EventLog(writer, clock=lambda: now)
        ages = {"none": 0, "hour": 3600, "future": -500, "forged": 1e15}
        rows = [
            EventBody(id=name, session="s", kind="undo", age=age, payload={"hunks": []}) for name, age in ages.items()
        ]
        assert log._add("k", rows) == 4
        log._clock = lambda: start + 60
        assert log._add("k", [EventBody(id="before", session="s", kind="follow_up", age=3600)]) == 1
        log.close()
    times = {one.id: one.time for one in stored(folder)["s"].events}
    assert times == {
        "none": now, "hour": now - 3600, "future": now, "forged": now - MOST_AGE, "before": start
    }  # fmt: skip


def test_a_server_without_traffic_takes_no_events(scripted, text):
    with scripted(lambda context: []) as (url, _):
        answer = httpx.post(f"{url}/events", json={"events": [{**event(0), "session": "s"}]})
        assert answer.status_code == 403 and "--traffic" in answer.json()["error"]["message"]
