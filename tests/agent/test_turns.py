"""Turns: which answers belong to which message of the model."""

import pytest

from composer_jax.agent.tools import error_text
from composer_jax.agent.transcript import Transcript
from composer_jax.agent.turns import find_turns
from composer_jax.data.chat.messages import MalformedToolCall, ToolCall
from tests.data.formats import format_of

READ, FINISH = ToolCall("read", {"path": "a.py"}), ToolCall("finish", {})


def say(transcript, chat, sampled, answers=()):
    node = transcript.append("assistant", chat.generation_prompt, sampled, [0.0] * len(sampled), [0] * len(sampled))
    for answer in chat.bridge(sampled, list(answers)):
        transcript.append("tool", answer)
    return node


@pytest.mark.parametrize("name", ["compact", "qwen", "kimi", "chatml"])
def test_a_turn_has_the_answers_of_its_calls(name):
    chat, transcript = format_of(name), Transcript()
    prompt = transcript.append("prompt", [1, 2])
    first = say(transcript, chat, chat.render_assistant("Look.", [READ, READ]), ["a = 1", "ERROR no such file a.py"])
    transcript.append("summary_request", chat.user(["Please summarize."]))
    transcript.append("summary", chat.generation_prompt, [5], [0.0], [0])
    transcript.branch(prompt)
    transcript.append("carry", chat.user(["So far."]))
    last = say(transcript, chat, chat.render_assistant("", [READ, FINISH]), ["a = 1"])
    turns = find_turns(transcript, chat)
    assert [turn.node for turn in turns] == [first, last]
    assert turns[0].answers == ("a = 1", "ERROR no such file a.py") and turns[1].answers == ("a = 1",)
    assert [error_text(answer) for answer in turns[0].answers] == [None, "no such file a.py"]
    assert turns[0].message.calls == (READ, READ)


def test_a_bad_call_is_answered_too(chat_format):
    transcript = Transcript()
    transcript.append("prompt", [1, 2])
    tok = chat_format.tokenizer
    say(transcript, chat_format, [tok.call, *tok.encode("read{"), tok.end], ["ERROR the arguments are not JSON"])
    (turn,) = find_turns(transcript, chat_format)
    assert isinstance(turn.message.calls[0], MalformedToolCall)
    assert error_text(turn.answers[0]) == "the arguments are not JSON"


def test_a_turn_that_branches_share_is_there_once(chat_format):
    transcript = Transcript()
    transcript.append("prompt", [1, 2])
    shared = say(transcript, chat_format, chat_format.render_assistant("", [READ]))
    for text in ("one", "two"):
        transcript.branch(shared)
        say(transcript, chat_format, chat_format.render_assistant(text, []))
    turns = find_turns(transcript, chat_format)
    assert [turn.message.content for turn in turns] == ["", "one", "two"]
