"""What clients do with a refusal depends on its words: harnesses shorten a conversation that is too long."""

import pytest
from starlette.testclient import TestClient

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.serve.app import new_app
from composer_jax.serve.service import ServerLimits, Service
from tests.data.model_folders import QWEN
from tests.serve.scripted_engine import ScriptedEngine
from tests.stages.base_model import write_base

MOST = 1024
REFUSES = QWEN + "{%- if messages[-1].content == 'refuse' %}{{ raise_exception('no refusals') }}{%- endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("hidden-place") / "weights", template=REFUSES)


@pytest.fixture(scope="module")
def client(folder):
    """A client of a server that has a shorter context than the network, 4096."""
    text = open_checkpoint(f"hf:{folder}").text.named("agent")
    engine = ScriptedEngine(lambda context: [text.end_tokens[0]], text.end_tokens, max_model_len=MOST)
    with TestClient(new_app(Service(engine, text, ServerLimits(body_bytes=1 << 17)))) as client:
        yield client


def prompt_of(path, words):
    text = "word " * words
    if path.endswith("responses"):
        return {"input": text}
    return {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(("words", "asked"), [(600, None), (600, 9), (4000, None), (4000, 9), (9, 2000), (30_000, 9)])
def test_clients_know_a_context_that_is_too_long(client, path, words, asked, stream):
    """LiteLLM looks for "this model's maximum context length is" in any case of letters, others for the code."""
    field = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    body = prompt_of(path, words) | {"stream": stream} | ({} if asked is None else {field: asked})
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    reason = "the body is larger than 131072 bytes." if words == 30_000 else "the prompt has "
    assert answer.status_code == (413 if words == 30_000 else 400)
    assert error["message"].startswith(f"This model's maximum context length is {MOST} tokens; {reason}")


def test_a_conversation_of_too_many_messages_is_too_long(client):
    many = [{"role": "user", "content": "x"}] * 4200
    for path, body in (
        ("/v1/chat/completions", {"messages": many}),
        ("/v1/responses", {"input": many}),
        ("/tokenize", {"messages": many}),
    ):
        error = client.post(path, json=body).json()["error"]
        assert error["code"] == "context_length_exceeded", path
        assert error["message"].startswith(f"This model's maximum context length is {MOST} tokens; the conversation")
    error = client.post("/tokenize", json={"prompt": "word " * 9000}).json()["error"]
    assert error["code"] == "context_length_exceeded" and "maximum context length is" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "refuse"}]}),
        ("/v1/responses", {"input": "refuse"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "refuse"}]}),
        ("/v1/completions", {"prompt": [5_000_000]}),
        ("/v1/completions", {"prompt": "word " * 9000}),
        ("/v1/completions", {"prompt": ""}),
        ("/detokenize", {"tokens": [5_000_000]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "model": "other"}),
    ],
)
def test_sentences_name_the_model_as_it_is_served(client, path, body):
    answer = client.post(path, json=body)
    message = answer.json()["error"]["message"]
    assert 400 <= answer.status_code < 500 and message.endswith(".") and not message.endswith("..")
    assert "hidden-place" not in message and "weights" not in message
    if "refuse" in str(body):
        assert "the chat template of agent refuses" in message and "no refusals" in message


@pytest.mark.parametrize("template", ["", "{% if %}", "{{ messages[0].content }}"])
def test_a_template_that_cannot_be_used_is_named_without_its_place(tmp_path, template):
    folder = write_base(tmp_path / "hidden-place")
    (folder / "chat_template.jinja").write_text(template)
    text = open_checkpoint(f"hf:{folder}").text.named("agent")
    engine = ScriptedEngine(lambda context: [0], (0,))
    with TestClient(new_app(Service(engine, text, ServerLimits()))) as client:
        answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert answer.status_code == 400 and "agent" in answer.json()["error"]["message"]
    assert "hidden-place" not in answer.text
