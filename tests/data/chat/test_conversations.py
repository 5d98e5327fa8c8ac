"""Conversations in OpenAI's form: exactly what a model samples is trained, and a bad row says why."""

import json

import numpy as np
import pytest

from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.conversations import conversation_trace, read_conversation
from composer_jax.data.chat.messages import AssistantMessage, ToolCall
from composer_jax.data.row_files import read_rows
from composer_jax.errors import UserError
from tests.data.formats import NAMES, Declaration, decode, format_of

every_format = pytest.mark.parametrize("name", [*NAMES, "thinks", "opens"])
READ, FINISH = ToolCall("read", {"path": "a é.py"}), ToolCall("finish", {})
TOOL = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": {"type": "object"}}}


def call(key, name, arguments):
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def conversation():
    return {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Go"}, {"type": "text", "text": "."}]},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [call("a", "read", '{"path": "a é.py"}'), call("b", "read", {"path": "b"})],
            },
            {"role": "tool", "tool_call_id": "b", "content": "two"},
            {"role": "tool", "tool_call_id": "a", "content": "one"},
            {"role": "assistant", "content": "Hm.", "train": False},
            {"role": "user", "content": "More."},
            {"role": "assistant", "content": None, "tool_calls": [call("c", "finish", "{}")]},
        ],
        "tools": [TOOL],
    }


def trained_parts(tokens, mask):
    """Runs of trained ids."""
    edges = np.flatnonzero(np.diff(np.r_[0, mask.astype(int), 0]))
    return [tokens[start:stop].tolist() for start, stop in zip(edges[::2], edges[1::2], strict=True)]


@every_format
def test_exactly_what_a_model_samples_is_trained(name):
    chat = format_of(name)
    tokens, mask = conversation_trace(read_conversation(conversation()), chat)
    assert (tokens.dtype, mask.dtype) == (np.int32, bool)
    said = [chat.render_assistant("I look.", [READ, ToolCall("read", {"path": "b"})])]
    said.append(chat.render_assistant("", [FINISH], calls_before=2))
    assert trained_parts(tokens, mask) == said
    assert mask[-1] and all(part[-1] == chat.end for part in said)
    text = decode(chat, tokens.tolist())
    assert text.index("one") < text.index("two") < text.index("Hm.") < text.index("More.")
    assert ("Reads." in text) == (name != "compact"), "the compact format declares no tools"


@every_format
def test_the_ids_are_those_of_the_rendered_conversation(name):
    chat = format_of(name)
    tokens, _ = conversation_trace(read_conversation(conversation()), chat)
    whole = chat.render(
        [
            Message("system", "Be brief."),
            Message("user", "Go."),
            AssistantMessage("I look.", (READ, ToolCall("read", {"path": "b"})), True),
            Message("tool", "one"),
            Message("tool", "two"),
            AssistantMessage("Hm.", (), True),
            Message("user", "More."),
            AssistantMessage("", (FINISH,), True),
        ],
        [Declaration(**TOOL["function"])],
    )
    assert (tokens.tolist() == whole) == (name not in ("thinks", "opens")), "there, what was sampled stays"


def test_what_follows_the_last_trained_message_is_left_out():
    row, chat = conversation(), format_of("chatml")
    expected = conversation_trace(read_conversation(row), chat)
    row["messages"] += [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "Bye.", "train": False}]
    for got, want in zip(conversation_trace(read_conversation(row), chat), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_sampled_ids_are_taken_where_the_tokenizer_is_the_same():
    chat = format_of("chatml")
    odd = [i for letter in "path" for i in chat.tokenizer.encode(letter)]
    row = {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "path", "token_ids": [*odd, chat.end]},
            {"role": "user", "content": "path", "token_ids": odd},
            {"role": "assistant", "tool_calls": [{"type": "malformed", "text": "path"}], "token_ids": odd},
        ],
        "tokenizer": chat.tokenizer.fingerprint,
    }
    tokens, mask = conversation_trace(read_conversation(row), chat)
    assert trained_parts(tokens, mask) == [[*odd, chat.end], odd]
    head = chat.user([odd])
    assert any(tokens[at : at + len(head)].tolist() == head for at in range(len(tokens)))
    row["tokenizer"] = "another"
    with pytest.raises(ValueError, match="token ids of another tokenizer"):
        conversation_trace(read_conversation(row), chat)
    del row["messages"][2]["token_ids"]
    with pytest.raises(ValueError, match="a malformed call has no token ids of this tokenizer"):
        conversation_trace(read_conversation(row), chat)
    del row["messages"][2:]
    tokens, mask = conversation_trace(read_conversation(row), chat)
    assert trained_parts(tokens, mask) == [chat.render_assistant("path", [])], "another tokenizer encodes the text"


