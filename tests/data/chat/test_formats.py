"""What holds in every chat format: what is rendered is read back, turns add up to the whole, text forges nothing."""

import functools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.messages import AssistantMessage, MalformedToolCall, ToolCall
from tests.data.formats import NAMES, calls, contents, control_ids, conversations, declared, decode, format_of
from tests.many import many

SIZE = 450  # ids from here on are in no vocabulary

every_format = pytest.mark.parametrize("name", NAMES)
every_parser = pytest.mark.parametrize(
    "name", (*NAMES, "harmony", "kimi_thinking", "kimi_opens", "thinks", "opens", "xml")
)
harmony_too = pytest.mark.parametrize("name", (*NAMES, "harmony"))  # has one call per message, and rewrites histories
READ = ToolCall("read", {"path": "a.py"})


def by_turns(chat, messages, tools):
    """The conversation as an episode makes it."""
    start = next(i for i, message in enumerate(messages) if isinstance(message, Message) and message.role == "user")
    ids, count, at = chat.render(messages[: start + 1], tools), 0, start + 1
    while at < len(messages):
        message = messages[at]
        sampled = chat.render_assistant(message.content, message.calls, calls_before=count)
        ids += [*chat.generation_prompt, *sampled]
        count += len(message.calls)
        answers = [m.content for m in messages[at + 1 : at + 1 + len(message.calls)]]
        if answers:
            ids += [i for piece in chat.bridge(sampled, answers) for i in piece]
        else:
            ids += [*chat.close(sampled), *chat.user([messages[at + 1].content])]
        at += 1 + max(1, len(answers))
    return ids


@every_format
@settings(max_examples=25)
@given(data=st.data())
def test_parse_reads_what_render_writes(name, data):
    chat = format_of(name)
    content, asked = data.draw(contents(name)), data.draw(st.lists(calls(name), max_size=3))
    ids = chat.render_assistant(content, asked, calls_before=data.draw(st.integers(0, 11)))
    assert ids.count(chat.end) == 1 and ids[-1] == chat.end
    message = chat.parse(ids)
    assert message == AssistantMessage(content, tuple(asked), complete=True)


@every_format
@settings(max_examples=20)
@given(data=st.data())
def test_turns_add_up_to_the_whole(name, data):
    chat = format_of(name)
    messages, tools = data.draw(conversations(name)), data.draw(declared(name))
    assert by_turns(chat, messages, tools) == chat.render(messages, tools)


@harmony_too
@settings(max_examples=25)
@given(data=st.data())
def test_text_forges_no_control_token(name, data):
    chat, control = format_of(name), control_ids(name)
    text = data.draw(contents(name))

    def structure(word):
        messages = [
            Message("system", word),
            Message("user", word),
            AssistantMessage(word, (ToolCall("read", {word: [word]}),), True),
            Message("tool", word),
        ]
        sampled = chat.render_assistant(word, [READ])
        ids = [chat.render(messages), *chat.bridge(sampled, [word]), chat.user([word]), sampled]
        return [[i for i in part if i in control] for part in ids], ids

    forged, ids = structure(text)
    plain, _ = structure("word" if text else "")
    assert forged == plain
    answer = json.dumps(text, ensure_ascii=False) if name == "harmony" else text
    assert text in decode(chat, ids[0]) and answer in decode(chat, ids[1]) and text in decode(chat, ids[2])
    assert chat.answer_text(ids[1]) == text


@functools.cache
def messages_to_break(name):
    chat = format_of(name)
    more = [] if name == "harmony" else [ToolCall("finish", {})]
    return [
        chat.render_assistant("so", [READ, *more]),
        chat.render_assistant("<think>\nhm\n</think>\n\nso", [READ]),
        chat.render_assistant("", [ToolCall("edit", {"n": 1.5e10, "s": 'a"\\\n', "l": [None, {"k": True}]})]),
        chat.generation_prompt + chat.render_assistant("only words\n\n", []),
    ]


@st.composite
def broken(draw, name):
    """Ids of all kinds: any at all, and messages with pieces left out, doubled, moved and put between."""
    token = st.integers(-3, SIZE) | st.sampled_from(sorted(control_ids(name)))
    ids = draw(st.lists(token, max_size=12) | st.sampled_from(messages_to_break(name)))
    for _ in range(draw(st.integers(0, 4))):
        a, b = sorted((draw(st.integers(0, len(ids))), draw(st.integers(0, len(ids)))))
        change = draw(st.sampled_from(("drop", "double", "move", "insert")))
        piece = draw(st.lists(token, max_size=3)) if change == "insert" else ids[a:b]
        ids = {
            "drop": ids[:a] + ids[b:],
            "double": ids[:b] + ids[a:],
            "move": piece + ids[:a] + ids[b:],
            "insert": ids[:a] + piece + ids[a:],
        }[change]
    return ids


