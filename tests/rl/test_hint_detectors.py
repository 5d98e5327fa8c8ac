"""The detectors of feedback, on real episodes: which turns get a hint, and what it says."""

import asyncio
import dataclasses

import pytest

from composer_jax.agent.episode import run_episode
from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.agent.tools import select_tools
from composer_jax.agent.transcript import Transcript
from composer_jax.data.chat.messages import MalformedToolCall, ToolCall
from composer_jax.rl.hint_detectors import DETECTORS, LONGEST_QUOTE, ParsedEpisode, example_call
from tests.agent.conftest import ScriptedSession, task_of
from tests.data.formats import format_of
from tests.rl.made_up import episode

TOOLS = ("read", "edit", "grep", "finish")
READ, FINISH = ToolCall("read", {"path": "a.py"}), ToolCall("finish", {})


@pytest.fixture(scope="module")
def detect(pool):
    """messages -> {detector: {turn: text}} of an episode in which the model says them; calls or ids each."""

    def run(*messages):
        chat = format_of("compact")
        ids = [message if isinstance(message, list) else chat.render_assistant("", [message]) for message in messages]
        task = dataclasses.replace(task_of({"a.py": "a = 1\n"}), tools=TOOLS)
        context = EpisodeContext(chat, pool)
        played = asyncio.run(run_episode(EpisodeSpec(task, 0, Compaction()), ScriptedSession(ids), context))
        parsed = ParsedEpisode.of(played, chat)
        assert list(parsed.tools) == list(TOOLS)
        return {name: {hint.turn: hint.text for hint in detector(parsed)} for name, detector in DETECTORS.items()}

    return run


def broken(chat, text):
    """A message whose call is not JSON, in the compact format."""
    return [chat.tokenizer.call, *chat.tokenizer.encode(text), chat.end]


def test_an_episode_without_mistakes_gets_no_hint(detect):
    assert detect(READ, FINISH) == {name: {} for name in DETECTORS}


def test_a_malformed_call_is_answered_by_the_form_of_a_call(detect):
    chat = format_of("compact")
    hints = detect(READ, broken(chat, 'edit{"path":'), READ, broken(chat, "hello"), FINISH)
    assert hints["unknown_tool"] == hints["failed_call"] == {}
    assert list(hints["malformed_call"]) == [1, 3]
    first, second = hints["malformed_call"].values()
    assert 'exactly this form: <|call|>edit{"path":"...","old":"...","new":"..."}' in first, "the tool that it named"
    assert "the arguments are not JSON" in first
    assert 'exactly this form: <|call|>read{"path":"..."}' in second and "no arguments" in second


def test_an_unknown_tool_is_answered_by_those_that_there_are(detect):
    hints = detect(ToolCall("open_file", {"path": "a.py"}), FINISH)
    text = "Reminder: there is no tool open_file. Available tools: read, edit, grep, finish."
    assert hints == {"malformed_call": {}, "unknown_tool": {0: text}, "failed_call": {}}


def test_a_failed_call_is_answered_by_the_tools_error(detect):
    calls = [
        ToolCall("read", {"path": "b.py"}),
        ToolCall("read", {"file": "a.py"}),
        READ,
        ToolCall("edit", {"path": "a.py", "old": "c", "new": "d"}),
        FINISH,
    ]
    hints = detect(*calls)
    assert hints["malformed_call"] == hints["unknown_tool"] == {}
    assert hints["failed_call"] == {
        0: 'Reminder: read fails with the arguments {"path":"b.py"}: no such file b.py.',
        1: 'Reminder: read fails with the arguments {"file":"a.py"}: read needs path.',
        3: 'Reminder: edit fails with the arguments {"path":"a.py","old":"c","new":"d"}: old is not in a.py.',
    }


def test_long_errors_are_cut(detect):
    hints = detect(ToolCall("x" * 900, {}), ToolCall("read", {"path": "y" * 900}), FINISH)
    assert len(hints["unknown_tool"][0]) < LONGEST_QUOTE + 120
    assert len(hints["failed_call"][1]) < 2 * LONGEST_QUOTE + 120


def test_episodes_without_a_record_of_their_tools_get_no_hint_at_them():
    chat, transcript = format_of("compact"), Transcript()
    transcript.append("prompt", [1, 2])
    ids = chat.render_assistant("", [ToolCall("anything", {})])
    transcript.append("assistant", chat.generation_prompt, ids, [0.0] * len(ids), [0] * len(ids))
    parsed = ParsedEpisode.of(episode(1.0, transcript), chat)
    assert [list(detector(parsed)) for detector in DETECTORS.values()] == [[], [], []]
    bad = broken(chat, "hello")
    transcript.append("assistant", chat.generation_prompt, bad, [0.0] * len(bad), [0] * len(bad))
    (hint,) = DETECTORS["malformed_call"](ParsedEpisode.of(episode(1.0, transcript), chat))
    assert hint.turn == 1 and "exactly this form" not in hint.text


@pytest.mark.parametrize("name", ["compact", "qwen", "kimi", "chatml", "headers", "thinks", "opens"])
def test_the_example_is_a_call_that_the_format_reads(name):
    """The same text, sampled as the control tokens that it spells, is one well-formed call."""
    chat, tools = format_of(name), select_tools(("repository/*",))
    text = example_call(chat, tools, "run shell now")
    ids = chat.without_thinking(chat.render_assistant("", [ToolCall("shell", {"command": "..."})]))
    assert text == chat.tokenizer.decode(ids[: ids.index(chat.end)]).strip() and "shell" in text
    for tool in tools.values():
        spelled = example_call(chat, {tool.name: tool})
        assert tool.name in spelled and all(f'"{key}"' in spelled for key in tool.parameters["required"])


def test_the_values_of_an_example_fit_the_schemas(monkeypatch):
    """Of all our tools: the arguments pass the tool's own check."""
    seen: list[ToolCall] = []
    chat = format_of("compact")
    monkeypatch.setattr(chat, "render_assistant", lambda text, calls: seen.extend(calls) or [chat.end])
    tools = select_tools(("repository/*",))
    for tool in tools.values():
        example_call(chat, {tool.name: tool})
        tool.check(seen[-1].arguments)
    assert len(seen) == len(tools) and not any(isinstance(call, MalformedToolCall) for call in seen)
