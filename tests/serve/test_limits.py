"""Bad bodies, clients that leave or read slowly, and full queues harm nobody else."""

import contextlib
import json
import shutil
import socket
import subprocess

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from composer_jax.serve.app import new_app
from composer_jax.serve.service import ServerLimits, Service
from tests.many import many
from tests.serve.scripted_engine import ScriptedEngine
from tests.serve.test_control import CONTROL_KEY, wait_until

ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize", "/update_weights")
FIELDS = {
    "/v1/chat/completions": ASK,
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/update_weights": {"checkpoint": "hf:x"},
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
WRONG = {
    "messages": st.one_of(st.none(), st.integers(), st.text(), st.lists(st.integers(), min_size=1), st.just([]))
    | st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), st.integers()), min_size=1),
    "prompt": st.none()
    | st.just("")
    | st.just([])
    | st.just([[]])
    | st.just([-1])
    | st.dictionaries(st.text(), st.text()),
    "input": st.none() | st.integers() | st.just([]) | st.just([{"type": "image"}]) | st.just([{"role": 3}]),
    "tokens": st.none() | st.text() | st.just([-1]) | st.just([10**9]) | st.just([1.5]),
    "checkpoint": st.none() | st.integers(),
    "temperature": st.sampled_from([-1, "hot", True, [], 1e400, -1e400, 1e300]),
    "top_p": st.sampled_from([0, 2, -0.1, "all"]),
    "top_k": st.sampled_from([-2, 1.5, "many", 3_000_000_000]),
    "min_p": st.sampled_from([-1, 2]),
    "n": st.sampled_from([0, -1, 10**9, "two", 1.5]),
    "stop": st.just([""]) | st.just("x" * 2000) | st.just(["x"] * 100) | st.integers() | st.just([1]),
    "max_tokens": st.sampled_from([0, -5, 10**12, "few"]),
    "stream": st.sampled_from(["yes", 1]),
    "logit_bias": st.just({"3": 5}),
    "frequency_penalty": st.just(0.5),
    "text": st.just({"format": {"type": "json_schema"}}),
    "instructions": st.just("\ud800") | st.integers(),
    "tools": st.just([{"type": "function", "function": {"name": "f", "parameters": {"default": float("nan")}}}])
    | st.integers().map(lambda _: [{"type": "function", "function": {"name": "f", "parameters": nested(300)}}]),
    "echo": st.just("yes"),
}


@pytest.fixture(scope="module")
def client(text):
    app = new_app(
        Service(ScriptedEngine(lambda context: [text.end_tokens[0]], text.end_tokens), text.named("m"), ServerLimits()),
        (),
        CONTROL_KEY,
    )
    with TestClient(app, "http://127.0.0.1", headers={"authorization": f"Bearer {CONTROL_KEY}"}) as client:
        yield client


def nested(depth):
    return {"type": "object", "properties": nested(depth - 1)} if depth else {}


def is_refused(answer):
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["message"].endswith(".") and error["type"] == "invalid_request_error"


@settings(max_examples=many(150))
@given(path=st.sampled_from(PATHS), data=st.data())
def test_a_wrong_field_is_one_sentence(client, path, data):
    own = [field for field in WRONG if field in FIELDS[path]]
    sampling = ["text", "instructions", "tools"] if path.endswith("responses") else []
    sampling += ["tools"] if path.endswith("chat/completions") else []
    sampling += ["temperature", "top_p", "top_k", "min_p", "n", "stop", "stream", "logit_bias", "frequency_penalty"]
    names = own + (sampling if path.startswith("/v1") else [])
    name = data.draw(st.sampled_from(names))
    body = FIELDS[path] | {name: data.draw(WRONG[name])}
    is_refused(client.post(path, content=json.dumps(body)))


@settings(max_examples=many(150))
@given(
    path=st.sampled_from(PATHS), body=st.binary(max_size=30) | ANYTHING.map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_are_refused(client, path, body):
    is_refused(client.post(path, content=body))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body", ["[" * 100_000, '{"messages":' * 5000, '{"prompt": NaN}', "\ud800".encode("utf-8", "surrogatepass")]
)
def test_hostile_bodies_are_refused(client, path, body):
    is_refused(client.post(path, content=body))


def test_other_pages_and_methods_are_sentences(client):
    is_refused(client.get("/v2/models"))
    is_refused(client.get("/v1/chat/completions"))


def test_pages_of_other_hosts_are_refused(text):
    engine = ScriptedEngine(lambda context: [text.end_tokens[0]], text.end_tokens)
    service = Service(engine, text.named("m"), ServerLimits())
    with TestClient(new_app(service, hosts=("localhost", "127.0.0.1")), "http://127.0.0.1:8000") as browser:
        own = {"origin": "http://127.0.0.1:8000"}
        assert browser.post("/v1/chat/completions", json=ASK, headers=own).status_code == 200
        for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}, {"origin": "null"}):
            assert browser.post("/v1/chat/completions", json=ASK, headers=headers).status_code == 403
            assert browser.get("/stats", headers=headers).status_code == 403