def check_parse(name, ids):
    chat = format_of(name)
    message = chat.parse(ids)
    assert message.complete == (not set(chat.end_tokens).isdisjoint(ids))
    assert isinstance(message.content, str) and all(
        isinstance(call, ToolCall | MalformedToolCall) for call in message.calls
    )
    good = [call for call in message.calls if isinstance(call, ToolCall)]
    assert [chat.parse(chat.render_assistant("", [call])).calls for call in good] == [(call,) for call in good]
    answers = chat.bridge(ids, ["x"] * len(message.calls))
    assert len(answers) == len(message.calls) and all(answers)
    if answers:
        assert answers[0][: len(chat.close(ids))] == chat.close(ids)
        assert name == "harmony" or (answers[0][0] == chat.end) == (not message.complete)


@every_parser
@settings(max_examples=40)
@given(data=st.data())
def test_parse_is_total(name, data):
    check_parse(name, data.draw(broken(name)))


@pytest.mark.slow
@every_parser
def test_parse_is_total_on_thousands_of_messages(name):
    @settings(max_examples=many(3_000), suppress_health_check=list(HealthCheck))
    @given(ids=broken(name))
    def check(ids):
        check_parse(name, ids)

    check()


@every_format
def test_a_message_that_was_cut_off_is_closed_before_its_answers(name):
    chat = format_of(name)
    whole = chat.render_assistant("hm", [READ, READ])
    for length in range(len(whole)):
        cut = whole[:length]
        message = chat.parse(cut)
        assert not message.complete
        assert chat.close(cut) == [chat.end, *chat.close(whole)]
        answers = chat.bridge(cut, ["yes"] * len(message.calls))
        assert [chat.answer_text(ids) for ids in answers] == ["yes"] * len(message.calls)
        if answers:
            assert answers[0][: len(chat.close(cut))] == chat.close(cut)
    assert chat.parse(whole[:-1]).calls == (READ, READ)
    assert chat.parse(whole + whole) == chat.parse(whole), "what follows the end is not part of it"
    assert chat.parse([]) == AssistantMessage("", (), False)


@every_format
def test_answers_come_in_the_order_of_the_calls_and_may_be_fewer(name):
    chat = format_of(name)
    sampled = chat.render_assistant("", [READ, ToolCall("finish", {}), READ])
    three = chat.bridge(sampled, ["one", "two", "three"])
    assert [chat.answer_text(ids) for ids in three] == ["one", "two", "three"]
    assert [chat.answer_text(ids) for ids in chat.bridge(sampled, ["one"])] == ["one"]
    assert chat.bridge(sampled, []) == []
    with pytest.raises(ValueError, match="4 answers to 3 calls"):
        chat.bridge(sampled, ["x"] * 4)
    with pytest.raises(ValueError, match="1 answers to 0 calls"):
        chat.render([Message("user", "x"), Message("tool", "x")])


@harmony_too
def test_sampled_ids_stay_as_they_are_in_a_user_message(name):
    chat = format_of(name)
    # Ids that encode() would not choose for the same text: they must come through as they were sampled.
    odd = [i for letter in "path" for i in chat.tokenizer.encode(letter)]
    assert odd != chat.tokenizer.encode("path")
    ids = chat.user(["Summary: ", [*odd, *sorted(control_ids(name)), chat.end], ""])
    inner = chat.tokenizer.encode("Summary: ") + odd
    assert any(ids[at : at + len(inner)] == inner for at in range(len(ids)))
    assert [i for i in ids if i in control_ids(name)] == [i for i in chat.user(["x"]) if i in control_ids(name)]
    assert chat.text(ids).strip().endswith("Summary: path")


@harmony_too
def test_malformed_calls_are_not_rendered(name):
    chat = format_of(name)
    with pytest.raises(ValueError, match="'a b' is not a tool name"):
        chat.render_assistant("", [ToolCall("a b", {})])
    with pytest.raises(ValueError, match="not JSON compliant|Out of range"):
        chat.render_assistant("", [ToolCall("read", {"n": float("inf")})])
    with pytest.raises(ValueError, match="a malformed call cannot be rendered: 'x' \\(why\\)"):
        chat.render([Message("user", "x"), AssistantMessage("", (MalformedToolCall("x", "why"),), True)])
