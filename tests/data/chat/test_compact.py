"""The compact format: reasons of malformed calls, spliced ids, text. test_formats.py has what all formats share."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import MalformedToolCall, ToolCall
from composer_jax.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return Tokenizer.train(['edit{"path":"a.py","old":"x","new":"y"} read grep finish'] * 8, vocab_size=320)


@settings(max_examples=50)
@given(
    body=st.text(alphabet='{}[]":,\\unaeE+-.019d8 \n', max_size=30),
    name=st.sampled_from(["read", "", "1", "a b"]),
)
def test_parse_is_total_on_almost_json(tok, body, name):
    message = CompactFormat(tok).parse([tok.call, *tok.encode(name + "{" + body), tok.end])
    (call,) = message.calls
    if isinstance(call, ToolCall):
        assert CompactFormat(tok).parse(CompactFormat(tok).render_assistant("", [call])).calls == (call,)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("read", "no arguments"),
        ("", "no arguments"),
        ("{}", "'' is not a tool name"),
        ('two words{"a":1}', "'two words' is not a tool name"),
        ('read{"path":"a.py"', "not JSON"),
        ('read{"path":"a.py"} and more', "not JSON"),
        ('read{"n":NaN}', "NaN is not a number"),
        ('read{"n":1e999}', "1e999 is not a number"),
        ('read{"n":' + "9" * 5000 + "}", "not JSON"),
        ('read{"path":"\\ud800"}', "half of a surrogate pair"),
        ('read{"a":' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_malformed_calls_say_why(tok, text, reason):
    (call,) = CompactFormat(tok).parse([tok.call, *tok.encode(text), tok.end]).calls
    assert isinstance(call, MalformedToolCall)
    assert call.text == text
    assert reason in call.reason


def test_white_space_around_a_call_is_not_an_error(tok):
    ids = [tok.call, *tok.encode(' read {"path": "a.py"}\n'), tok.end]
    assert CompactFormat(tok).parse(ids).calls == (ToolCall("read", {"path": "a.py"}),)


def test_control_tokens_inside_a_call_are_malformed(tok):
    ids = [tok.call, *tok.encode('read{"path":"'), tok.user, *tok.encode('"}'), tok.end]
    (call,) = CompactFormat(tok).parse(ids).calls
    assert isinstance(call, MalformedToolCall) and "<|user|>" in call.reason


@pytest.mark.parametrize("role", ["system", "user", "tool", "assistant"])
def test_splice_keeps_sampled_ids_and_drops_control_tokens(tok, role):
    # Ids that encode() would not choose for the same text: they must come through as they were sampled.
    odd = [i for letter in "path" for i in tok.encode(letter)]
    assert odd != tok.encode("path")
    ids = CompactFormat(tok).message(role, ["Summary: ", [*odd, tok.call, tok.end], "\n", []])
    assert ids == [getattr(tok, role), *tok.encode("Summary: "), *odd, *tok.encode("\n"), tok.end]


def test_a_wrong_role_is_refused(tok):
    with pytest.raises(ValueError, match="'robot' is not a role"):
        CompactFormat(tok).message("robot", ["x"])