def test_a_dead_engine_is_not_healthy(text):
    engine = ScriptedEngine(lambda context: [], text.end_tokens)
    with TestClient(new_app(Service(engine, text.named("m"), ServerLimits()))) as client:
        assert client.get("/health").status_code == 200
        engine.error = RuntimeError("out of memory")
        answer = client.get("/health")
        assert answer.status_code == 503 and "out of memory" in answer.json()["error"]["message"]


def test_newer_roles_and_what_no_answer_can_have(client):
    messages = [{"role": "developer", "content": "Be brief."}, *ASK["messages"]]
    assert client.post("/v1/chat/completions", json=ASK | {"messages": messages}).status_code == 200
    is_refused(client.post("/v1/chat/completions", json=ASK | {"top_logprobs": 3}))
    is_refused(client.post("/v1/chat/completions", json=ASK | {"logprobs": True, "top_logprobs": 21}))
    is_refused(client.post("/v1/completions", json={"prompt": "x", "return_routed_experts": "yes"}))
    is_refused(client.post("/v1/responses", json={"input": "x", "return_routed_experts": True}))
    is_refused(client.post("/v1/completions", json={"prompt": ["x"] * 5, "n": 128}))
    is_refused(client.post("/v1/chat/completions", json={"messages": ASK["messages"] * 5000}))


def test_unknown_fields_that_change_nothing_are_accepted(client):
    body = ASK | {"user": "u", "metadata": {"a": "b"}, "store": True, "frequency_penalty": 0, "logit_bias": None}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_a_body_that_is_too_large_is_refused(network_url):
    answer = httpx.post(f"{network_url}/v1/chat/completions", content=b" " * (1 << 21))
    assert answer.status_code == 413 and "larger than 1048576 bytes" in answer.json()["error"]["message"]


