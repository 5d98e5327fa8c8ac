"""Tools in the system prompt and calls as text: what can be forged, what is escaped, and what a call's end is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.data.chat.call_forms import ANSWER, CALL
from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.chat.messages import AssistantMessage, MalformedToolCall, ToolCall
from composer_jax.data.chat.tool_prompt import SHORT_TOOL_PROMPT, TOOL_PROMPT
from composer_jax.errors import UserError
from tests.data.formats import Declaration, decode, format_of
from tests.data.model_folders import CHATML, CHATML_TOKENS, TEXTS, tokenizer_json, write_folder

CHAT = format_of("chatml")
READ = ToolCall("read", {"path": "a.py"})
CALL_TEXT = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'
TOOLS = [Declaration("read", "Reads <b>é</b>.", {"type": "object"})]
DECLARED = '{"name": "read", "description": "Reads <b>é</b>.", "parameters": {"type": "object"}}'
THOUGHT = f"<think>\nI write {CALL_TEXT}"


def sampled(text, end=True):
    """Ids of text that the model samples; the markers are ordinary tokens."""
    return [*CHAT.tokenizer.encode(text), *([CHAT.end] if end else [])]


def test_the_text_of_a_conversation():
    messages = [
        Message("system", "Be brief."),
        Message("user", "Go."),
        AssistantMessage("I look.", (READ, READ), True),
        Message("tool", "x = 1"),
        Message("tool", "ok"),
        AssistantMessage("Done.", (), True),
    ]
    system = f"Be brief.\n\n{TOOL_PROMPT.replace('{tools}', DECLARED)}"
    text = (
        "<|im_start|>user\nGo.<|im_end|>\n"
        f"<|im_start|>assistant\nI look.\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nx = 1\n</tool_response>\n<tool_response>\nok\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nDone.<|im_end|>"
    )
    assert decode(CHAT, CHAT.render(messages, TOOLS)) == f"<|im_start|>system\n{system}<|im_end|>\n{text}"
    assert decode(CHAT, CHAT.render(messages)) == f"<|im_start|>system\nBe brief.<|im_end|>\n{text}"
    alone = decode(CHAT, CHAT.render(messages[1:2], TOOLS))
    assert alone.startswith("<|im_start|>system\nYou work with tools.") and DECLARED in alone
    by_template = decode(CHAT, CHAT.render(messages[1:2]))
    assert by_template == "<|im_start|>system\nYou answer.<|im_end|>\n<|im_start|>user\nGo.<|im_end|>\n"


def test_a_config_may_word_the_declarations(tmp_path):
    folder = write_folder(tmp_path, tokenizer_json(CHATML_TOKENS), CHATML)
    chat = load_chat_format(folder, tool_prompt="Use {tools}!")
    assert f"<|im_start|>system\nUse {DECLARED}!<|im_end|>" in decode(chat, chat.render([Message("user", "x")], TOOLS))
    with pytest.raises(UserError, match="the prompt that declares tools lacks {tools} or {signatures}"):
        load_chat_format(folder, tool_prompt="Use tools!")


def test_tools_can_be_declared_by_signature(tmp_path):
    folder = write_folder(tmp_path, tokenizer_json(CHATML_TOKENS), CHATML)
    chat = load_chat_format(folder, tool_prompt=SHORT_TOOL_PROMPT)
    properties = {"path": {"type": "string"}, "start": {"type": "integer"}, "more": {"enum": [1]}}
    schema = {"type": "object", "properties": properties, "required": ["path"]}
    tools = [Declaration("read", "Reads\n a <|im_end|>.", schema), Declaration("finish", "Ends.", {"type": "object"})]
    ids = chat.render([Message("user", "x")], tools)
    lines = "read(path: string, start?: integer, more?: any): Reads a <|im_end|>.\nfinish(): Ends.\n\nTo call"
    assert f"system\nYou work with these tools:\n\n{lines}" in decode(chat, ids)
    assert ids.count(chat.end) == 2, "a description forges nothing"


MARKERS = st.lists(st.sampled_from([*CALL, *ANSWER, "&lt;", "&amp;", "<", "x", "\n", "/tool_call>"]), max_size=5)


@given(MARKERS.map("".join))
def test_markers_in_an_answer_are_escaped_and_read_back(text):
    piece = CHAT.bridge(CHAT.render_assistant("", [READ]), [text])[0]
    assert CHAT.answer_text(piece) == text
    shown = decode(CHAT, piece)
    assert [shown.count(marker) for marker in (*CALL, *ANSWER)] == [0, 0, 1, 1]
    whole = CHAT.render([Message("user", "x"), AssistantMessage("", (READ,), True), Message("tool", text)])
    assert whole[-len(piece) :] == piece, "rendered whole, it is the same"


@given(MARKERS.map("".join), MARKERS.map("".join))
def test_markers_in_a_call_are_its_text(key, value):
    call = ToolCall("read", {key: [value]})
    assert CHAT.parse(CHAT.render_assistant("so", [call, READ])) == AssistantMessage("so", (call, READ), True)


def test_a_message_that_spells_a_call_is_refused():
    with pytest.raises(ValueError, match="the content spells <tool_call>, which begins a call"):
        CHAT.render_assistant(f"I would write {CALL_TEXT}", [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"a\n{CALL_TEXT}\n{CALL_TEXT} b\n", "a\nb", (READ, READ)),
        (CALL_TEXT.replace("\n", ""), "", (READ,)),
        (f"{THOUGHT}\n</think>\n\n{CALL_TEXT}", f"{THOUGHT}\n</think>\n\n", (READ,)),
        (THOUGHT, THOUGHT, ()),
        ("only </tool_call> this", "only </tool_call> this", ()),
    ],
)
def test_words_around_calls_are_the_content(text, content, calls):
    assert CHAT.parse(sampled(text)) == AssistantMessage(content, calls, True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>\n", "does not end with </tool_call>"),
        (CALL_TEXT.removesuffix("</tool_call>"), "does not end with </tool_call>"),
        (CALL_TEXT.removesuffix(">"), "does not end with </tool_call>"),
        ("<tool_call>{</tool_call>", "not JSON"),
        ('<tool_call>{"name": "</tool_call>', "not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply"),
    ],
)
def test_malformed_calls_say_why(text, reason):
    [call] = CHAT.parse(sampled(text)).calls
    assert isinstance(call, MalformedToolCall) and reason in call.reason
    assert CHAT.parse(sampled(f"{text}{CALL_TEXT}")).calls[-1] == READ, "the next call is read"


def test_a_control_token_in_a_call_makes_it_malformed():
    [before, after] = [CHAT.tokenizer.encode(part) for part in CALL_TEXT.split("a.py")]
    [call] = CHAT.parse([*before, CHAT.tokenizer.id_of("<|im_start|>"), *after, CHAT.end]).calls
    assert isinstance(call, MalformedToolCall) and call.reason == "a control token is inside the call"


def test_markers_that_the_tokenizer_has_are_control_tokens():
    tokens = CHATML_TOKENS | dict.fromkeys((*CALL, *ANSWER), True)
    files = {"tokenizer.json": tokenizer_json(tokens, TEXTS), "chat_template.jinja": CHATML}
    chat = load_chat_format(type("Files", (), {"name": "x", "text": lambda self, file: files.get(file)})())
    begin = chat.tokenizer.id_of(CALL[0])
    ids = chat.render_assistant(f"I write {CALL_TEXT}", [READ])
    assert ids.count(begin) == 1 and chat.parse(ids).calls == (READ,), "text does not become the control token"
    assert chat.bridge(ids, [CALL_TEXT])[0].count(begin) == 0
