"""Requests as Codex makes them: tools and items that the server does not know end no session."""

import asyncio
import json
import threading

import httpx2 as httpx
import pytest

from composer_jax.data.chat.messages import ToolCall
from composer_jax.serve import responses, responses_input
from composer_jax.serve.bodies import ResponsesBody
from composer_jax.serve.errors import ApiError
from composer_jax.serve.responses_input import messages_of
from composer_jax.serve.service import Client, ServerLimits, Service
from tests.serve.scripted_engine import ScriptedEngine
from tests.serve.test_openai_client import READ, client_of

PATCH = "*** Begin Patch\n*** Add File: a.py\n+x = 1\n*** End Patch"
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}},
}
CUSTOM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: BEGIN_OF_PATCH"},
}
NAMESPACE = {"type": "namespace", "name": "mcp__docs", "description": "x", "tools": [{**SHELL, "name": "find"}]}
OTHERS = [
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {"type": "local_shell"},
    {"type": "mcp", "server_label": "x", "server_url": "https://x.example", "require_approval": "never"},
    {"type": "tool_search", "execution": "client"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
]
ASK = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]}
CODEX = {
    "model": "scripted",
    "instructions": "You are Codex.",
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "prompt_cache_key": "01a2",
    "client_metadata": {"turn_id": "01a2"},
    "input": [ASK],
    "tools": [SHELL],
}


@pytest.fixture
def post(scripted, text):
    """body -> (status, answer); post.prompt is the text of the last prompt. The model calls three tools."""
    chat = text.chat_format
    calls = [
        ToolCall("shell", {"command": ["ls"]}),
        ToolCall("apply_patch", {"input": PATCH}),
        ToolCall("mcp__docs__find", {"command": []}),
    ]
    with scripted(lambda context: chat.render_assistant("I look.", calls)) as (url, engine):

        def send(body):
            answer = httpx.post(f"{url}/v1/responses", json=body)
            send.prompt = chat.tokenizer.decode(engine.requests[-1].tokens) if engine.requests else ""
            return answer.status_code, answer.json()

        send.url = url
        yield send


def called(answer):
    return [item for item in answer["output"] if item["type"].endswith("_call")]


def test_tools_of_others_are_left_out_and_those_of_the_client_stay(post):
    status, answer = post(CODEX | {"tools": [*OTHERS, SHELL, *OTHERS]})
    assert status == 200 and called(answer)[0]["name"] == "shell"
    assert '"name": "shell"' in post.prompt
    assert not any(tool["type"] in post.prompt for tool in OTHERS)
    assert post(CODEX | {"tools": OTHERS})[0] == 200 and "Functions:" not in post.prompt
    inside = [{"type": "namespace", "name": "x", "tools": tools} for tools in (3, "find", [3], [{"name": "find"}])]
    wrongs = [{"name": "x"}, {"type": None, "name": "x"}, {"type": "custom"}, {"type": "function", "name": 3}, *inside]
    for wrong in wrongs:
        status, answer = post(CODEX | {"tools": [wrong]})
        assert status == 400 and "tool" in answer["error"]["message"]


def test_custom_tools_and_namespaces_are_functions_of_the_model(post):
    status, answer = post(CODEX | {"tools": [SHELL, CUSTOM, NAMESPACE]})
    assert status == 200 and "start: BEGIN_OF_PATCH" in post.prompt and '"name": "mcp__docs__find"' in post.prompt
    shell, custom, inner = called(answer)
    assert (shell["type"], shell["name"], "namespace" in shell) == ("function_call", "shell", False)
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert (inner["type"], inner["namespace"], inner["name"]) == ("function_call", "mcp__docs", "find")
    outputs = [
        {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "forty-two", "name": call["name"]}
        for call in (shell, custom, inner)
    ]
    sampled = post.prompt + "I look.\n<tool_call>"
    status, _ = post(CODEX | {"tools": [SHELL, CUSTOM, NAMESPACE], "input": [ASK, *answer["output"], *outputs]})
    assert status == 200 and post.prompt.startswith(sampled) and post.prompt.count("forty-two") == 3
    assert json.dumps({"name": "apply_patch", "arguments": {"input": PATCH}}) in post.prompt
    assert '{"name": "mcp__docs__find", "arguments": {"command": []}}' in post.prompt


@pytest.mark.parametrize("arguments", [{"patch": "x"}, {"input": "x", "extra": 1}, {"input": ["x"]}, {}])
def test_a_custom_call_that_is_no_text_is_shown_to_the_client(scripted, text, arguments):
    call = ToolCall("apply_patch", arguments)
    with scripted(lambda context: text.chat_format.render_assistant("", [call])) as (url, _):
        answer = client_of(url).responses.create(model="scripted", input="Go", tools=[CUSTOM])
    assert answer.output[0].type == "custom_tool_call" and answer.output[0].input == json.dumps(arguments)


