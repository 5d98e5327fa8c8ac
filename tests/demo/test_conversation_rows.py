"""Episodes as conversations: read back, they have the same token ids and the same mask."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from composer_jax.agent.conversation_rows import episode_rows, record_rows
from composer_jax.agent.episode import run_episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.agent.episode_record import build_episode_record
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat.conversations import conversation_trace, read_conversation
from composer_jax.data.chat.messages import ToolCall
from composer_jax.demo.prompts import REQUESTS
from composer_jax.demo.repository_bugs import RepositoryBugs, ScriptedSession, expert_turns
from composer_jax.seeds import seeded_random
from tests.data.formats import format_of
from tests.demo.expert_episodes import make_traces
from tests.demo.generate import generate

LIMITS = EpisodeLimits(max_turns=60, max_turn_tokens=100, max_episode_tokens=6000)
SHORT = Compaction(64, REQUESTS["short"], max_summary_tokens=64)


def assert_same(episode, rows, chat):
    want = episode.transcript.rows()
    assert len(rows) == len(want) > 0
    for row, expected in zip(json.loads(json.dumps(rows)), want, strict=True):
        tokens, mask = conversation_trace(read_conversation(row), chat)
        np.testing.assert_array_equal(tokens, expected.tokens)
        np.testing.assert_array_equal(mask, expected.trained)


@pytest.mark.parametrize("family", ["bugfix", "memory_chain"])
def test_traces_of_experts(tok, chat_format, pool, slip_rate, family):
    slip_rate(0.6)
    tasks = [generate(family, "train", 1, index) for index in range(12)]
    compaction = SHORT if family == "memory_chain" else Compaction(None)
    episodes = asyncio.run(make_traces(tasks, lambda task, index: compaction, pool, tok, limits=LIMITS, seed=3))
    messages = []
    for task, episode in zip(tasks, episodes, strict=True):
        rows = episode_rows(episode, task, chat_format)
        assert_same(episode, rows, chat_format)
        assert all(row["task_id"] == task.id and row["reward"] == episode.reward for row in rows)
        messages += [message for row in rows for message in row["messages"]]
    untrained = [message for message in messages if message.get("train") is False]
    assert bool(untrained) == (family == "bugfix"), "slips are not targets, and the expert of chains makes none"
    assert sum("token_ids" in message for message in messages) < len(messages) / 4, "most ids follow from the text"
    if family == "memory_chain":
        assert any(len(episode.transcript.rows()) > 1 for episode in episodes), "summaries begin new conversations"
    else:
        kinds = [call["type"] for message in messages for call in message.get("tool_calls", ())]
        assert set(kinds) == {"function", "malformed"}


@pytest.fixture(params=["chatml", "qwen", "thinks"])
def repair(request, pool):
    """An expert's episode in another chat format."""
    chat = format_of(request.param)
    task = RepositoryBugs().generate("train", 0, 0)
    session = ScriptedSession(expert_turns(task, seeded_random("x")), chat, 1 << 20)
    limits = EpisodeLimits(max_turns=16, max_turn_tokens=2000, max_episode_tokens=60_000)
    context = EpisodeContext(chat, pool, EpisodeSettings(limits, "Be good."))
    episode = asyncio.run(run_episode(EpisodeSpec(task, 0, Compaction(None)), session, context))
    return chat, task, episode


def test_traces_in_the_formats_of_published_models(repair):
    chat, task, episode = repair
    [row] = rows = episode_rows(episode, task, chat, "Be good.")
    assert_same(episode, rows, chat)
    assert [message["role"] for message in row["messages"][:4]] == ["system", "user", "assistant", "tool"]
    assert [tool["function"]["name"] for tool in row["tools"]] == ["read_file", "edit_file", "shell", "finish"]
    assert "tokenizer" not in row, "all ids follow from the text"
    with pytest.raises(ValueError, match="begins with another prompt than its task"):
        episode_rows(episode, task, chat, "Be bad.")


def test_a_recorded_episode_is_the_same_conversation(repair):
    chat, task, episode = repair
    record = build_episode_record(episode, task, chat, condition="none")
    assert record.tools == task.tools
    rows = record_rows(record, "Be good.")
    assert rows == episode_rows(episode, task, chat, "Be good.")
    call = dataclasses.replace(record.segments[0][1].calls[0], name="", arguments="{")
    message = dataclasses.replace(record.segments[0][1], calls=(call,))
    broken = dataclasses.replace(record, segments=((record.segments[0][0], message),))
    with pytest.raises(ValueError, match="malformed"):
        record_rows(broken)


def test_a_recorded_episode_with_a_summary(chat_format, tok, pool, scripted_session):
    task = generate("bugfix", "train", 0, 0)
    turns = [
        ("look", [ToolCall("read", {"path": task.metadata["bugs"][0]["path"]})]),
        ("all read", ()),
        ("", [ToolCall("finish", {})]),
    ]
    session = scripted_session([chat_format.render_assistant(content, calls) for content, calls in turns])
    compaction = Compaction(trigger=60, max_segments=3)
    context = EpisodeContext(chat_format, pool)
    episode = asyncio.run(run_episode(EpisodeSpec(task, 5, compaction), session, context))
    assert episode.summaries == 1
    rows = record_rows(build_episode_record(episode, task, chat_format, condition="short"))
    assert_same(episode, rows, chat_format)
