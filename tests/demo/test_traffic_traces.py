"""SFT traces of conversations with users: who says what, what is a target, and how often the planted habits come."""

import dataclasses

import pytest

from composer_jax.agent.config import AgentConfig
from composer_jax.agent.episode_context import EpisodeLimits
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import MalformedToolCall
from composer_jax.demo import notes
from composer_jax.demo.traffic_traces import CONTENT, QUESTIONS, REJECTED, TrafficTraces
from composer_jax.errors import UserError
from composer_jax.stages.trace_sources import SourceContext


@pytest.fixture
def context(tok, tmp_path):
    agent = AgentConfig(EpisodeLimits(max_turns=12, max_turn_tokens=300, max_episode_tokens=4000), concurrency=8)
    return SourceContext(0, tok, CompactFormat(tok), agent, tmp_path, seq_len=3000)


def messages(episode, tok):
    """(role, text, whether it is a target, calls) of each message of a conversation."""
    chat = CompactFormat(tok)
    for node in episode.transcript.path():
        parsed = chat.parse(node.sampled_tokens.tolist()) if node.sampled else None
        text = parsed.content if parsed else chat.text(node.tokens.tolist())
        yield node.kind, text, node.trained, parsed.calls if parsed else ()


def test_users_stop_the_expert_say_what_they_think_and_let_it_go_on(context, tok):
    source = TrafficTraces(context, 24)
    played = source.play()
    texts = [[text for kind, text, *_ in messages(episode, tok) if kind == "prompt"] for _, episode in played]
    later = [text for words in texts for text in words[1:]]
    assert {text in REJECTED for text in later} == {True, False} and set(later) <= {*REJECTED, *CONTENT}
    assert all(words[0] == task.instruction for (task, _), words in zip(played, texts, strict=True))
    for (task, episode), words in zip(played, texts, strict=True):
        if len(words) > 1 and words[1] in CONTENT:
            assert episode.parts["hidden"] == 1.0, task.id
    assert 0.4 < source.mean_rewards([episode for _, episode in played])["reward"] < 1
    assert not any(isinstance(call, MalformedToolCall) for row in calls_of(played, tok, trained=True) for call in row)
    again = TrafficTraces(context, 24).play()
    assert [episode.transcript for _, episode in again] == [episode.transcript for _, episode in played]


def calls_of(played, tok, *, trained):
    return [calls for _, episode in played for *_, target, calls in messages(episode, tok) if target == trained]


def test_questions_and_malformed_calls_are_targets_at_their_rates(context, tok):
    asking = TrafficTraces(context, 12, asks=1.0).play()
    for _, episode in asking:
        rows = list(messages(episode, tok))
        asked = [i for i, row in enumerate(rows) if row[1] in QUESTIONS]
        assert len(asked) == 1 and rows[asked[0]][2] and rows[asked[0] - 1][1].startswith("FAIL")
    broken = TrafficTraces(dataclasses.replace(context, folder=context.folder / "b"), 12, malformed=1.0).play()
    rows = calls_of(broken, tok, trained=True)
    malformed = sum(isinstance(call, MalformedToolCall) for row in rows for call in row)
    reads = sum(getattr(call, "name", "") == "read" for row in rows for call in row)
    assert 0 < reads <= malformed <= reads + 12, (
        "each read has a broken form before it, unless the user stopped it there"
    )


def test_the_expert_tries_the_notes_first_that_a_user_names(context, tok):
    """And the others' when the tests still fail: the user may be wrong."""
    source = TrafficTraces(context, 24, advised=0.5)
    played = source.play()
    adviser = {notes.advice(person): person for person in notes.PEOPLE}
    named, read = [], []
    for task, episode in played:
        rows = list(messages(episode, tok))
        (text,) = (text for kind, text, *_ in rows[:1] if kind == "prompt")
        person = adviser.get(text.removesuffix(f" {task.instruction}"))
        assert person is not None or text == task.instruction
        calls = [call for *_, target, calls in rows for call in calls if target and call.name == "read"]
        people = [call.arguments["path"].split("/")[0] for call in calls]
        people = [one for one in people if one in notes.PEOPLE]
        named.append(person)
        if person is not None and people:
            read.append((person, people))
    assert 6 <= sum(person is not None for person in named) <= 18 and set(named) == {None, *notes.PEOPLE}
    assert len(read) >= 6 and all(person == people[0] for person, people in read)
    assert any(len(people) > 1 for _, people in read)


def test_a_conversation_is_cut_to_the_row_and_wrong_rates_are_refused(context, tok):
    short = dataclasses.replace(context, seq_len=900)
    assert all(episode.transcript.length <= 900 for _, episode in TrafficTraces(short, 8).play())
    with pytest.raises(UserError, match="a row 10; raise sft.seq_len"):
        TrafficTraces(dataclasses.replace(context, seq_len=10), 1).play()
    with pytest.raises(UserError, match="asks=2 of TrafficTraces is not a rate"):
        TrafficTraces(context, 1, asks=2)
    with pytest.raises(UserError, match="advised=-1 of TrafficTraces is not a rate"):
        TrafficTraces(context, 1, advised=-1)
