"""Messages of the system and the developer after the first one are written where they are, or refused."""

import pytest
from starlette.testclient import TestClient

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.serve.app import new_app
from composer_jax.serve.service import ServerLimits, Service
from tests.data.model_folders import CHATML, QWEN
from tests.serve.scripted_engine import ScriptedEngine
from tests.serve.test_openai_client import READ
from tests.stages.base_model import write_base

WRITES = QWEN.replace("== 'user' %}", "== 'user' or message.role == 'system' and not loop.first %}").replace(
    "'<|im_start|>user\\n' + message.content", "'<|im_start|>' + message.role + '\\n' + message.content"
)
REFUSES = QWEN.replace(
    "{%- if message.role == 'user' %}",
    "{%- if message.role == 'system' and not loop.first %}{{ raise_exception('one system message') }}{%- endif %}\n"
    "{%- if message.role == 'user' %}",
)
COLLECTS = """
{%- set first = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('|') %}
{%- if first %}{{- '<|im_start|>system\\n' + first + '<|im_end|>\\n' }}{%- endif %}
{%- set messages = messages | rejectattr('role', 'equalto', 'system') | list %}"""
COLLECTS += QWEN
LATEST = """
{%- set rules = messages | selectattr('role', 'equalto', 'system') | list %}
{%- set others = messages | rejectattr('role', 'equalto', 'system') | list %}
{%- set messages = rules[-1:] + others %}"""
LATEST += QWEN
TEMPLATES = {"writes": WRITES, "drops": QWEN, "refuses": REFUSES, "collects": COLLECTS, "latest": LATEST}
TEMPLATES["no tools"] = CHATML
USER = {"role": "user", "content": "What is in a.py?"}
SAID = {"role": "assistant", "content": "It is so."}
CALLED = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "read"}}]}
OUT = {"role": "tool", "tool_call_id": "c", "content": "forty-two"}


def system(text, role="system"):
    return {"role": role, "content": text}


@pytest.fixture(scope="module", params=TEMPLATES)
def ask(request, tmp_path_factory):
    """(messages, tools) -> (status, error or prompt text); ask.kind is what the template does with later messages."""
    folder = write_base(tmp_path_factory.mktemp("system") / "small", template=TEMPLATES[request.param])
    text = open_checkpoint(f"hf:{folder}").text.named("agent")
    engine = ScriptedEngine(lambda context: [text.end_tokens[0]], text.end_tokens)
    with TestClient(new_app(Service(engine, text, ServerLimits()))) as client:

        def send(messages, tools=()):
            fields = ("messages", "/v1/chat/completions"), ("input", "/v1/responses")
            is_plain = not any("tool_calls" in message for message in messages)
            for field, path in fields[: 1 + is_plain]:
                declared = [READ if field == "messages" else {"type": "function", **READ["function"]}] if tools else []
                answer = client.post(path, json={field: messages, "tools": declared})
                if answer.status_code != 200:
                    return answer.status_code, answer.json()["error"]["message"]
            return 200, text.tokenizer.decode(engine.requests[-1].tokens)

        send.kind = request.param
        yield send


@pytest.mark.parametrize("tools", [False, True], ids=["plain", "tools"])
def test_several_at_the_beginning_are_all_written(ask, tools):
    for roles in (("system", "system"), ("system", "developer"), ("developer", "system", "developer")):
        texts = [f"Rule {number}." for number in range(len(roles))]
        status, prompt = ask([*map(system, texts, roles), USER], tools)
        assert status == 200, prompt
        places = [prompt.index(text) for text in texts]
        assert places == sorted(places) and places[-1] < prompt.index("What is in")
        joined = "Rule 0.\n\nRule 1." in prompt
        assert joined == (ask.kind in ("drops", "refuses", "latest"))


@pytest.mark.parametrize(
    "messages",
    [
        [USER, system("Be brief.", "developer"), USER],
        [system("First."), USER, SAID, system("Be brief."), USER],
        [USER, SAID, system("Be brief.", "developer")],
        [system("First."), USER, CALLED, OUT, system("Be brief.", "developer"), USER],
        [system("Be brief."), USER, SAID, system("Be brief."), USER],
        [USER, SAID, USER, SAID, system("Mode: plan."), system("Be brief."), USER],
    ],
)
def test_later_ones_are_written_or_refused(ask, messages):
    status, answer = ask(messages)
    several = sum(message["role"] in ("system", "developer") for message in messages) > 1
    if ask.kind in ("writes", "collects", "no tools") or (ask.kind == "latest" and not several):
        assert status == 200, answer
        later = sum(message["content"] == "Be brief." for message in messages if "content" in message)
        assert answer.count("Be brief.") == later
        if ask.kind not in ("collects", "latest"):
            assert answer.rindex("Be brief.") > answer.index("What is in")
    else:
        assert status == 400 and answer.count(". ") == 0 and answer.endswith(".")
        reason = "one system message" if ask.kind == "refuses" else "leaves out the message of the system"
        assert "the chat template of agent" in answer and reason in answer
