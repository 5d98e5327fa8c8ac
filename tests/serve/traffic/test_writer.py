"""What a server writes of its answers."""

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import io
import json

import httpx2 as httpx
import jax
import numpy as np
import pytest

from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.realtime.batches.turn_tree import own_routes, session_transcript
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.sampler import Sampler
from composer_jax.serve.bodies import CompletionBody
from composer_jax.serve.service import Client, ServerLimits, Service
from composer_jax.serve.traffic.consent import TrafficHeaders
from composer_jax.serve.traffic.database import open_database
from composer_jax.serve.traffic.retention import forget
from composer_jax.serve.traffic.writer import TrafficLimits
from tests.serve.scripted_engine import ScriptedEngine
from tests.serve.test_control import wait_until
from tests.serve.traffic.conftest import QUICK, all_bytes, offer, open_request, stored
from tests.stages.base_model import NETWORK, weights


def path_of(turns, turn):
    """The prompt of a turn and its sampled ids, from the root."""
    parent = next((other for other in turns if other.id == turn.parent), None)
    return [*(path_of(turns, parent) if parent else []), *turn.suffix, *turn.tokens]


@pytest.fixture(scope="module")
def network(text):
    config = SamplerConfig(slots=4, max_model_len=512, decode_steps=4, prefill_shapes=((2, 32),), page_size=16)
    definition = ModelDef(dataclasses.replace(NETWORK, cache_routing=True))
    sampler = Sampler(
        definition,
        make_mesh(jax.devices()[:1]),
        config,
        end_tokens=text.end_tokens,
        decode=text.tokenizer.decode,
    )
    sampler.update(*weights(), version=7)
    sampler.warm_up(processed=True)
    return sampler


def test_a_conversation_with_a_network_is_stored_with_all_that_training_needs(served, network, folder, monkeypatch):
    starts, submit = [], network.submit
    monkeypatch.setattr(network, "submit", lambda asked: starts.append(asked.params.routing_start) or submit(asked))
    with served(None, engine=network, keeps_routing=True) as (server, _):
        server.client.headers["X-User-ID"] = "u"
        first = server.ask([1, 2, 3], temperature=0.7, seed=5)
        prompt = [1, 2, 3, *first["choices"][0]["token_ids"], 4, 5]
        second = server.ask(prompt, n=2, seed=9, logprobs=0)
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
        third = server.post("/v1/chat/completions", chat, **{"X-Turn-Type": "side"}).json()
        fourth = server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 5}, consent="evals").json()
    (session,) = stored(folder).values()
    assert [turn.answer for turn in session.turns] == [
        first["id"], second["id"], second["id"], third["id"], fourth["id"]
    ]  # fmt: skip
    root, *siblings, side, evals = session.turns
    assert root.parent == "" and root.suffix == [1, 2, 3] and root.tokens == first["choices"][0]["token_ids"]
    assert root.sampling["temperature"] == 0.7 and root.sampling["seed"] == 5 and root.versions == [7] * 8
    for turn, choice in zip(siblings, second["choices"], strict=True):
        assert turn.parent == root.id and turn.suffix == [4, 5] and turn.choice == choice["index"]
        assert turn.tokens == choice["token_ids"] and turn.raw_logprobs == choice["logprobs"]["token_logprobs"]
        assert path_of(session.turns, turn) == prompt + choice["token_ids"]
    assert side.kind == "side" and evals.consent == "evals" and evals.kind == "main" and side.parent == ""
    assert all(turn.template == root.template and turn.seconds > 0 for turn in session.turns)
    routes = [np.load(io.BytesIO(base64.b64decode(turn.routing))) for turn in session.turns]
    assert len(routes[0]) == 3 + 8 - 1 and len(routes[1]) == 2 + 8  # from the parent's last token on
    assert starts == [0, 3 + 8 - 1, 3 + 8 - 1, 0, 0], "the device reads the experts of new tokens only"


