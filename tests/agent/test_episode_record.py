"""Episodes as text, for the report."""

import asyncio
import json

import numpy as np
import pytest

from composer_jax.agent.episode import run_episode
from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.agent.episode_record import build_episode_record
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.demo import bugfix
from composer_jax.observe.episodes import EpisodeRecord

TASK = bugfix.generate("train", 0, 0, bugs=1)
(BUG,) = TASK.metadata["bugs"]


@pytest.fixture
def record(tok, chat_format, pool, scripted_session):
    read = CompactFormat(tok).render_assistant("look", [ToolCall("read", {"path": BUG["path"]})])
    bad = [
        *CompactFormat(tok).render_assistant("", [ToolCall("read", {"path": "x.py"})])[:-1],
        tok.call,
        *tok.encode("oops"),
        tok.end,
    ]
    finish = CompactFormat(tok).render_assistant("", [ToolCall("finish", {})])
    session = scripted_session([bad, read, [*tok.encode("all read"), tok.end], finish])
    compaction = Compaction(trigger=150, max_segments=3)
    context = EpisodeContext(chat_format, pool)
    episode = asyncio.run(run_episode(EpisodeSpec(TASK, 5, compaction), session, context))
    return build_episode_record(episode, TASK, chat_format, condition="short", step=7), episode


def test_the_numbers_of_a_record(record):
    record, episode = record
    assert (record.task_id, record.reward, record.outcome, record.seed) == (TASK.id, 0.0, "finished", 5)
    assert (record.condition, record.step, record.turns, record.summaries) == ("short", 7, 3, 1)
    assert record.tokens == sum(len(node.tokens) for node in episode.transcript.nodes)
    assert record.sampled_tokens == episode.transcript.total_sampled
    assert record.summary_tokens == episode.summary_tokens > 0
    assert record.instruction == TASK.instruction
    assert EpisodeRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_a_record_has_the_numbers_of_every_sampled_token_on_demand(record, chat_format):
    plain, episode = record
    assert all(m.sampled_tokens == () for segment in plain.segments for m in segment)
    nodes = [node for node in episode.transcript.nodes if node.sampled]
    advantages = {nodes[0].id: np.linspace(0, 1, len(nodes[0].logprobs))}
    full = build_episode_record(episode, TASK, chat_format, "short", 7, advantages)
    assert EpisodeRecord.from_json(json.loads(json.dumps(full.to_json()))) == full
    messages = [m for segment in full.segments for m in segment]
    assert all(bool(m.sampled_tokens) == m.sampled for m in messages)
    first, *others = [m.sampled_tokens for m in messages if m.sampled]
    assert [t.advantage for t in first] == pytest.approx(advantages[nodes[0].id], abs=1e-5)
    assert [t.logprob for t in first] == pytest.approx(nodes[0].logprobs, abs=1e-4)
    assert "".join(t.text for t in first) == chat_format.tokenizer.decode(nodes[0].sampled_tokens)
    assert all(t.advantage is None for tokens in others for t in tokens)


def test_the_messages_of_a_record(record):
    first, second = record[0].segments
    kinds = ["prompt", "assistant", "tool", "tool", "assistant", "tool", "summary_request", "summary"]
    assert [m.kind for m in first] == kinds
    assert [m.kind for m in second] == ["prompt", "carry", "assistant"]
    assert first[0].text == TASK.instruction and not first[0].sampled and first[0].version is None
    assert first[4].text == "look"
    assert first[5].text == TASK.files[BUG["path"]]
    assert first[7].text == "all read" and first[7].sampled and first[7].version == 3
    assert second[1].text == "Summary 1:\nall read"


def test_calls_and_their_errors(record):
    first, second = record[0].segments
    missing, broken = first[1].calls
    assert (missing.name, missing.arguments, missing.error) == ("read", {"path": "x.py"}, "no such file x.py")
    assert broken.arguments == "oops" and broken.error.startswith("no arguments")
    [read] = first[4].calls
    assert (read.name, read.error) == ("read", None)
    assert [call.name for call in second[2].calls] == ["finish"]