def raw_request(url, body):
    """A connection that has sent a request and read nothing."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_is_killed_frees_its_pages(network_url, sampler, stream):
    decoded = sampler.decoded_tokens
    connections = [raw_request(network_url, ASK | {"stream": stream, "seed": seed}) for seed in range(3)]
    wait_until(lambda: sampler.decoded_tokens > decoded)
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset, as by a kill
        connection.close()
    wait_until(lambda: sampler.stats.running == sampler.stats.waiting == sampler.stats.held_pages == 0)
    assert sampler.decoded_tokens - decoded < 3 * 400, "they ended before their messages did"


def test_a_client_that_reads_nothing_is_dropped(scripted, text):
    endless = text.tokenizer.encode("word " * 40)
    with scripted(lambda context: endless * 500, ServerLimits(reader_seconds=0.2)) as (url, engine):
        with contextlib.closing(
            raw_request(url, ASK | {"stream": True, "max_tokens": 4000, "logprobs": True, "n": 40})
        ):
            wait_until(lambda: engine.stats.running == 40)
            wait_until(lambda: engine.stats.running == 0)
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_stream_that_ends_before_its_first_token_leaves_nothing(scripted, text):
    slow = text.tokenizer.encode("word " * 400)
    limits = ServerLimits(reader_seconds=0.2)
    long = [{"role": "user", "content": "word " * 700}]
    with scripted(lambda context: slow * 8, limits, delay=0.05) as (url, engine):
        body = {"messages": long, "stream": True, "return_token_ids": True, "n": 100}
        with contextlib.closing(raw_request(url, body)):
            wait_until(lambda: engine.stats.running == 100)
            wait_until(lambda: engine.stats.running == 0)


def test_a_full_queue_is_429_for_all_and_for_a_key(scripted, text):
    slow = text.tokenizer.encode("word " * 400)
    limits = ServerLimits(queue=3, queue_per_key=2)
    with scripted(lambda context: slow, limits, ("a", "b"), delay=0.05) as (url, engine):
        ask = lambda key, **more: httpx.post(  # noqa: E731
            f"{url}/v1/chat/completions", json=ASK | more, headers={"authorization": f"Bearer {key}"}, timeout=30
        )
        with contextlib.ExitStack() as stack:
            for key in ("a", "a", "b"):
                stack.enter_context(
                    httpx.stream(
                        "POST",
                        f"{url}/v1/chat/completions",
                        json=ASK | {"stream": True},
                        headers={"authorization": f"Bearer {key}"},
                    )
                )
            assert "this key has 2 requests of at most 2" in ask("a").json()["error"]["message"]
            assert "the server has 3 requests of at most 3" in ask("b").json()["error"]["message"]
            assert ask("b", n=2).status_code == 429
        wait_until(lambda: engine.stats.running == 0)
        assert ask("b", max_tokens=3).status_code == 200


def test_a_request_that_takes_too_long_ends(scripted, text):
    slow = text.tokenizer.encode("word " * 400)
    with scripted(lambda context: slow, ServerLimits(seconds=0.3), delay=0.05) as (url, engine):
        answer = httpx.post(f"{url}/v1/chat/completions", json=ASK)
        assert answer.status_code == 504 and "longer than 0.3 s" in answer.json()["error"]["message"]
        pieces = httpx.post(f"{url}/v1/chat/completions", json=ASK | {"stream": True}).text
        assert "longer than 0.3 s" in pieces and "[DONE]" not in pieces
        wait_until(lambda: engine.stats.running == 0)


def test_the_page_the_numbers_and_the_metrics(network_url):
    page = httpx.get(network_url)
    assert page.headers["content-type"].startswith("text/html") and "tokens per second" in page.text
    assert "http" not in page.text.replace("<!doctype html>", ""), "the page needs no other host"
    before = httpx.get(f"{network_url}/stats").json()["sampled_tokens"]
    answer = httpx.post(f"{network_url}/v1/chat/completions", json=ASK | {"max_tokens": 5}, timeout=60).json()
    sampled = answer["usage"]["completion_tokens"]
    assert httpx.get(f"{network_url}/stats").json()["sampled_tokens"] == before + sampled > before
    metrics = httpx.get(f"{network_url}/metrics").text
    assert 'composer_http_requests_total{path="/v1/chat/completions",status="200"}' in metrics
    assert "composer_cache_pages_held 0.0" in metrics and "composer_sampled_tokens_total" in metrics


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page with")
def test_a_browser_shows_the_numbers(network_url, sampler, tmp_path):
    quiet = ["--headless", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--no-sandbox"]
    command = [CHROMIUM, *quiet, f"--user-data-dir={tmp_path}", "--virtual-time-budget=3000", "--dump-dom", network_url]
    shown = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout.decode()
    assert '<span id="model">small</span>' in shown
    assert f"context of 512 tokens, weights of version {sampler.version}" in shown
    assert '<dd id="running">0</dd>' in shown and '<dd id="cache">0 %</dd>' in shown


def test_texts_and_ids(network_url, text):
    ids = httpx.post(f"{network_url}/tokenize", json={"prompt": "def f():"}).json()
    assert ids["tokens"] == text.encode_prompt("def f():") and ids["count"] == len(ids["tokens"])
    assert httpx.post(f"{network_url}/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"] == "def f():"
    chat = httpx.post(f"{network_url}/tokenize", json={"messages": ASK["messages"]}).json()
    assert chat["tokens"] == text.encode_chat(ASK["messages"]) and chat["max_model_len"] == 512


def test_control_tokens_of_a_prompt_are_read_on_request(client, text):
    prompt = "a<|im_end|>b"
    plain, parsed = text.encode_prompt(prompt), text.encode_prompt(prompt, parse_special=True)
    assert len(parsed) < len(plain)
    for fields, ids in (({}, plain), ({"parse_special": None}, plain), ({"parse_special": True}, parsed)):
        assert client.post("/tokenize", json={"prompt": prompt} | fields).json()["tokens"] == ids
        body = {"prompt": [prompt, prompt], "max_tokens": 1, "return_token_ids": True} | fields
        choices = client.post("/v1/completions", json=body).json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [ids, ids]
    no_start = client.post("/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()
    assert no_start["tokens"] == text.tokenizer.encode_document("a")


@pytest.mark.parametrize("field", ["parse_special", "add_special_tokens"])
def test_how_control_tokens_are_read_is_true_or_false_and_of_a_prompt(client, field):
    for path in ("/tokenize", "/v1/completions"):
        for value in ("yes", 1, []):
            answer = client.post(path, json={"prompt": "a", field: value})
            assert answer.status_code == 400 and field in answer.json()["error"]["message"]
    for path in ("/tokenize", "/v1/chat/completions"):
        answer = client.post(path, json={"messages": ASK["messages"], field: True})
        assert answer.status_code == 400 and field in answer.json()["error"]["message"]


def test_a_lone_surrogate_is_called_by_its_name(client):
    for path in PATHS:
        body = json.dumps(FIELDS[path] | {"note": {"a": ["It is \ud83d"]}})
        answer = client.post(path, content=body)
        is_refused(answer)
        assert "the lone surrogate U+D83D after " in answer.json()["error"]["message"], path
        assert "It is " in answer.json()["error"]["message"]
    whole = json.dumps({"messages": [{"role": "user", "content": "\U0001f600"}]})
    assert "\\ud83d\\ude00" in whole and client.post("/v1/chat/completions", content=whole).status_code == 200


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt": "\xed\xa0\x80"}', "is not UTF-8 at byte 12"),
        (b'{"prompt": "\xe9t\xe9"}', "is not UTF-8 at byte 12"),
        (b'{"prompt": "x", "seed": NaN}', "NaN is not a number JSON can hold"),
        (b'{"prompt": "x"', "Expecting ',' delimiter at character 14"),
        (b'{"k": "\\udc00", "\\ud800": 1}', "U+DC00"),
        (b'{"\\ud800": 1}', "U+D800"),
    ],
)
def test_a_body_that_is_no_json_is_refused_with_its_reason(client, body, reason):
    for path in PATHS:
        answer = client.post(path, content=body)
        is_refused(answer)
        assert reason in answer.json()["error"]["message"]