def test_every_id_of_a_row_has_the_experts_that_the_network_chose_for_it(served, network, folder):
    """Compared with those of the whole row as one prompt, also on a fork and after the history was shortened."""
    with served(None, engine=network, keeps_routing=True) as (server, _):
        first = [1, 2, 3]
        first += server.ask(first, seed=1)["choices"][0]["token_ids"]
        for seed, said in ((2, [4, 5]), (3, [6])):
            server.ask([*first, *said], seed=seed)
        server.ask([1, 2, 9, 9], seed=4)
    turns = stored(folder)["s"].turns
    rows = session_transcript(turns, {turn.id for turn in turns}, has_routes=True).rows()
    assert len(rows) == 3 and sum(int(row.trained.sum()) for row in rows) == sum(len(turn.tokens) for turn in turns)
    with served(None, engine=network, keeps_routing=True) as (server, _):
        for i, row in enumerate(rows):
            assert not len(row.tokens_without_routes())
            server.ask(row.tokens.tolist(), session=f"whole {i}", max_tokens=1)
    for i, row in enumerate(rows):
        (whole,) = stored(folder)[f"whole {i}"].turns
        expected = own_routes(whole)
        assert expected is not None and len(expected) == len(row.tokens)
        np.testing.assert_array_equal(row.routes[:-1], expected[:-1])
        ends = {tuple(turn.tokens): turn.logprobs for turn in turns}
        last = next(tokens for tokens in ends if row.tokens.tolist()[-len(tokens) :] == list(tokens))
        np.testing.assert_array_equal(row.logprobs[-len(last) :], np.float32(ends[last]))


def test_the_user_is_stored_by_hash_and_sessions_in_any_words(served, text, folder):
    names = ["../../etc/passwd", "a/b", "x" * 256, "s\xe9ssion \U0001f600", "'; DROP TABLE sessions; --"]
    with served(lambda context: [9, 8, *text.end_tokens[:1]]) as (server, _):
        for name in names:
            server.ask([1, 2], name, headers={"X-User-ID": "alice", "X-Repository": "secret-project"})
        assert server.post("/v1/completions", {"prompt": [1]}, "x" * 257).status_code == 400
        too_long = server.post("/v1/completions", {"prompt": [1]}, **{"X-User-ID": "y" * 100_000})
        assert 400 <= too_long.status_code < 500
    sessions = stored(folder)
    assert {*sessions} == {*names} and len({one.record.user for one in sessions.values()}) == 1
    assert not any(word in data for data in all_bytes(folder).values() for word in (b"alice", b"secret-project"))
    assert not (folder.parent / "etc").exists() and not any("a" == path.name for path in folder.rglob("*"))


def test_nothing_is_written_without_consent_or_session(served, text, folder, policy_file):
    with served(lambda context: [9, *text.end_tokens[:1]]) as (server, writer):
        server.ask([1, 2], "first")
        wait_until(lambda: writer.counts.written_turns == 1)
    before = all_bytes(folder)
    with served(lambda context: [9, *text.end_tokens[:1]]) as (server, writer):
        between = all_bytes(folder)
        for session, consent in (("t", "none"), ("t", ""), ("", "training")):
            server.ask([1, 2], session, consent)
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        assert server.post("/v1/chat/completions", body, "t", "").status_code == 200
        assert server.events({"id": "e", "kind": "undo", "payload": {"hunks": []}}, session="t").status_code == 404
        for name, value in (("X-Consent", "yes"), ("X-Turn-Type", "MAIN")):
            answer = server.post("/v1/completions", {"prompt": [1]}, consent="", **{name: value})
            assert answer.status_code == 400 and value in answer.json()["error"]["message"]
        assert all_bytes(folder) == between
    assert {*before} == {*all_bytes(folder)} and {*stored(folder)} == {"first"}


