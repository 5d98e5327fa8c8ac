"""The format of Kimi K2: its exact text, its numbered calls, and the reasons given for malformed calls."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.data.chat.chat_format import Message, declarations
from composer_jax.data.chat.control_text import ControlText
from composer_jax.data.chat.jinja_template import JinjaTemplate
from composer_jax.data.chat.messages import AssistantMessage, MalformedToolCall, ToolCall
from tests.data.formats import Declaration, conversations, declared, decode, format_of
from tests.data.model_folders import KIMI

CHAT = format_of("kimi")
TOK = CHAT.tokenizer
READ, RUN = ToolCall("read", {"path": "a.py"}), ToolCall("run.tests-2", {})
TEMPLATE = JinjaTemplate(KIMI, {}, "the template of the tests")


def test_the_text_of_a_conversation():
    messages = [
        Message("system", "Be brief."),
        Message("user", "Go."),
        AssistantMessage("I look.", (READ, RUN), True),
        Message("tool", "x = 1"),
        Message("tool", "ok"),
        AssistantMessage("", (RUN,), True),
    ]
    text = (
        '<|im_system|>tool_declare<|im_middle|>[{"type":"function","function":{"name":"read",'
        '"description":"Reads.","parameters":{"type":"object"}}}]<|im_end|>'
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
        "<|im_user|>user<|im_middle|>Go.<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>I look.<|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{"path": "a.py"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.run.tests-2:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.read:0\nx = 1<|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.run.tests-2:1\nok<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|>"
        "<|tool_call_begin|>functions.run.tests-2:2<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|><|im_end|>"
    )
    ids = CHAT.render(messages, [Declaration("read", "Reads.", {"type": "object"})])
    assert decode(CHAT, ids) == text
    assert decode(CHAT, CHAT.render(messages)) == text.partition("]<|im_end|>")[2], "no tools, no declarations"
    assert CHAT.text(CHAT.render(messages[:2])) == "Be brief.Go."


@settings(max_examples=25)
@given(data=st.data())
def test_rendering_by_hand_is_rendering_through_a_template_of_that_style(data):
    messages, tools = data.draw(conversations("kimi")), declarations(data.draw(declared("kimi")))
    control = ControlText(TOK)
    mark = control.mark([str(message) for message in messages], tools)
    dicts, ids, count = [], [], 0
    for message in messages:
        if isinstance(message, AssistantMessage):
            ids = [f"functions.{call.name}:{number}" for number, call in enumerate(message.calls, count)]
            count += len(ids)
            functions = [
                {"function": {"name": c.name, "arguments": control.guard(c.arguments, mark)}} for c in message.calls
            ]
            dicts.append(
                {"role": "assistant", "content": control.guard(message.content, mark), "tool_calls": functions}
            )
        else:
            answered = {"tool_call_id": ids.pop(0)} if message.role == "tool" else {}
            dicts.append({"role": message.role, "content": control.guard(message.content, mark), **answered})
    text = TEMPLATE.text(dicts, control.broken(tools, mark), opened=False)
    tools = [Declaration(**tool["function"]) for tool in tools]
    assert control.ids(text, mark) == CHAT.render(messages, tools)


def encode_as_sampled(text):
    """The ids of a message in which the control tokens are spelled out."""
    return ControlText(TOK).ids(text, "\0")


def call(header, arguments):
    return f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<|tool_call_begin|>functions.read:0<|tool_call_end|>", "no arguments"),
        (call("read:0", "{}"), "'read:0' is not the id of a call"),
        (call("functions.read", "{}"), "not the id of a call"),
        (call("functions.a b:0", "{}"), "'a b' is not a tool name"),
        (call("functions.read:0", "[]"), "not a JSON object"),
        (call("functions.read:0", '{"a":'), "not JSON"),
        (call("functions.read:0", '{"a":"<|im_user|>"}'), "a control token is inside the call"),
        ("<|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{}", "does not end with <|tool_call_end|>"),
    ],
)
def test_malformed_calls_say_why(text, reason):
    good = call("functions.read:1", '{"path": "a.py"}')
    ids = encode_as_sampled(f"<|tool_calls_section_begin|>{text}{good}<|tool_calls_section_end|><|im_end|>")
    bad, fine = CHAT.parse(ids).calls
    assert isinstance(bad, MalformedToolCall) and reason in bad.reason
    assert fine == READ, "the next call is read all the same"


def test_an_answer_repeats_the_id_that_the_model_wrote():
    ids = encode_as_sampled(call("functions.read:7", "{}") + call(" oops\n" + "x" * 100, "{}") + "<|im_end|>")
    first, second = (decode(CHAT, piece) for piece in CHAT.bridge(ids, ["one", "two"]))
    assert first == "<|im_system|>tool<|im_middle|>## Return of functions.read:7\none<|im_end|>"
    assert second == f"<|im_system|>tool<|im_middle|>## Return of oops {'x' * 75}\ntwo<|im_end|>"


def test_calls_without_a_section_and_words_after_them_are_understood():
    ids = encode_as_sampled("a" + call(" functions.read:0\n", json.dumps(READ.arguments)) + " \nb<|im_end|>")
    assert CHAT.parse(ids) == AssistantMessage("a\nb", (READ,), True)


def test_the_end_of_the_section_ends_a_call_that_was_not_closed():
    begun = "<|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{}"
    message = CHAT.parse(
        encode_as_sampled(f"<|tool_calls_section_begin|>{begun}<|tool_calls_section_end|>words<|im_end|>")
    )
    assert message.content == "words"
    [bad] = message.calls
    assert isinstance(bad, MalformedToolCall) and "does not end with" in bad.reason
