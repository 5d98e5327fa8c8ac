"""What clients send back of a conversation is read as it was said, or refused by name."""

import json

import httpx2 as httpx
import pytest

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.data.chat.messages import ToolCall
from composer_jax.serve.app import new_app
from composer_jax.serve.service import ServerLimits, Service
from tests.serve.conftest import running
from tests.serve.scripted_engine import ScriptedEngine
from tests.serve.test_openai_client import READ, client_of
from tests.stages.base_model import write_base

ASK = {"role": "user", "content": "What is in a.py?"}
PLAN = "<think>\nSECRET PLAN\n</think>\n\n"
CALL = ToolCall("read", {"path": "a.py"})
RESPONSES_TOOL = {"type": "function", **READ["function"]}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """(address, engine, chat format) of a server whose model thinks, calls a tool, and then answers."""
    text = open_checkpoint(f"hf:{write_base(tmp_path_factory.mktemp('thinks') / 'small', chat='thinks')}").text
    chat = text.chat_format

    def write(context):
        is_answered = "forty-two" in chat.tokenizer.decode(context)
        return chat.render_assistant("Done.", []) if is_answered else chat.render_assistant(PLAN, [CALL])

    engine = ScriptedEngine(write, text.end_tokens)
    with running(new_app(Service(engine, text.named("scripted"), ServerLimits()))) as url:
        yield url, engine, chat


@pytest.fixture
def ask(thinking):
    """(path, body) -> (status, error message); and the last prompt's text."""
    url, engine, chat = thinking

    def post(path, body):
        answer = httpx.post(f"{url}{path}", json=body)
        return answer.status_code, (answer.json().get("error") or {}).get("message", "")

    post.prompt = lambda: chat.tokenizer.decode(engine.requests[-1].tokens)
    return post


def assert_prompt_continues_what_was_sampled(engine, chat):
    first, second = engine.requests[-2:]
    sampled = chat.render_assistant(PLAN, [CALL])
    assert list(second.tokens)[: len(first.tokens) + len(sampled)] == [*first.tokens, *sampled]


def test_the_thoughts_of_a_chat_come_back(thinking):
    url, engine, chat = thinking
    client = client_of(url)
    for as_stream in (False, True):
        if as_stream:
            with client.chat.completions.stream(model="scripted", messages=[ASK], tools=[READ]) as stream:
                message = stream.get_final_completion().choices[0].message.model_dump(exclude={"parsed"})
                for call in message["tool_calls"]:
                    call["function"].pop("parsed_arguments")
        else:
            message = client.chat.completions.create(model="scripted", messages=[ASK], tools=[READ]).choices[0].message
            assert message.reasoning_content == "SECRET PLAN" and message.content is None
            message = message.model_dump()
        answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "forty-two"}
        later = client.chat.completions.create(model="scripted", messages=[ASK, message, answer], tools=[READ])
        assert later.choices[0].message.content == "Done."
        assert_prompt_continues_what_was_sampled(engine, chat)


def test_the_thoughts_of_a_response_come_back(thinking):
    url, engine, chat = thinking
    client = client_of(url)
    first = client.responses.create(model="scripted", input=[ASK], tools=[RESPONSES_TOOL])
    thought, call = first.output
    assert (thought.type, call.type) == ("reasoning", "function_call")
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "forty-two"}
    later = client.responses.create(model="scripted", input=[ASK, *first.output, answer], tools=[RESPONSES_TOOL])
    assert later.output_text == "Done."
    assert_prompt_continues_what_was_sampled(engine, chat)


def called(arguments="{}", **fields):
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **fields}


OUT = {"role": "tool", "tool_call_id": "c1", "content": "forty-two"}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_names_of_other_servers_are_read(ask, field):
    body = {"messages": [ASK, called(**{field: "SECRET PLAN"}), OUT], "tools": [READ]}
    assert ask("/v1/chat/completions", body) == (200, "")
    assert PLAN in ask.prompt()
    assert ask("/tokenize", {"messages": body["messages"]})[0] == 200