@pytest.mark.parametrize("waits", [True, False])
def test_a_session_is_dropped_by_a_request_of_its_key_without_consent(served, text, folder, waits):
    limits = TrafficLimits(flush_seconds=600.0) if waits else QUICK
    with served(lambda context: [9, *text.end_tokens[:1]], limits=limits, api_keys=("k1", "k2")) as (server, writer):
        for session in ("a", "b"):
            server.ask([1, 2], session, key="k1")
        wait_until(lambda: waits or writer.counts.written_turns == 2)
        server.ask([1, 2, 9, 3], "a", "none", key="k2")
        server.ask([1, 2, 9, 3], "b", "none", key="k1")
        wait_until(lambda: writer.counts.dropped_sessions == 1)
        for session in ("a", "b"):
            server.ask([1, 2, 9, 3, 9, 4], session, key="k1")
    assert {name: len(one.turns) for name, one in stored(folder).items()} == {"a": 2}


def test_sessions_name_the_text_that_users_agreed_to(served, text, folder, policy_file):
    for words in ("first", "second"):
        with served(lambda context: [9, *text.end_tokens[:1]], file=policy_file(consent_text=words)) as (server, _):
            server.ask([1, 2], words)
    hashes = {name: one.record.consent_text for name, one in stored(folder).items()}
    assert hashes == {name: hashlib.sha256(name.encode()).hexdigest()[:16] for name in ("first", "second")}


def test_what_is_not_stored_does_not_wait_in_memory(served, network, folder):
    with served(None, engine=network, limits=TrafficLimits(flush_seconds=600.0)) as (server, writer):
        server.ask([1, 2, 3], prompt_logprobs=5, logprobs=5)
        (turn,) = writer._queue
        assert turn.sample.tokens and turn.sample.prompt is None and turn.sample.top_logprobs is None


def test_an_organisations_flag_wins(served, text, folder, policy_file):
    keys = {key: hashlib.sha256(key.encode()).hexdigest() for key in ("k1", "k2")}
    organisations = {
        "strict": {"consent": "none", "keys": [keys["k1"]]},
        "measured": {"consent": "evals", "keys": [keys["k2"]]},
    }
    file = policy_file(organisations=organisations)
    with served(lambda context: [9, *text.end_tokens[:1]], file=file, api_keys=("k1", "k2", "k3")) as (server, _):
        for key in ("k1", "k2", "k3"):
            server.ask([1, 2], f"of {key}", key=key)
    sessions = stored(folder)
    assert {name: one.turns[0].consent for name, one in sessions.items()} == {"of k2": "evals", "of k3": "training"}
    assert sessions["of k2"].record.organisation == "measured"


def test_of_a_stream_that_was_cut_is_stored_what_the_user_was_sent(served, text, folder):
    long = text.tokenizer.encode("word " * 200)
    with served(lambda context: long, delay=0.02) as (server, writer):
        body = {"prompt": [1, 2], "max_tokens": 150, "stream": True, "return_token_ids": True}
        headers = {"X-Session-ID": "s", "X-Consent": "training"}
        seen = []
        with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            for line in answer.iter_lines():
                seen += json.loads(line[6:])["choices"][0]["token_ids"] if line.startswith("data: ") else []
                if len(seen) >= 6:
                    break
        wait_until(lambda: writer.counts.written_turns == 1)
        server.ask([1, 2, *stored(folder)["s"].turns[0].tokens, 7], max_tokens=3)
        with pytest.raises(httpx.TimeoutException):  # of an answer that is not streamed, nobody saw anything
            server.client.post("/v1/completions", json={**body, "stream": False}, headers=headers, timeout=0.1)
        wait_until(lambda: not server.client.get("/stats").json()["running"])
    cut, after = stored(folder)["s"].turns
    assert cut.finish_reason == "cancelled" and len(cut.tokens) == len(cut.logprobs) == len(cut.raw_logprobs)
    assert seen == cut.tokens[: len(seen)] == long[: len(seen)] and 6 <= len(cut.tokens) < 150
    assert after.parent == cut.id and after.suffix == [7] and after.finish_reason == "length"


