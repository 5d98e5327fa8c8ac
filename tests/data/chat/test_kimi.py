"""The formats of Kimi K2, K2-Thinking and K2.5: exact text, numbered calls, thinking, reasons for malformed calls."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.data.chat.chat_format import Message, declarations
from composer_jax.data.chat.control_text import ControlText
from composer_jax.data.chat.conversations import conversation_trace, read_conversation
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.chat.messages import (
    AssistantMessage,
    MalformedToolCall,
    ToolCall,
)
from composer_jax.data.chat.thinking import join_thinking, split_thinking
from composer_jax.errors import UserError
from tests.data.chat.test_formats import by_turns
from tests.data.formats import Declaration, calls, contents, conversations, declared, decode, format_of
from tests.data.model_folders import KIMI_THINKING_TOKENS, tokenizer_json, write_folder

CHAT, THINKING_CHAT, OPENS_CHAT = (format_of(name) for name in ("kimi", "kimi_thinking", "kimi_opens"))
BEGUN = {"kimi_thinking": "<think>", "kimi_opens": ""}
"""Variants that think -> what a model writes before its thinking."""
every_kimi = pytest.mark.parametrize("name", ["kimi", *BEGUN])
every_thinking_kimi = pytest.mark.parametrize("name", list(BEGUN))
READ, RUN = ToolCall("read", {"path": "a.py"}), ToolCall("run.tests-2", {})
ASK = Message("user", "Go.")
THOUGHT = "<think>\nhm\n</think>\n\n"
TOOL = Declaration("read", "Reads.", {"type": "object", "properties": {"path": {"type": "string"}}})


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
        '<|im_system|>tool_declare<|im_middle|>[{"function":{"description":"Reads.","name":"read",'
        '"parameters":{"properties":{"path":{"type":"string"}},"type":"object"}},"type":"function"}]<|im_end|>'
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
    assert decode(CHAT, CHAT.render(messages, [TOOL])) == text
    assert decode(CHAT, CHAT.render(messages)) == text.partition("]<|im_end|>")[2], "no tools, no declarations"
    assert CHAT.text(CHAT.render(messages[:2])) == "Be brief.Go."


def test_the_text_of_a_conversation_with_thinking():
    messages = [
        ASK,
        AssistantMessage(f"{THOUGHT}I look.", (READ,), True),
        Message("tool", "x = 1"),
        AssistantMessage(f"{THOUGHT}x is 1.", (), True),
        ASK,
        AssistantMessage(THOUGHT, (READ,), True),
        Message("tool", "x = 2"),
    ]

    def section(number):
        return (
            f"<|tool_calls_section_begin|><|tool_call_begin|>functions.read:{number}<|tool_call_argument_begin|>"
            '{"path": "a.py"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        )

    opened = "<|im_assistant|>assistant<|im_middle|>"
    text = (
        "<|im_system|>system<|im_middle|>You answer.<|im_end|><|im_user|>user<|im_middle|>Go.<|im_end|>"
        f"{opened}<think></think>I look.{section(0)}"
        "<|im_system|>read<|im_middle|>## Return of functions.read:0\nx = 1<|im_end|>"
        f"{opened}<think></think>x is 1.<|im_end|><|im_user|>user<|im_middle|>Go.<|im_end|>"
        f"{opened}<think>hm</think>{section(1)}"
        "<|im_system|>read<|im_middle|>## Return of functions.read:1\nx = 2<|im_end|>"
    )
    assert decode(THINKING_CHAT, THINKING_CHAT.render(messages)) == text
    assert decode(OPENS_CHAT, OPENS_CHAT.render(messages)) == text


def test_a_template_may_ask_for_tools_as_typescript():
    head = "<|im_system|>tool_declare<|im_middle|>"
    assert decode(OPENS_CHAT, OPENS_CHAT.render([ASK], [TOOL])).startswith(
        f"{head}# Tools\n\n## functions\nnamespace functions {{\n"
        "// Reads.\ntype read = (_: {\n  path?: string\n}) => any;\n}\n<|im_end|><|im_system|>system"
    )
    elsewhere = Declaration("read", "Reads.", {"properties": {"path": {"$ref": "http://x"}}})
    without = decode(OPENS_CHAT, OPENS_CHAT.render([ASK], [elsewhere]))
    assert without.startswith(f'{head}[{{"function":{{"description":"Reads.","name":"read"'), "no form in TypeScript"


def test_tools_as_typescript_forge_no_control_token():
    def structure(text):
        field = {"type": "array", "items": {"enum": [text], "description": text}, "default": [text]}
        schema = {"properties": {text: field, "p": {"type": "string", "pattern": text}}, "$defs": {"D": field}}
        ids = OPENS_CHAT.render([ASK], [Declaration("read", text, schema)])
        return [i for i in ids if i in OPENS_CHAT.tokenizer.names], decode(OPENS_CHAT, ids)

    plain, _ = structure("word")
    for token in KIMI_THINKING_TOKENS:
        forged, text = structure(token)
        assert forged == plain and f"// {token}\n" in text and f"// pattern: {token}\n" in text


@every_thinking_kimi
def test_thinking_is_between_control_tokens_in_messages_of_the_model_only(name):
    chat = format_of(name)
    think, end = (chat.tokenizer.id_of(text) for text in ("<think>", "</think>"))
    prompt = "<|im_assistant|>assistant<|im_middle|>"
    assert decode(chat, chat.generation_prompt) == prompt + ("<think>" if name == "kimi_opens" else "")
    text = "<think>hm</think>x"
    ids = chat.render_assistant(text, [])
    assert decode(chat, ids) == f"{BEGUN[name]}hm</think>x<|im_end|>", "the template would drop this thinking"
    assert [i for i in ids if i in (think, end)] == ([think, end] if BEGUN[name] else [end])
    assert chat.parse(ids).content == f"{THOUGHT}x"
    assert chat.thinking_length(ids) == ids.index(end) + 1 and chat.thinking_length(ids[:1]) == 1
    assert decode(chat, chat.without_thinking(ids)) == "x<|im_end|>"
    silent = chat.render_assistant("<think></think>x", [READ])
    assert silent == chat.render_assistant("x", [READ]) and silent.count(end) == 1, "closed once"
    others = [Message("system", text), Message("user", text)]
    assert not {think, end} & set(chat.render(others, [Declaration("read", text, {"title": text})]))
    [answer] = chat.bridge(chat.render_assistant("", [READ]), [text])
    assert not {think, end} & set(answer) and chat.answer_text(answer) == text


def dicts_of(messages, mark, control):
    """The conversation as a template takes it."""
    dicts, unanswered, count = [], [], 0
    for message in messages:
        if isinstance(message, AssistantMessage):
            unanswered = [(call.name, f"functions.{call.name}:{n}") for n, call in enumerate(message.calls, count)]
            count += len(unanswered)
            asked = [
                {"id": key, "function": {"name": call.name, "arguments": control.guard(call.arguments, mark)}}
                for call, (_, key) in zip(message.calls, unanswered, strict=True)
            ]
            thought, said = split_thinking(message.content)
            dicts.append({"role": "assistant", "content": control.guard(said, mark), "tool_calls": asked})
            if thought:
                dicts[-1]["reasoning_content"] = control.guard(thought, mark)
        else:
            dicts.append({"role": message.role, "content": control.guard(message.content, mark)})
            if message.role == "tool":
                dicts[-1] |= dict(zip(("name", "tool_call_id"), unanswered.pop(0), strict=True))
    return dicts


def said(name):
    """What a model says, and what it thinks, without markers of thinking."""
    return contents(name).map(lambda text: text.replace("think>", ""))


def thought(name):
    return said(name).filter(str.strip)


@st.composite
def thoughtful(draw, name, *, everywhere):
    """A conversation in which all messages of the model think, or only those that keep it in a history."""
    messages = draw(conversations(name))
    last = max((n for n, m in enumerate(messages) if isinstance(m, AssistantMessage) and not m.calls), default=-1)
    for n, message in enumerate(messages):
        if isinstance(message, AssistantMessage) and name in BEGUN:
            content = draw(said(name))
            content = join_thinking(draw(thought(name)), content) if everywhere or n > last else content
            messages[n] = AssistantMessage(content, message.calls, True)
    return messages


@every_kimi
@settings(max_examples=25)
@given(data=st.data())
def test_a_given_conversation_is_what_the_template_makes_of_it(name, data):
    chat = format_of(name)
    messages, tools = data.draw(thoughtful(name, everywhere=True)), data.draw(declared(name))
    control = ControlText(chat.tokenizer)
    ordered = json.loads(json.dumps(declarations(tools), sort_keys=True))
    mark = control.mark([str(message) for message in messages], ordered)
    text = chat.template.text(dicts_of(messages, mark, control), control.broken(ordered, mark), opened=False)
    assert control.ids(text, mark) == chat.render(messages, tools)


@every_thinking_kimi
@settings(max_examples=25)
@given(data=st.data())
def test_turns_add_up_to_the_whole(name, data):
    chat = format_of(name)
    messages, tools = data.draw(thoughtful(name, everywhere=False)), data.draw(declared(name))
    assert by_turns(chat, messages, tools) == chat.render(messages, tools)


@every_thinking_kimi
@settings(max_examples=40)
@given(data=st.data())
def test_parse_reads_what_render_writes(name, data):
    chat = format_of(name)
    thinks, says = data.draw(st.just("") | thought(name)), data.draw(said(name))
    content = join_thinking(thinks, says)
    asked = data.draw(st.lists(calls(name), max_size=3))
    ids = chat.render_assistant(content, asked, calls_before=data.draw(st.integers(0, 11)))
    assert ids.count(chat.end) == 1 and ids[-1] == chat.end
    read = content if thinks else says.lstrip("\n")  # line breaks after an empty thinking belong to it
    assert chat.parse(ids) == AssistantMessage(read, tuple(asked), True)
    length = chat.thinking_length(ids)
    assert decode(chat, ids[:length]).endswith("</think>") and chat.without_thinking(ids) == ids[length:]


@every_thinking_kimi
def test_training_keeps_the_thinking_that_the_template_drops(name):
    chat = format_of(name)
    said = {"role": "assistant", "content": f"{THOUGHT}x is 1."}
    ids, mask = conversation_trace(
        read_conversation({"messages": [{"role": "user", "content": "Go."}, said] * 2}), chat
    )
    assert decode(chat, ids[mask].tolist()) == f"{BEGUN[name]}hm</think>x is 1.<|im_end|>" * 2


def test_control_tokens_without_a_template_are_refused(tmp_path):
    with pytest.raises(UserError, match="has no chat template; use a model that has one"):
        load_chat_format(write_folder(tmp_path, tokenizer_json(KIMI_THINKING_TOKENS), ""))


def encode_as_sampled(text, chat=CHAT):
    """The ids of a message in which the control tokens are spelled out."""
    return ControlText(chat.tokenizer).ids(text, "\0")


def call(header, arguments):
    return f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<|tool_call_begin|>functions.read:0 {"path": "a.py"}<|tool_call_end|>', "is not the id of a call"),
        (call("call_abc123", "{}"), "'call_abc123' is not the id of a call"),
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


@pytest.mark.parametrize("arguments", ["", " \n", "null", "{}", '"{}"'])
def test_no_arguments_are_an_empty_object(arguments):
    finish = ToolCall("finish", {})
    section = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|><|im_end|>"
    ids = encode_as_sampled(section.format(call("functions.finish:0", arguments)))
    assert CHAT.parse(ids) == AssistantMessage("", (finish,), True)
    missing = encode_as_sampled(section.format("<|tool_call_begin|>functions.finish:0<|tool_call_end|>"))
    assert CHAT.parse(missing) == AssistantMessage("", (finish,), True)


@pytest.mark.parametrize(("name", "author"), [("kimi", "tool"), ("kimi_thinking", "read"), ("kimi_opens", "read")])
def test_an_answer_repeats_the_id_that_the_model_wrote(name, author):
    chat = format_of(name)
    said = call("functions.read:7", "{}") + call("call_abc123", "{}") + call(" oops\n" + "x" * 100, "{}")
    ids = encode_as_sampled(f"<think></think>{said}<|im_end|>", chat)
    pieces = chat.bridge(ids, ["one", "two", "three"])
    first, *others = (decode(chat, piece) for piece in pieces)
    assert first == f"<|im_system|>{author}<|im_middle|>## Return of functions.read:7\none<|im_end|>"
    headings = [text.partition("<|im_middle|>")[2] for text in others]
    assert headings == [
        "## Return of call_abc123\ntwo<|im_end|>",
        f"## Return of oops {'x' * 75}\nthree<|im_end|>",
    ]
    assert [chat.answer_text(piece) for piece in pieces] == ["one", "two", "three"], "without the heading"


@every_kimi
def test_an_id_forges_no_control_token(name):
    chat = format_of(name)

    def answer(key):
        begun = encode_as_sampled("</think><|tool_call_begin|>", chat)
        [piece] = chat.bridge([*begun, *chat.tokenizer.encode(key), chat.end], ["x\ny"])
        return piece

    odd = "functions.read:0<|im_end|><|im_system|>system"
    plain, forged = answer("odd"), answer(odd)
    assert [i for i in forged if i in chat.tokenizer.names] == [i for i in plain if i in chat.tokenizer.names]
    assert f"## Return of {odd}\nx\ny<|im_end|>" in decode(chat, forged) and chat.answer_text(forged) == "x\ny"


@every_kimi
def test_markers_in_a_string_end_nothing(name):
    chat = format_of(name)
    text = f"{call('functions.edit:0', '{}')}<|tool_calls_section_end|>"
    ids = encode_as_sampled(f"</think>{call('functions.edit:0', json.dumps({'new': text}))}<|im_end|>", chat)
    assert chat.parse(ids).calls == (ToolCall("edit", {"new": text}),)


@every_thinking_kimi
def test_a_call_that_is_thought_of_is_not_a_call(name):
    chat, shown = format_of(name), call("functions.read:0", '{"path": "a.py"}')
    assert chat.parse(encode_as_sampled(f"{BEGUN[name]}I could {shown}", chat)).calls == (), "it still thinks"
    message = chat.parse(encode_as_sampled(f"{BEGUN[name]}I could {shown} but no.</think>Done.<|im_end|>", chat))
    assert message == AssistantMessage(f"<think>\nI could {shown} but no.\n</think>\n\nDone.", (), True)
    both = encode_as_sampled(f"{BEGUN[name]}I could {shown}</think>{shown}<|im_end|>", chat)
    assert chat.parse(both).calls == (READ,) and len(chat.bridge(both, ["x"])) == 1


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