USER, SAY = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [call("a", "read", "{}")]}
ANSWER = {"role": "tool", "tool_call_id": "a", "content": "z"}


def with_call(arguments, name="read"):
    return [USER, CALLS | {"tool_calls": [call("a", name, arguments)]}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "the row is not an object with messages"),
        ({"messages": []}, "no list of messages that is not empty"),
        ({"messages": [USER]}, "no message is the model's"),
        ({"messages": [USER, SAY, USER]}, "the conversation ends with a user"),
        ({"messages": [SAY]}, "message 1: the conversation begins with the model"),
        ({"messages": [USER, {"role": "robot", "content": ""}]}, "message 2: 'robot' is not a role; use system, user"),
        ({"messages": [USER, "x"]}, "message 2: None is not a role"),
        ({"messages": [USER, CALLS, USER, SAY]}, "message 3: it follows tool calls that have no answers"),
        ({"messages": [USER, CALLS, SAY]}, "message 3: it follows tool calls that have no answers"),
        ({"messages": [USER, ANSWER]}, "message 2: it is the answer of a tool, and no call waits for one"),
        ({"messages": [USER, SAY, ANSWER]}, "message 3: it is the answer of a tool, and no call"),
        ({"messages": [USER, CALLS, ANSWER, ANSWER]}, "message 4: it is the answer of a tool, and no call"),
        (
            {"messages": [USER, CALLS, ANSWER | {"tool_call_id": "b"}]},
            "message 3: it answers the call 'b', and no call of that id waits",
        ),
        ({"messages": with_call("{")}, "message 2: the arguments of call 1 are not JSON"),
        ({"messages": with_call('{"n": NaN}')}, "the arguments of call 1 are not JSON"),
        ({"messages": with_call("[]")}, "the arguments of call 1 are not a JSON object"),
        ({"messages": with_call("{}", "a b")}, "'a b' is not a tool name"),
        ({"messages": [USER, SAY | {"tool_calls": [{}]}]}, "call 1 has no function with a name"),
        ({"messages": [USER, SAY | {"tool_calls": {}}, SAY]}, None),
        ({"messages": [USER, SAY | {"tool_calls": "x"}]}, "the calls are not JSON"),
        ({"messages": [USER, SAY | {"tool_calls": {"id": "a"}}]}, "tool_calls is not a list"),
        ({"messages": [USER, SAY | {"train": "no"}]}, "train='no' is neither true nor false"),
        ({"messages": [USER, SAY | {"train": False}]}, "no message of the model is to be trained"),
        ({"messages": [USER, SAY | {"token_ids": ["x"]}]}, "token_ids is not a list of token ids"),
        (
            {"messages": [USER, SAY, {"role": "system", "content": "x"}]},
            "message 3: a message of the system comes after",
        ),
        ({"messages": [USER | {"content": [{"type": "image_url"}]}, SAY]}, "message 1: its content is not text"),
        ({"messages": [USER, SAY], "tools": {}}, "tools is not a list"),
        ({"messages": [USER, SAY], "tools": [{}]}, "tool 1 has no function with a name"),
        ({"messages": [USER, SAY], "tools": "["}, "the tools are not JSON"),
    ],
)
def test_bad_rows_say_why(row, reason):
    if reason is None:
        assert len(read_conversation(row).turns) == 2
        return
    with pytest.raises(ValueError, match=reason):
        read_conversation(row)


def test_rows_come_from_json_lines_parquet_and_urls(tmp_path):
    import fsspec
    import pyarrow as pa
    from pyarrow import parquet

    rows = [conversation(), {"messages": [USER, SAY], "tools": json.dumps([TOOL])}]
    lines = "\n\n".join(json.dumps(row) for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    fsspec.filesystem("memory").pipe_file("/bucket/a.jsonl", lines.encode())
    for path in (str(tmp_path / "a.jsonl"), "memory://bucket/a.jsonl"):
        assert list(read_rows(path)) == [(f"{path}, line 1", rows[0]), (f"{path}, line 3", rows[1])]
    path = str(tmp_path / "a.parquet")
    plain = {"messages": [USER, SAY, USER, CALLS]}
    parquet.write_table(pa.Table.from_pylist([plain, {"messages": [USER, SAY]}]), path)
    (place, row), _ = read_rows(path)
    assert place == f"{path}, row 1"
    chat = format_of("chatml")
    for got, want in zip(*(conversation_trace(read_conversation(r), chat) for r in (row, plain)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n{\n")
    (tmp_path / "a.parquet").write_text("x")
    for name, reason in (("a.jsonl", "line 2 is not JSON"), ("b.jsonl", "cannot be read"), ("a.parquet", "not a read")):
        with pytest.raises(UserError, match=f"{name}.*{reason}"):
            list(read_rows(str(tmp_path / name)))