def test_a_part_that_was_not_taken_is_not_stored(text, new_writer, folder):
    long, writer = text.tokenizer.encode("word " * 200), new_writer()
    service = Service(ScriptedEngine(lambda context: long, text.end_tokens), text, ServerLimits(), None, writer)
    client, body = Client("key", "s", TrafficHeaders("training")), CompletionBody(prompt=[1], max_tokens=90)

    async def take_three():
        choices = service.submit([[1]], body, client, "cmpl-0")
        events = service.stream(choices)
        parts = [(await anext(events))[1].tokens for _ in range(3)]
        while len(choices[0].handle.tokens) < 30:  # the engine goes on meanwhile
            await asyncio.sleep(0)
        await events.aclose()  # the third part was still being sent
        return parts

    parts = asyncio.run(take_three())
    writer.close()
    assert stored(folder)["s"].turns[0].tokens == parts[0] + parts[1] == long[: len(parts[0] + parts[1])]


def test_a_whole_stream_is_stored_whole(served, text, folder):
    long = [*text.tokenizer.encode("word " * 10), *text.end_tokens[:1]]
    with served(lambda context: long) as (server, _):
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}),
            ("/v1/responses", {"input": "x"}),
            ("/v1/completions", {"prompt": "x"}),
        ):
            assert server.post(path, body | {"stream": True}, session=path).status_code == 200
    sessions = stored(folder)
    assert {path: len(one.turns) for path, one in sessions.items()} == {
        "/v1/chat/completions": 2, "/v1/responses": 1, "/v1/completions": 1
    }  # fmt: skip
    turns = [turn for one in sessions.values() for turn in one.turns]
    assert all(turn.tokens == long and turn.finish_reason == "stop" for turn in turns)


def test_what_the_control_plane_aborts_is_stored_as_far_as_it_was_sent(served, text, folder):
    long = text.tokenizer.encode("word " * 200)
    with served(lambda context: long, delay=0.02) as (server, writer):
        body = {"prompt": [1, 2], "max_tokens": 150, "stream": True, "return_token_ids": True}
        headers, seen = {"X-Session-ID": "s", "X-Consent": "training"}, []
        with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            for line in answer.iter_lines():
                row = json.loads(line[6:]) if line.startswith("data: {") else {}
                seen += row["choices"][0]["token_ids"] if "choices" in row else []
                if len(seen) == 6:
                    server.service.abort_all()
    (turn,) = stored(folder)["s"].turns
    assert turn.tokens == seen and turn.finish_reason == "cancelled"


def test_sessions_that_left_the_memory_are_found_again(served, text, folder):
    limits = dataclasses.replace(QUICK, open_sessions=1)
    with served(lambda context: [9, *text.end_tokens[:1]], limits=limits) as (server, writer):
        for i in range(3):
            for session in "abc":
                server.ask([1, *([9, text.end_tokens[0], 3] * i)], session)
                wait_until(lambda n=writer.counts.written_turns: writer.queue_length == 0 and len(writer._open) <= 1)
    for one in stored(folder).values():
        assert [turn.parent for turn in one.turns] == ["", *(turn.id for turn in one.turns[:2])]


def test_a_session_belongs_to_the_key_that_opened_it(served, text, folder):
    with served(lambda context: [9, *text.end_tokens[:1]], api_keys=("k1", "k2")) as (server, writer):
        for key in ("k1", "k2", "k1"):
            server.ask([1, 2], key=key)
        wait_until(lambda: writer.counts.refused_turns == 1)
    assert len(stored(folder)["s"].turns) == 2


def test_a_session_of_two_users_is_dropped(served, text, folder):
    with served(lambda context: [9, *text.end_tokens[:1]]) as (server, writer):
        for session, user in (("a", ""), ("a", "alice"), ("b", "bob"), ("b", "bob")):
            server.ask([1, 2], session, headers={"X-User-ID": user})
        wait_until(lambda: writer.counts.dropped_sessions == 1)
    assert {*stored(folder)} == {"b"}


