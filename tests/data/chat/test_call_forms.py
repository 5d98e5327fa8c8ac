"""Calls in the form of a family: XML and keys with values; lenient JSON; markers that are only mentioned."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.data.chat.call_forms import CALL
from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.control_text import ControlText
from composer_jax.data.chat.messages import AssistantMessage, MalformedToolCall, ToolCall
from composer_jax.data.chat.sampled_text import SampledText
from composer_jax.data.chat.template_tools import TemplateToolsFormat
from tests.data.formats import Declaration, decode, format_of

ASK = Message("user", "Go.")
EDIT = ToolCall("edit_file", {"path": "p.py", "old": "END = '</tool_call>'", "new": 'END = "<tool_call>x</tool_call>"'})
LIST = ToolCall("shell", {"command": "ls"})
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": ["integer", "null"]}}}
TOOLS = [Declaration("say", "Says.", SCHEMA)]
FORMS = ("qwen", "xml", "keys")


def as_sampled(chat, text):
    """The ids of a message in which control tokens are spelled out."""
    return ControlText(chat.tokenizer).ids(text, "\0")


def json_call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "finish"{arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", {}),
        (', "arguments": null', {}),
        (', "arguments": ""', {}),
        (', "arguments": {}, "id": 1', {}),
        (', "arguments": "{\\"a\\": 1}"', {"a": 1}),
        (', "parameters": {"a": 1}', {"a": 1}),
        (', "arguments": {"command": "cat > a.py <<X\n\tprint(1)\nX"}', {"command": "cat > a.py <<X\n\tprint(1)\nX"}),
        (', "arguments": {"command": "mkdir -p test/{a,b"}', {"command": "mkdir -p test/{a,b"}),
    ],
)
@pytest.mark.parametrize("name", ["qwen", "chatml", "thinks"])
def test_json_calls_as_other_servers_read_them(name, text, want):
    chat = format_of(name)
    assert chat.parse(as_sampled(chat, json_call(text) + "<|im_end|>")).calls == (ToolCall("finish", want),)


@pytest.mark.parametrize("name", ["qwen", "chatml", "thinks"])
def test_a_marker_in_an_argument_ends_nothing(name):
    chat = format_of(name)
    said = json.dumps({"name": EDIT.name, "arguments": EDIT.arguments})
    text = f"I edit the parser.\n<tool_call>\n{said}\n</tool_call><|im_end|>"
    assert chat.parse(as_sampled(chat, text)) == AssistantMessage("I edit the parser.", (EDIT,), True)


@pytest.mark.parametrize("name", ["thinks", "keys"])
def test_a_call_that_is_thought_of_is_not_a_call(name):
    chat = format_of(name)
    call = decode(chat, chat.render_assistant("", [LIST])).partition("<tool_call>")
    shown = f"<tool_call>{call[2]}".removesuffix(chat.tokenizer.names[chat.end_tokens[-1]])
    shown = shown[: shown.index("</tool_call>") + len("</tool_call>")]
    thinking = as_sampled(chat, f"<think>I could {shown} but no.</think>")
    only = chat.parse([*thinking, *chat.tokenizer.encode("Done."), chat.end])
    assert only.calls == () and only.content.endswith("Done.") and "<tool_call>" in only.content
    both = chat.parse([*thinking, *as_sampled(chat, shown), chat.end])
    assert both.calls == (LIST,)
    assert chat.parse(as_sampled(chat, f"<think>I list.{shown}")).calls == (), "the thinking has not ended"


def test_the_form_is_that_of_the_template():
    read = ToolCall("read_file", {"path": "a.py", "start": 3, "all": True, "kinds": ["x", None]})
    written = {
        "xml": "I look.\n<tool_call>\n<function=read_file>\n<parameter=path>\na.py\n</parameter>\n<parameter=start>\n3"
        '\n</parameter>\n<parameter=all>\nTrue\n</parameter>\n<parameter=kinds>\n["x", null]\n</parameter>\n</function>'
        "\n</tool_call><|im_end|>",
        "keys": "\n<think></think>\nI look.\n<tool_call>read_file\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>"
        "\n<arg_key>start</arg_key>\n<arg_value>3</arg_value>\n<arg_key>all</arg_key>\n<arg_value>true</arg_value>\n"
        '<arg_key>kinds</arg_key>\n<arg_value>["x", null]</arg_value>\n</tool_call><|observation|>',
    }
    for name, text in written.items():
        chat = format_of(name)
        assert type(chat) is TemplateToolsFormat
        ids = chat.render_assistant("I look.", [read])
        assert decode(chat, ids) == text
        assert chat.parse(ids) == AssistantMessage("I look.", (read,), True)


@pytest.mark.parametrize("name", ["xml", "keys"])
def test_the_schema_says_what_a_value_is(name):
    chat = format_of(name)
    for text, n in (("5", 5), ("null", None), ('{"a": 1}', 0), ("", 1)):
        call = ToolCall("say", {"text": text, "n": n})
        ids = chat.render_assistant("", [call])
        assert chat.parse(ids, TOOLS).calls == (call,)
    [untold] = chat.parse(chat.render_assistant("", [ToolCall("say", {"text": "5"})])).calls
    assert untold == ToolCall("say", {"text": 5}), "without a schema, what looks like a number is one"


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        ("xml", "<function=f>\n<parameter=a>\n1\n</function>", "a call is <function=NAME>"),
        ("xml", "\n<function=a b>\n</function>\n", "'a b' is not a tool name"),
        ("xml", "\n<function=f>\n</function>\nmore", "a call is <function=NAME>"),
        ("xml", "\n<function=f>\n" + "<parameter=a>\n1\n</parameter>\n" * 2 + "</function>\n", "'a' comes twice"),
        ("xml", "\n<function=f>\n<parameter=>\n1\n</parameter>\n</function>\n", "an argument has no name"),
        ("keys", "f\n<arg_key>a</arg_key>\n", "a call is a name"),
        ("keys", "f\n<arg_value>a</arg_value>\n", "a call is a name"),
        ("keys", "f\n<arg_key>a</arg_key>x<arg_value>1</arg_value>\n", "a call is a name"),
    ],
)
def test_malformed_calls_say_why(name, body, reason):
    chat = format_of(name)
    end = chat.tokenizer.names[chat.end]
    [call] = chat.parse(as_sampled(chat, f"<tool_call>{body}</tool_call>{end}")).calls
    assert isinstance(call, MalformedToolCall) and reason in call.reason


MARKERS = ("</parameter>", "<parameter=a>", "</function>", "<arg_key>", "</arg_value>", *CALL, "<think>")
VALUES = st.lists(st.sampled_from([*MARKERS, "\n", " ", "x", "5", '"', "true"]), max_size=5).map("".join)


@pytest.mark.parametrize("name", ["xml", "keys"])
@given(VALUES, VALUES)
def test_values_that_spell_markers_are_read_back_or_refused(name, first, second):
    chat = format_of(name)
    call = ToolCall("say", {"text": first, "more": second})
    tools = [Declaration("say", "", {"properties": {"text": {"type": "string"}, "more": {"type": "string"}}})]
    try:
        ids = chat.render_assistant("so", [call, LIST])
    except ValueError:
        assert name == "xml", "the markers of keys and values are control tokens, which text cannot spell"
        return
    assert chat.parse(ids, tools) == AssistantMessage("so", (call, LIST), True)


def test_a_message_that_the_next_one_ends():
    """The model samples the first control token of the next message, whose frame then lacks it."""
    chat = format_of("keys")
    names = chat.tokenizer.names
    assert [names[i] for i in chat.end_tokens[:2]] == ["<|user|>", "<|observation|>"]
    said, asked = chat.render_assistant("Ok.", []), chat.render_assistant("", [LIST])
    assert names[said[-1]] == "<|user|>" and names[asked[-1]] == "<|observation|>"
    whole = [ASK, AssistantMessage("Ok.", (), True), ASK]
    turns = [*chat.render([ASK]), *chat.generation_prompt, *said, *chat.close(said)]
    turns += chat.user(["Go."], follows=turns)
    assert decode(chat, turns).count("<|user|>") == 2
    bridge = [i for piece in chat.bridge(asked, ["1", "2"][:1]) for i in piece]
    assert decode(chat, bridge) == "\n<tool_response>\n1\n</tool_response>"
    cut = chat.bridge([*asked[:-1]], ["1"])[0]
    assert names[cut[0]] == "<|observation|>", "a message that was cut off gets the whole frame"
    assert chat.close(said[:-1]) == [] and chat.parse(said[:-1]).complete is False
    after = [ASK, AssistantMessage("", (LIST,), True), Message("tool", "1")]
    assert [*chat.render([ASK]), *chat.generation_prompt, *asked, *bridge] == chat.render(after)
    assert chat.render(whole[:2])[-1] == chat.end and chat.render(after[:2])[-1] == asked[-1]


FORGOTTEN = {
    "xml": "<function=f>\n<parameter=text>\nls\n</function>\n",
    "keys": "f\n<arg_key>text</arg_key>\n<arg_value>ls\n",
    "qwen": '{"name": "f", "arguments": {"text": "ls}}',
}


@pytest.mark.parametrize("name", FORMS)
def test_a_value_that_is_not_ended_spoils_one_call_only(name):
    chat = format_of(name)
    good = decode(chat, chat.render_assistant("", [LIST]))
    good = good[good.index("<tool_call>") :]
    bad, fine = chat.parse(as_sampled(chat, f"<tool_call>\n{FORGOTTEN[name]}</tool_call>\n{good}")).calls
    assert isinstance(bad, MalformedToolCall) and fine == LIST


@pytest.mark.parametrize("name", ["qwen", "chatml"])
def test_a_marker_in_quotes_before_a_call_keeps_the_call(name):
    chat = format_of(name)
    good = decode(chat, chat.render_assistant("", [LIST]))
    bad, fine = chat.parse(as_sampled(chat, f'The text "<tool_call>" begins one. Then: {good}')).calls
    assert isinstance(bad, MalformedToolCall) and fine == LIST


def test_calls_without_arguments_end_where_their_marker_is():
    chat = format_of("keys")
    text = "<tool_call>f\n</tool_call>\nthen </arg_value> x"
    assert chat.parse(as_sampled(chat, text)).calls == (ToolCall("f", {}),)
    half = "<tool_call>f<arg_key>a</arg_key><tool_call>g<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    bad, fine = chat.parse(as_sampled(chat, half)).calls
    assert isinstance(bad, MalformedToolCall) and fine == ToolCall("g", {"a": 1})


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"type": ["string", "integer"]}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": 5}, "5", 5),
        ({"type": ["string", {}]}, "5", "5"),
        ("no schema", "true", True),
        ({}, "1e999", "1e999"),
    ],
)
def test_schemas_of_clients_say_what_a_value_is(schema, text, value):
    chat = format_of("xml")
    sampled = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    tools = [Declaration("f", "", {"properties": {"a": schema}})]
    assert chat.parse(as_sampled(chat, sampled), tools).calls == (ToolCall("f", {"a": value}),)


UNITS = (
    "<tool_call>",
    "<tool_call>f",
    "<tool_call>f<arg_key>",
    "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "<tool_call>\n<function=f>\n<parameter=a>\n",
    "<tool_call>\n<function=f><tool_call>",
    '<tool_call>{"a": "',
    "</tool_call>",
)


@pytest.mark.parametrize("name", [*FORMS, "chatml", "kimi"])
@pytest.mark.parametrize("unit", UNITS)
def test_a_message_that_repeats_a_marker_is_read_in_one_pass(name, unit, monkeypatch):
    """Twice the message costs twice the searches; models do repeat themselves until their context is full."""
    chat = format_of(name)
    searches = 0

    def counted(method):
        def search(self, *arguments):
            nonlocal searches
            searches += 1
            return method(self, *arguments)

        return search

    for method in ("find", "next_control"):
        monkeypatch.setattr(SampledText, method, counted(getattr(SampledText, method)))
    costs = []
    for count in (100, 200):
        searches = 0
        chat.parse(as_sampled(chat, unit * count))
        costs.append(searches)
    assert costs[1] <= 2 * costs[0] + 10