def in_namespace(name, *tools):
    return {"type": "namespace", "name": name, "tools": [*tools]}


def test_two_tools_of_one_name_are_refused(post):
    inner, edit = {**SHELL, "name": "b"}, {**CUSTOM, "name": "shell"}
    twice = [
        ([{**SHELL, "name": "a__b"}, in_namespace("a", inner)], "a__b"),
        ([SHELL, edit], "shell"),
        ([in_namespace("a", inner), in_namespace("a", {**inner, "description": "Another"})], "a__b"),
        ([in_namespace("a", in_namespace("b", SHELL)), in_namespace("a__b", edit)], "a__b__shell"),
    ]
    for tools, name in twice:
        status, answer = post(CODEX | {"tools": tools})
        assert status == 400 and answer["error"]["message"] == f"two tools are called '{name}'; rename one."
        assert post(CODEX | {"tools": tools, "tool_choice": "none"})[0] == 200
    assert post(CODEX | {"tools": [SHELL, inner, SHELL]})[0] == 200, "one tool, declared again"


@pytest.mark.parametrize("stream", [False, True])
def test_the_tools_of_a_request_are_read_once(post, monkeypatch, stream):
    read = []
    read_tool = responses_input._read_tool
    monkeypatch.setattr(responses_input, "_read_tool", lambda *tool: read.append(tool) or read_tool(*tool))
    answer = httpx.post(f"{post.url}/v1/responses", json=CODEX | {"tools": [SHELL, CUSTOM], "stream": stream})
    assert answer.status_code == 200 and "custom_tool_call" in answer.text
    assert read == [(SHELL, None), (CUSTOM, None)]


def test_a_namespace_in_a_namespace_keeps_both_names(post):
    nested = in_namespace("mcp", in_namespace("docs", {**SHELL, "name": "find"}))
    status, answer = post(CODEX | {"tools": [nested]})
    assert status == 200 and '"name": "mcp__docs__find"' in post.prompt
    inner = called(answer)[-1]
    assert (inner["namespace"], inner["name"]) == ("mcp__docs", "find")


def test_calls_are_streamed_as_the_client_reads_them(post):
    options = dict(model="scripted", input="Go", tools=[SHELL, CUSTOM, NAMESPACE])
    with client_of(post.url).responses.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = {event.type: event.delta for event in events if event.type.endswith("input.delta")}
    assert deltas == {"response.custom_tool_call_input.delta": PATCH}
    done = [event.item for event in events if event.type == "response.output_item.done"][1:]
    assert [item.type for item in done] == ["function_call", "custom_tool_call", "function_call"]
    assert [item.id for item in done] == [item.id for item in final.output[1:]]
    assert done[1].input == PATCH and done[2].namespace == "mcp__docs"


THOUGHT = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "HM"}]}
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "It is so."}], "phase": "final_answer"}


def out(kind, key, output="secret", **more):
    return {"type": kind, "call_id": key, "output": output, **more}


def call_of(name, namespace):
    return {"type": "function_call", "call_id": "c", "name": name, "namespace": namespace, "arguments": "{}"}


ANSWER = out("function_call_output", "c")