@pytest.mark.parametrize("arguments", ["", "null", None, {}, " \n", "{}", " null ", "missing"])
def test_a_call_without_arguments_is_one_with_none(ask, arguments):
    message = called(arguments)
    item = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": arguments}
    if arguments == "missing":
        del item["arguments"], message["tool_calls"][0]["function"]["arguments"]
    assert ask("/v1/chat/completions", {"messages": [ASK, message, OUT], "tools": [READ]}) == (200, "")
    assert '{"name": "read", "arguments": {}}' in ask.prompt()
    output = {"type": "function_call_output", "call_id": "c1", "output": "forty-two"}
    assert ask("/v1/responses", {"input": [ASK, item, output], "tools": [RESPONSES_TOOL]}) == (200, "")
    assert '{"name": "read", "arguments": {}}' in ask.prompt()


def test_older_calls_and_harmless_fields_are_read(ask):
    legacy = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "read", "arguments": json.dumps({"n": 1})},
    }
    answer = {"role": "function", "name": "read", "content": "forty-two"}
    more = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "id": "x", "name": "y"}
    messages = [{"role": "developer", "content": "Be brief."}, ASK | {"name": "z"}, legacy, answer]
    messages += [{"role": "assistant", "content": "It is."} | more, ASK]
    assert ask("/v1/chat/completions", {"messages": messages}) == (200, "")
    assert '{"name": "read", "arguments": {"n": 1}}' in ask.prompt() and "Be brief." in ask.prompt()


ITEM = {"type": "reasoning", "id": "rs_1", "summary": []}


@pytest.mark.parametrize(
    ("path", "history", "reason"),
    [
        (
            "/v1/chat/completions",
            [called(reasoning_content="a", reasoning="b"), OUT],
            "reasoning_content and reasoning differ",
        ),
        (
            "/v1/chat/completions",
            [{"role": "assistant", "content": "It", "prefix": True}],
            "message 2: the field 'prefix'",
        ),
        ("/v1/chat/completions", [called(refusal="No."), OUT], "the field 'refusal' of a message of the assistant"),
        ("/v1/responses", [ITEM | {"encrypted_content": "gAAA"}], "input item 2: encrypted reasoning cannot be read."),
        ("/v1/responses", [ITEM | {"thoughts": "x"}], "input item 2: the field 'thoughts' of a reasoning is not read"),
        (
            "/v1/responses",
            [{"role": "user", "content": [{"type": "input_image"}]}],
            "input item 2: its content is not text",
        ),
        ("/v1/responses", [{"role": "user", "content": None}], "input item 2: it has no content."),
        ("/v1/responses", [{"type": "item_reference"}], "input item 2 has the type 'item_reference'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(ask, path, history, reason):
    body = {"messages": [ASK, *history, ASK]} if "chat" in path else {"input": [ASK, *history, ASK]}
    status, message = ask(path, body)
    assert status == 400 and reason in message


def test_a_summary_and_a_cut_message_are_thoughts(ask):
    part = {"type": "summary_text", "text": "SECRET PLAN"}
    items = [
        ASK,
        ITEM | {"summary": [part]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
    ]
    assert ask("/v1/responses", {"input": [*items, ASK]}) == (200, "")
    assert "assistant\nSo." in ask.prompt(), "the template drops the thoughts of earlier turns"
    content = [{"type": "reasoning_text", "text": "SECRET PLAN"}]
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}", "status": "completed"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "forty-two"}]}
    items = [ASK, ITEM | {"content": content, "summary": [part], "encrypted_content": None}, call, output]
    assert ask("/v1/responses", {"input": items, "tools": [RESPONSES_TOOL]}) == (200, "")
    assert ask.prompt().count(PLAN) == 1 and "forty-two" in ask.prompt()
