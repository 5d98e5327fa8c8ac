"""What a server writes of its answers, and when it drops a session."""

import base64
import dataclasses
import hashlib
import io
import threading

import jax
import numpy as np
import pytest

from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.engine import Sampler
from tests.serve.traffic.conftest import all_bytes, stored
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


def test_a_conversation_with_a_network_is_stored_with_all_that_training_needs(served, network, folder):
    with served(None, engine=network, keeps_routing=True) as (server, _):
        first = server.ask([1, 2, 3], temperature=0.7, seed=5)
        prompt = [1, 2, 3, *first["choices"][0]["token_ids"], 4, 5]
        second = server.ask(prompt, n=2, seed=9, logprobs=0)
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
        third = server.post("/v1/chat/completions", chat, **{"X-Turn-Type": "side", "X-User-ID": "u"}).json()
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
        wait_until_written(writer, 1)
    before = all_bytes(folder)
    with served(lambda context: [9, *text.end_tokens[:1]]) as (server, writer):
        between = all_bytes(folder)
        for session, consent in (("t", "none"), ("t", ""), ("", "training"), ("first", "none")):
            server.ask([1, 2], session, consent)
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        assert server.post("/v1/chat/completions", body, "t", "").status_code == 200
        assert server.events({"id": "e", "kind": "undo", "payload": {"hunks": []}}, session="t").status_code == 404
        for name, value in (("X-Consent", "yes"), ("X-Turn-Type", "MAIN")):
            answer = server.post("/v1/completions", {"prompt": [1]}, consent="", **{name: value})
            assert answer.status_code == 400 and value in answer.json()["error"]["message"]
        assert all_bytes(folder) == between
    assert {*before} == {*all_bytes(folder)} and {*stored(folder)} == {"first"}


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


def wait_until_written(writer, n):
    """Waits until the writer has written so many turns; pytest's timeout ends a wait for ever."""
    waiting = threading.Event()
    while writer.counts.written_turns < n:
        assert writer.counts.dropped_sessions == 0
        waiting.wait(0.01)