def test_files_of_a_day_are_bounded(served, text, folder, monkeypatch):
    monkeypatch.setattr("composer_jax.serve.traffic.turn_files.MOST_FILE_BYTES", 600)
    with served(lambda context: [9, *text.end_tokens[:1]]) as (server, writer):
        for i in range(6):
            server.ask([1, 2, i])
            wait_until(lambda n=i + 1: writer.counts.written_turns == n)
    assert len([*folder.glob("turns/*/*")]) >= 3 and len(stored(folder)["s"].turns) == 6


def test_nothing_is_locked_while_secrets_are_searched(text, new_writer, folder, monkeypatch):
    writer, decode, locks = new_writer(), text.tokenizer.decode, []

    def lock(ids):
        with contextlib.closing(open_database(folder, busy_seconds=0.0)) as database:
            database.execute("BEGIN IMMEDIATE")
        locks.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(text.tokenizer, "decode", lock)
    offer(writer, "s")
    writer.close()
    assert locks and {*stored(folder)} == {"s"} and writer.counts.dropped_sessions == 0


def test_what_is_forgotten_while_secrets_are_searched_is_not_written(text, new_writer, folder, monkeypatch):
    writer, decode = new_writer(), text.tokenizer.decode
    monkeypatch.setattr(text.tokenizer, "decode", lambda ids: (forget(folder, user="u"), decode(ids))[1])
    offer(writer, "s", user="u")
    writer.close()
    assert writer.counts.written_turns == 0 and not [*folder.glob("turns/*/*")]


def test_a_batch_ends_after_so_many_ids(text, new_writer, folder):
    writer = new_writer(dataclasses.replace(QUICK, flush_seconds=600.0, batch_turns=4, batch_ids=1000))
    for i in range(4):
        offer(writer, f"s{i}", prompt=[1] * 600)
    wait_until(lambda: writer.counts.written_turns == 4)  # without the wait of 600 s in between
    with contextlib.closing(open_database(folder)) as database:
        assert database.execute("SELECT count(DISTINCT start) FROM turns").fetchone() == (2,)


def test_a_fraction_of_the_sessions_is_written(served, text, folder, policy_file):
    file = policy_file(sampling_fraction=0.5)
    with served(lambda context: [9, *text.end_tokens[:1]], file=file) as (server, _):
        for i in range(40):
            for _ in range(2):
                server.ask([1, 2], f"s{i}")
    sessions = stored(folder)
    assert 5 < len(sessions) < 35 and all(len(one.turns) == 2 for one in sessions.values())


def test_a_clock_of_ones_own_tells_how_long_an_answer_took(new_writer, folder):
    """As that of simulated users, for whom an answer takes the same time on every machine."""
    now = [1e9]
    writer = new_writer(clock=lambda: now[0])
    request = open_request(writer, "one")
    now[0] += 12.5
    offer(writer, "one", request=request)
    writer.close()
    (turn,) = stored(folder)["one"].turns
    assert (turn.seconds, turn.time) == (12.5, 1e9 + 12.5)


def test_turns_keep_their_order_when_the_clock_goes_back(served, text, folder):
    times = iter(range(1000, 0, -1))
    with served(lambda context: [9, *text.end_tokens[:1]], clock=lambda: 1e9 + next(times)) as (server, _):
        for _ in range(3):
            server.ask([1, 2])
    stamps = [turn.time for turn in stored(folder)["s"].turns]
    assert stamps == sorted(stamps) and len({*stamps}) == 1


def test_a_session_has_its_own_time_whatever_that_of_another_one_is(served, text, folder):
    now = {"late": 2e9, "early": 2e9 - 50.0}  # closer than the retention, after which sessions are deleted
    session = ["late"]
    with served(lambda context: [9, *text.end_tokens[:1]], clock=lambda: now[session[0]]) as (server, _):
        for session[0] in ("late", "early", "late"):
            server.ask([1, 2], session[0])
    assert {name: {turn.time for turn in one.turns} for name, one in stored(folder).items()} == {
        name: {time} for name, time in now.items()
    }
