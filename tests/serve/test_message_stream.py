"""What is shown while a message is sampled is what the whole message says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.data.chat.control_text import ControlText
from composer_jax.data.chat.messages import AssistantMessage, MalformedToolCall, ToolCall
from composer_jax.data.chat.thinking import split_thinking
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.serve.message_stream import MessageStream, TextStream, text_before
from tests.data.formats import NAMES, calls, contents, format_of

READ = ToolCall("read", {"path": "a.py"})
ALL = (*NAMES, "kimi_thinking", "kimi_opens", "thinks", "opens", "xml", "keys", "harmony")


def pieces_of(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """The ids in chunks of these sizes, the last of which is the rest."""
    chunks, at = [], 0
    for size in sizes:
        chunks.append(ids[at : at + size])
        at += size
    return [*chunks, ids[at:]]


def run(stream, chunks):
    shown = [stream.add(chunk) for chunk in chunks]
    last, message = stream.finish()
    shown.append(last)
    assert "".join(piece.content for piece in shown) == message.content
    assert "".join(piece.reasoning for piece in shown) == message.reasoning
    return message, shown


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_pieces_add_up_to_what_parse_reads(name, data):
    chat = format_of(name)
    content, asked = data.draw(contents(name)), data.draw(st.lists(calls(name), max_size=2))
    ids = chat.render_assistant(content, asked)
    message, _ = run(MessageStream(chat), pieces_of(ids, data.draw(st.lists(st.integers(0, 5), max_size=6))))
    expected = chat.parse(ids)
    thought, said = split_thinking(expected.content, thinks=False)
    assert (message.content, message.reasoning, tuple(message.calls)) == (said, thought, expected.calls)


@pytest.mark.parametrize("name", ALL)
@given(ids=st.lists(st.integers(0, 310), max_size=30), sizes=st.lists(st.integers(0, 5), max_size=6))
def test_pieces_of_any_ids_add_up_to_the_same_message(name, ids, sizes):
    chat = format_of(name)
    assert run(MessageStream(chat), pieces_of(ids, sizes))[0] == run(MessageStream(chat), [ids])[0]


@pytest.mark.parametrize("name", [*ALL, "closed"])
@given(data=st.data())
def test_what_is_shown_loses_nothing_that_parse_reads(name, data):
    chat = format_of(name)
    units = ["<think>", "</think>", "<tool_call>", "\n", "\n\n", " ", "word", "1 bad", "</tool_call>"]
    said = data.draw(st.lists(st.sampled_from(units), max_size=8).map("".join))
    begun = data.draw(st.sampled_from(["", "<think>", "<think>\n\n</think>\n\n", "\n<think></think>\n"]))
    if isinstance(chat.tokenizer, ModelTokenizer):
        ids = ControlText(chat.tokenizer).ids(begun + said, "\0")
    else:
        ids = chat.tokenizer.encode(begun + said)
    message, _ = run(MessageStream(chat), [[i] for i in ids])
    parsed = chat.parse(ids)
    thought, content = split_thinking(parsed.content, thinks=False) if chat.reads_thinking else ("", parsed.content)
    content += "".join(call.text for call in parsed.calls if isinstance(call, MalformedToolCall))
    shown = message.reasoning + message.content
    for word in ("word", "1", "bad"):
        assert shown.count(word) == (thought + content).count(word), (shown, parsed)


@pytest.mark.parametrize("name", ["kimi_thinking", "kimi_opens", "thinks", "opens", "keys"])
def test_thoughts_are_shown_apart_and_early(name):
    chat = format_of(name)
    thoughtful = AssistantMessage("<think>\nhm, yes\n</think>\n\nIt is x.", (READ,), True)
    ids = chat.render_assistant(thoughtful.content, thoughtful.calls)
    message, shown = run(MessageStream(chat), [[i] for i in ids])
    assert (message.reasoning, message.content, message.calls) == ("hm, yes", "It is x.", [READ])
    first = next(at for at, piece in enumerate(shown) if piece.content)
    assert sum(bool(piece.reasoning) for piece in shown[:first]) > 1, "thoughts come before the answer, in pieces"
    assert sum(bool(piece.content) for piece in shown) > 1


@pytest.mark.parametrize("name", ["thinks", "opens", "keys"])
def test_a_call_that_is_thought_of_is_reasoning(name):
    chat = format_of(name)
    thought = "I could write <tool_call> x </tool_call>."
    ids = chat.render_assistant(f"<think>\n{thought}\n</think>\n\nDone.", [READ])
    if "<tool_call>" in chat.tokenizer.control:  # as a model may sample it
        spelled = chat.tokenizer.encode("<tool_call>")
        at = next(n for n in range(len(ids)) if ids[n : n + len(spelled)] == spelled)
        ids[at : at + len(spelled)] = [chat.tokenizer.id_of("<tool_call>")]
    message, _ = run(MessageStream(chat), [[i] for i in ids])
    assert (message.reasoning, message.content, message.calls) == (thought, "Done.", [READ])


@pytest.mark.parametrize("name", [*NAMES, "kimi_thinking", "kimi_opens", "xml", "keys"])
def test_a_call_is_never_shown_as_text(name):
    chat = format_of(name)
    message, shown = run(MessageStream(chat), [[i] for i in chat.render_assistant("I look.", [READ, READ])])
    assert message.calls == [READ, READ]
    assert "".join(piece.content for piece in shown) == "I look."


HARMONY_PIECES = (
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    "<|channel|>commentary<|message|>",
    "<|channel|>commentary to=functions.read <|constrain|>json<|message|>",
    "<|end|>",
    "<|start|>assistant",
    "<|return|>",
    "<|call|>",
    '{"path": "a.py"}',
    "words ",
    "\u4e2d",
)


@given(
    words=st.lists(st.sampled_from(HARMONY_PIECES), max_size=12),
    sizes=st.lists(st.integers(0, 5), max_size=6),
)
def test_parts_of_harmony_are_shown_as_parse_reads_them(words, sizes):
    chat = format_of("harmony")
    ids = ControlText(chat.tokenizer).ids("".join(words), "\0")
    message, _ = run(MessageStream(chat), pieces_of(ids, sizes))
    parsed = chat.parse(ids)
    malformed = "".join(call.text for call in parsed.calls if isinstance(call, MalformedToolCall))
    thought, said = split_thinking(parsed.content, thinks=False)
    assert (message.reasoning, message.content) == (thought, said + malformed)
    assert message.calls == [call for call in parsed.calls if isinstance(call, ToolCall)]


def test_parts_of_harmony_are_shown_apart_and_early():
    chat = format_of("harmony")
    ids = chat.render_assistant("<think>\nhm, yes\n</think>\n\nI look at it.", [READ])
    message, shown = run(MessageStream(chat), [[i] for i in ids])
    assert (message.reasoning, message.content, message.calls) == ("hm, yes", "I look at it.", [READ])
    first = next(at for at, piece in enumerate(shown) if piece.content)
    assert sum(bool(piece.reasoning) for piece in shown[:first]) > 1, "thoughts come before the answer, in pieces"
    assert sum(bool(piece.content) for piece in shown[:-1]) > 1


def test_a_malformed_call_is_shown_at_the_end():
    chat = format_of("qwen")
    ids = [
        *chat.tokenizer.encode("So "),
        chat.tokenizer.id_of("<tool_call>"),
        *chat.tokenizer.encode("{oops"),
        chat.end,
    ]
    message, _ = run(MessageStream(chat), [[i] for i in ids])
    assert message.calls == [] and message.content == "So {oops"


@given(
    words=st.lists(st.sampled_from(["a", "b", "ab", "\n\n", "x"]), max_size=12),
    sizes=st.lists(st.integers(0, 3), max_size=6),
)
def test_nothing_is_shown_of_a_stop_string_or_after_it(words, sizes):
    text, stop = "".join(words), ("ab\n", "\n\n", "bx")
    chunks = pieces_of(list(text.encode()), sizes)
    stream = TextStream(lambda ids: bytes(ids).decode(), stop)
    shown = [stream.add(chunk) for chunk in chunks]
    assert "".join([*shown, stream.finish()]) == text_before(text, stop)
    assert not any(mark in text_before(text, stop) for mark in stop)


def test_a_stop_string_ends_a_message():
    chat = format_of("qwen")
    ids = chat.tokenizer.encode("one two STOP three")
    message, shown = run(MessageStream(chat, ["STOP"]), [[i] for i in ids])
    assert message.content == "one two " and len([piece for piece in shown if piece.content]) > 1
