"""An episode in the harmony format: thinking before calls, a call that was cut off, a summary, and its rows for SFT."""

import asyncio

import pytest

from composer_jax.agent import tools
from composer_jax.agent.conversation_rows import episode_rows
from composer_jax.agent.episode import run_episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import REQUEST, Compaction
from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.control_text import ControlText
from composer_jax.data.chat.conversations import conversation_trace, read_conversation
from composer_jax.data.chat.messages import AssistantMessage, ToolCall
from composer_jax.demo import bugfix
from tests.data.formats import decode, format_of

TASK = bugfix.generate("train", 0, 0, bugs=1)
(BUG,) = TASK.metadata["bugs"]
READ = ToolCall("read", {"path": BUG["path"]})
FIX = ToolCall("edit", {"path": BUG["path"], "old": BUG["old"], "new": BUG["new"]})
FINISH = ToolCall("finish", {})
THOUGHT = "<think>\nhm\n</think>\n\n"
CHAT = format_of("harmony")
SETTINGS = EpisodeSettings(EpisodeLimits(max_turn_tokens=400, max_episode_tokens=10_000))


@pytest.fixture
def play(pool, scripted_session):
    """Runs an episode in which the model samples these ids."""

    def run(*ids, compaction=None):
        session = scripted_session([*ids], 10_000)
        spec, context = EpisodeSpec(TASK, 0, compaction or Compaction()), EpisodeContext(CHAT, pool, SETTINGS)
        return asyncio.run(run_episode(spec, session, context)), session

    return run


def said(content, *calls):
    return CHAT.render_assistant(content, calls)


def test_a_repair(play):
    turns = [(THOUGHT, READ), (f"{THOUGHT}I mend it.", FIX), ("", FINISH)]
    episode, session = play(*(said(*turn) for turn in turns))
    assert (episode.outcome, episode.reward, episode.turns) == ("finished", 1.0, 3)
    answers = [CHAT.answer_text(node.tokens.tolist()) for node in episode.transcript.nodes_of_kind("tool")]
    assert answers == [TASK.files[BUG["path"]], "ok"]
    messages = [Message("user", TASK.instruction)]
    for content, call in turns:
        messages += [AssistantMessage(content, (call,), True), *(Message("tool", answer) for answer in answers[:1])]
        del answers[:1]
    assert session.context == CHAT.render(messages, tools.select_tools(TASK.tools).values())


def test_a_call_that_was_cut_off_is_closed_and_answered(play):
    long = said("", ToolCall("read", {"path": "xyz" * 400}))
    episode, _ = play(long, said("", FIX), said("", FINISH))
    assert (episode.outcome, episode.reward) == ("finished", 1.0)
    cut, fixed = (node.tokens.tolist() for node in episode.transcript.nodes_of_kind("tool"))
    assert decode(CHAT, cut).startswith("<|call|><|start|>functions.read to=assistant<|channel|>commentary<|message|>")
    assert CHAT.answer_text(cut).startswith("ERROR the call does not end with <|call|>")
    assert CHAT.answer_text(fixed) == "ok"


def test_a_summary_starts_a_new_branch(play):
    available = tools.select_tools(TASK.tools).values()
    read = [AssistantMessage("", (READ,), True), Message("tool", TASK.files[BUG["path"]])]
    begin = [Message("user", TASK.instruction)]
    full = len(CHAT.render([*begin, *read], available)) + len(CHAT.generation_prompt)
    trigger = 2 * (full - len(CHAT.render(begin, available))) - 2
    compaction = Compaction(trigger=trigger, max_summary_tokens=200)
    summary = said(f"{THOUGHT}mend it")
    episode, session = play(said("", READ), summary, said("", FIX), said("", FINISH), compaction=compaction)
    assert (episode.outcome, episode.reward, episode.summaries) == ("finished", 1.0, 1)
    asked, carried = decode(CHAT, session.contexts[1]), decode(CHAT, session.contexts[2])
    assert asked.endswith(f"<|start|>user<|message|>{REQUEST}<|end|><|start|>assistant")
    assert carried.endswith("<|start|>user<|message|>Summary 1:\nmend it<|end|><|start|>assistant")


def test_an_episode_is_trained_as_it_was_sampled(play):
    """The model writes its headings in OpenAI's order, which encoding the message would not."""
    text = '<|channel|>commentary to=functions.read <|constrain|>json<|message|>{"path": "missing.py"}<|call|>'
    odd = ControlText(CHAT.tokenizer).ids(text, "\0")
    episode, session = play(odd, said(THOUGHT, FIX), said("", FINISH))
    [row] = episode_rows(episode, TASK, CHAT, "")
    assert row["messages"][1]["token_ids"] == odd and "token_ids" not in row["messages"][3]
    ids, trained = conversation_trace(read_conversation(row), CHAT)
    assert ids.tolist() == session.context[: len(ids)]
    assert trained.sum() == len(odd) + len(said(THOUGHT, FIX)) + len(said("", FINISH))