@pytest.mark.parametrize(
    "items",
    [
        [{"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "secret"}}],
        [
            {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["secret"]}},
            out("function_call_output", "c"),
        ],
        [{"type": "local_shell_call", "id": "c", "call_id": "c"}, out("local_shell_call_output", "c", id="c")],
        [
            {"type": "mcp_list_tools", "server_label": "secret", "tools": []},
            {"type": "mcp_call", "name": "secret", "arguments": "{}", "output": "secret"},
        ],
        [{"type": "tool_search_call", "call_id": "c"}, {"type": "tool_search_output", "call_id": "c", "tools": []}],
        [{"type": "image_generation_call", "result": "secret", "status": "completed"}],
        [{"type": "apply_patch_call", "call_id": "c"}, out("apply_patch_call_output", "c")],
        [THOUGHT, {"type": "file_search_call", "queries": ["secret"]}, THOUGHT, SAID],
    ],
)
def test_items_of_other_tools_end_nothing(post, items):
    status, answer = post(CODEX | {"input": [ASK, *items, ASK]})
    assert status == 200, answer
    assert post.prompt.count("List the files.") == 2 and "secret" not in post.prompt
    assert post.prompt.count("<|im_start|>assistant") == 1 + (SAID in items)


def test_calls_of_the_client_beside_others_keep_their_answers(post):
    call = {"type": "function_call", "call_id": "a", "name": "shell", "arguments": "", "status": "completed"}
    other = {"type": "local_shell_call", "call_id": "b", "action": {}}
    items = [ASK, call, other, out("function_call_output", "b"), out("function_call_output", "a", "forty-two")]
    status, answer = post(CODEX | {"input": items})
    assert status == 200 and "forty-two" in post.prompt and "secret" not in post.prompt
    custom = {"type": "custom_tool_call", "call_id": "p", "name": "apply_patch", "input": PATCH, "id": "ctc"}
    status, _ = post(CODEX | {"input": [ASK, THOUGHT, custom, out("custom_tool_call_output", "p", "forty-two")]})
    assert status == 200 and "Begin Patch" in post.prompt and "HM" in post.prompt


def test_many_thoughts_are_of_one_message_and_block_nobody(text, monkeypatch):
    """They are read beside the event loop, which serves others meanwhile."""
    readers = []

    def read(*arguments):
        readers.append(threading.current_thread())
        return messages_of(*arguments)

    monkeypatch.setattr(responses, "messages_of", read)
    thoughts = [{**THOUGHT, "content": [{"type": "reasoning_text", "text": f"HM {n}"}]} for n in range(2000)]
    body = ResponsesBody(input=[ASK, *thoughts[:1000], {"type": "web_search_call"}, *thoughts[1000:], SAID, ASK])
    assert [message.get("reasoning_content") for message in messages_of(None, body.input)] == [
        None,
        "\n".join(f"HM {n}" for n in range(2000)),
        None,
    ]
    engine = ScriptedEngine(lambda context: [0], (0,), max_model_len=1 << 20)
    service = Service(engine, text, ServerLimits())
    with pytest.raises(ApiError, match="maximum context length"):
        asyncio.run(responses.submit(service, body, Client()))
    assert len(readers) == 1 and readers[0] is not threading.current_thread()


@pytest.mark.parametrize("empty", ["", [], None, [{"type": "input_text", "text": ""}]])
def test_what_a_tool_or_the_model_left_empty_is_read(post, empty):
    call = {"type": "function_call", "call_id": "a", "name": "shell", "arguments": "{}"}
    said = {"type": "message", "role": "assistant", "content": empty}
    items = [ASK, said, call, out("function_call_output", "a", empty), {**THOUGHT, "content": None}, said, ASK]
    status, answer = post(CODEX | {"input": items})
    assert status == 200, answer
    assert post(CODEX | {"input": [{"role": "user", "content": empty}]})[0] == 400


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format: the engine writes"),
        ({"text": {"format": {"type": "json_object"}, "verbosity": "low"}}, "text.format"),
        ({"include": ["message.output_text.logprobs"]}, "include: message.output_text.logprobs is not built"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt is not supported"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"tool_choice": {"type": "function", "name": "shell"}}, "tool_choice: the engine cannot force a call"),
        ({"input": [ASK, {"type": "item_reference", "id": "msg_1"}]}, "input item 2 has the type 'item_reference'"),
        ({"input": [ASK, {"type": "compaction", "encrypted_content": "x"}]}, "input item 2 has the type 'compaction'"),
        ({"input": [{"type": 3}]}, "input item 1 has the type 3"),
        ({"input": [ASK, {"type": [1]}]}, "input item 2 has the type [1], which is not a text"),
        ({"input": [{"type": {"name": "message"}}]}, "input item 1 has the type {'name': 'message'}"),
        ({"input": [ASK, call_of("shell", [1]), ANSWER]}, "input item 2: its name 'shell' in the namespace [1]"),
        ({"input": [ASK, call_of(["shell"], "x"), ANSWER]}, "input item 2: its name ['shell'] in the namespace 'x'"),
        ({"input": [ASK, call_of(None, None), ANSWER]}, "input item 2: its name None in the namespace None"),
        ({"input": [ASK, out("function_call_output", "nobody")]}, "message 3: it is the answer of a tool"),
    ],
)
def test_what_changes_the_answer_is_refused_by_name(post, fields, reason):
    status, answer = post(CODEX | fields)
    assert status == 400 and reason in answer["error"]["message"]


def test_harmless_fields_are_not_read(post):
    harmless = {
        "text": {"format": {"type": "text"}, "verbosity": "high"},
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "service_tier": "auto",
        "safety_identifier": "x",
        "max_tool_calls": 3,
        "stream_options": {"include_obfuscation": False},
        "prompt": None,
        "tools": [{"type": "function", **READ["function"], "strict": True}],
    }
    item = ASK | {"internal_chat_message_metadata_passthrough": {"turn_id": "x"}, "phase": "commentary", "id": "msg_1"}
    assert post(CODEX | harmless | {"input": [item]})[0] == 200
