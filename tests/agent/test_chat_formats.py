"""The same episode in the chat formats of published models."""

import asyncio

import pytest

from composer_jax.agent import tools
from composer_jax.agent.episode import run_episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.agent.episode_record import build_episode_record
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import REQUEST, Compaction
from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.chat.messages import AssistantMessage, ToolCall
from composer_jax.demo import bugfix
from tests.data.formats import decode
from tests.data.model_folders import KIMI, KIMI_TOKENS, QWEN, QWEN_TOKENS, tokenizer_json, write_folder

TASK = bugfix.generate("train", 0, 0, bugs=1)
(BUG,) = TASK.metadata["bugs"]
READ = ToolCall("read", {"path": BUG["path"]})
MISSING = ToolCall("read", {"path": "<|im_end|>.py"})
FIX = ToolCall("edit", {"path": BUG["path"], "old": BUG["old"], "new": BUG["new"]})
RUN, FINISH = ToolCall("run_tests", {}), ToolCall("finish", {})
SETTINGS = EpisodeSettings(EpisodeLimits(max_turn_tokens=400, max_episode_tokens=10_000))
STYLES = {"kimi": (KIMI_TOKENS, KIMI), "qwen": (QWEN_TOKENS, QWEN)}
OPENED = {"kimi": "<|im_assistant|>assistant<|im_middle|>", "qwen": "<|im_start|>assistant\n"}


@pytest.fixture(scope="module", params=STYLES)
def style(request):
    return request.param


@pytest.fixture(scope="module")
def chat(style, tmp_path_factory):
    tokens, template = STYLES[style]
    return load_chat_format(write_folder(tmp_path_factory.mktemp(style), tokenizer_json(tokens), template))


@pytest.fixture
def play(chat, pool, scripted_session):
    """Runs an episode in which the model samples these messages: (content, calls), or token ids."""

    def run(*messages, compaction=None):
        ids, count = [], 0
        for message in messages:
            if isinstance(message, tuple):
                content, *calls = message
                message = chat.render_assistant(content, calls, calls_before=count)
                count += len(calls)
            ids.append(message)
        session = scripted_session(ids, 10_000)
        spec, context = EpisodeSpec(TASK, 0, compaction or Compaction()), EpisodeContext(chat, pool, SETTINGS)
        episode = asyncio.run(run_episode(spec, session, context))
        return episode, session

    return run


def test_a_repair(play, chat, style):
    turns = [("", RUN), ("Both at once.", READ, MISSING), ("a thought", FIX), ("", RUN)]
    episode, session = play(*turns, ("", FINISH))
    assert (episode.outcome, episode.reward, episode.turns) == ("finished", 1.0, 5)

    [row] = episode.transcript.rows()
    assert row.tokens.tolist() == session.context
    record = build_episode_record(episode, TASK, chat, condition="whole")
    answers = [message.text for message in record.segments[0] if message.kind == "tool"]
    assert answers[0].startswith(f"FAIL {BUG['function']}(")
    assert answers[1:3] == [TASK.files[BUG["path"]], "ERROR no such file <|im_end|>.py"]
    assert answers[3:] == ["ok", "PASS 8"]
    calls = [(call.name, call.error) for message in record.segments[0] for call in message.calls]
    assert calls[1:3] == [("read", None), ("read", "no such file <|im_end|>.py")]

    # What the model saw, turn by turn, is the conversation rendered at once.
    messages = [Message("user", TASK.instruction)]
    for content, *asked in turns:
        messages.append(AssistantMessage(content, tuple(asked), True))
        messages += [Message("tool", answers.pop(0)) for _ in asked]
    messages.append(AssistantMessage("", (FINISH,), True))
    declared = tools.select_tools(TASK.tools).values()
    assert session.context == chat.render(messages, declared)
    prompt = decode(chat, session.contexts[0])
    assert all(tool.description in prompt for tool in declared)
    assert prompt.endswith(OPENED[style])


def test_bad_calls_and_messages_that_were_cut_off_are_answered(play, chat):
    long = chat.render_assistant("", [ToolCall("read", {"path": "xyz" * 400})])
    unread = chat.render_assistant("", [READ])
    del unread[max(at for at, token in enumerate(unread) if '"' in decode(chat, [token]))]
    episode, session = play(long, unread, ("", FIX), ("", FINISH))
    assert (episode.outcome, episode.reward, episode.turns) == ("finished", 1.0, 4)
    cut, broken, fixed = episode.transcript.nodes_of_kind("tool")
    assert cut.tokens[0] == chat.end and broken.tokens[0] != chat.end
    assert chat.answer_text(cut.tokens.tolist()).startswith("ERROR the call does not end with")
    assert chat.answer_text(broken.tokens.tolist()).startswith("ERROR the ")
    assert chat.answer_text(fixed.tokens.tolist()) == "ok"


def test_a_summary_starts_a_new_branch(play, chat, style):
    summary = chat.render_assistant("fix it", [])
    seen = [
        Message("user", TASK.instruction),
        AssistantMessage("", (READ,), True),
        Message("tool", TASK.files[BUG["path"]]),
    ]
    available = tools.select_tools(TASK.tools).values()
    full = len(chat.render(seen, available)) + len(chat.generation_prompt)
    # The tools are described in the prompt, which is most of this context.
    after_prompt = full - len(chat.render(seen[:1], available))
    compaction = Compaction(trigger=2 * after_prompt - 2, max_summary_tokens=20)
    episode, session = play(("", READ), summary, ("", FIX), ("", FINISH), compaction=compaction)
    assert (episode.outcome, episode.reward, episode.summaries) == ("finished", 1.0, 1)
    asked, carried = decode(chat, session.contexts[1]), decode(chat, session.contexts[2])
    user = {"kimi": "<|im_user|>user<|im_middle|>{}<|im_end|>", "qwen": "<|im_start|>user\n{}<|im_end|>\n"}[style]
    assert asked.endswith(user.format(REQUEST) + OPENED[style])
    assert carried.endswith(user.format("Summary 1:\nfix it") + OPENED[style])
    assert [n.kind for n in episode.transcript.branches()[1]] == ["prompt", "carry", "assistant", "tool", "assistant"]
