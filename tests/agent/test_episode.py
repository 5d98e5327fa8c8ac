"""One episode, message by message: what the model is shown, what is recorded, how it ends, what it earns."""

import asyncio
import dataclasses

import numpy as np
import pytest

from composer_jax.agent.effort import EffortConfig, EffortLevel
from composer_jax.agent.episode import Episode, run_episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import REQUEST, Compaction
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.demo import bugfix
from composer_jax.errors import UserError
from composer_jax.frames import encode_frame
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.result_cache import ResultCache
from composer_jax.tasks.task import Task
from tests.test_frames import read
from tests.to_text import to_text

TASK = bugfix.generate("train", 0, 0, bugs=1)
(BUG,) = TASK.metadata["bugs"]
FIX = ToolCall("edit", {"path": BUG["path"], "old": BUG["old"], "new": BUG["new"]})
READ = ToolCall("read", {"path": BUG["path"]})
RUN, FINISH = ToolCall("run_tests", {}), ToolCall("finish", {})
NEVER = Compaction()
DEFAULTS = EpisodeSettings()


@pytest.fixture
def play(tok, chat_format, pool, scripted_session):
    """Runs an episode in which the model says these messages: calls, (content, calls), or token ids."""

    def run(
        *messages,
        compaction=NEVER,
        limits=None,
        max_model_len=4096,
        pool=pool,
        task=TASK,
        seed=11,
        effort="",
        settings=DEFAULTS,
        **of_context,
    ):
        ids = [message if isinstance(message, list) else render(message) for message in messages]
        session = scripted_session(ids, max_model_len)
        settings = dataclasses.replace(settings, limits=limits or settings.limits)
        context = EpisodeContext(chat_format, pool, settings, **of_context)
        spec = EpisodeSpec(task, seed, compaction, effort=effort)
        episode = asyncio.run(run_episode(spec, session, context))
        if isinstance(pool, LocalSandboxPool):
            assert episode.outcome != "infrastructure", episode.detail
        return episode, session

    def render(message):
        content, *calls = message if isinstance(message, tuple) else ("", message)
        return CompactFormat(tok).render_assistant(content, calls)

    return run


def test_a_repair(play, tok):
    episode, session = play(RUN, READ, ("a thought", FIX), RUN, FINISH)
    assert (episode.outcome, episode.reward, episode.parts) == ("finished", 1.0, {"hidden": 1.0})
    assert (episode.turns, episode.summaries, episode.summary_tokens) == (5, 0, 0)
    assert (episode.task_id, episode.family, episode.split, episode.seed) == (TASK.id, "bugfix", "train", 11)
    kinds = [node.kind for node in episode.transcript.nodes]
    assert kinds == ["prompt"] + ["assistant", "tool"] * 4 + ["assistant"]
    # One row, which is what the sampler saw, token for token, with the sampler's own numbers.
    [row] = episode.transcript.rows()
    assert row.tokens.tolist() == session.context
    assert row.trained.sum() == episode.transcript.total_sampled
    assert sorted(set(row.versions[row.trained].tolist())) == [1, 2, 3, 4, 5]
    assert row.logprobs[row.versions == 3].tolist() == pytest.approx([-0.3] * int((row.versions == 3).sum()))
    assert not session.messages and session.temperatures == [1.0] * 5
    usage = episode.usage
    assert usage.calls == {"run_tests": 2, "read": 1, "edit": 1, "finish": 1} and usage.malformed_calls == 0
    assert usage.thinking_tokens == len(tok.encode("a thought"))
    assert usage.thinking_tokens + usage.call_tokens == episode.transcript.total_sampled
    assert usage.output_tokens == sum(len(node.tokens) for node in episode.transcript.nodes if node.kind == "tool")
    assert (usage.changed_files, usage.added_lines, usage.comment_lines) == (1, 1, 0)


def test_a_system_message_precedes_the_instruction(play, tok):
    _, session = play(FINISH, settings=EpisodeSettings(system_prompt="Be brief.", temperature=0.0))
    assert session.temperatures == [0.0]
    shown = to_text(tok, session.contexts[0])
    assert shown == f"<|bos|><|system|>Be brief.<|end|>\n<|user|>{TASK.instruction}<|end|>\n<|assistant|>"


def test_an_episode_is_played_with_the_prompt_of_its_level_of_effort_and_records_it(play, tok):
    effort = EffortConfig({"low": EffortLevel(100), "high": EffortLevel(4000)})
    settings = EpisodeSettings(system_prompt="Be good.", effort=effort)
    text = "Be good.\n\nEffort: {}. Think for at most {} tokens before a message."
    for level, shown in (("low", text.format("low", 100)), ("high", text.format("high", 4000)), ("", "Be good.")):
        episode, session = play(FINISH, settings=settings, effort=level)
        assert episode.effort == level
        assert to_text(tok, session.contexts[0]).startswith(f"<|bos|><|system|>{shown}<|end|>\n<|user|>")
    with pytest.raises(UserError, match="effort 'max'"):
        play(FINISH, settings=settings, effort="max")


def test_what_the_model_is_shown(play, tok):
    _, session = play(RUN, READ, FINISH)
    first, second, third = (to_text(tok, context) for context in session.contexts)
    assert first == f"<|bos|><|user|>{TASK.instruction}<|end|>\n<|assistant|>"
    head, observation = second.split("<|tool|>")
    assert head == first + "<|call|>run_tests{}<|end|>\n"
    assert observation.startswith(f"FAIL {BUG['function']}(")
    assert observation.endswith("<|end|>\n<|assistant|>")
    assert third.endswith(f"<|tool|>{TASK.files[BUG['path']]}<|end|>\n<|assistant|>")
    assert third.startswith(second)


def test_giving_up_and_not_repairing_earn_nothing(play):
    assert play(FINISH)[0].reward == 0.0
    same = ToolCall("edit", {"path": BUG["path"], "old": BUG["old"], "new": "return None"})
    episode, _ = play(same, FINISH)
    assert (episode.outcome, episode.reward) == ("finished", 0.0)
    assert 0 < episode.parts["hidden"] < 1
    assert "first failure" in episode.detail


@pytest.mark.parametrize(
    ("messages", "limits", "outcome"),
    [
        ((FIX, ("all done",)), EpisodeLimits(), "no_call"),
        ((FIX, RUN), EpisodeLimits(max_turns=2), "out_of_turns"),
    ],
)
def test_without_finish_even_a_repair_earns_nothing(play, messages, limits, outcome):
    episode, session = play(*messages, limits=limits)
    assert (episode.outcome, episode.reward, episode.parts) == (outcome, 0.0, {"hidden": 1.0})
    assert not session.messages


@pytest.mark.parametrize(("of_task", "of_all", "last"), [(2, 5, READ), (5, 2, FINISH), (None, 2, READ)])
def test_the_smaller_limit_of_turns_ends_an_episode(play, of_task, of_all, last):
    task, limits = dataclasses.replace(TASK, max_turns=of_task), EpisodeLimits(max_turns=of_all)
    episode, session = play(READ, last, task=task, limits=limits)
    assert (episode.outcome, episode.turns) == ("finished" if last is FINISH else "out_of_turns", 2)
    assert not session.messages


def test_a_full_context_ends_the_episode(play):
    episode, session = play(FIX, RUN, max_model_len=60)
    assert (episode.outcome, episode.reward) == ("out_of_context", 0.0)
    assert all(len(row.tokens) <= 60 for row in episode.transcript.rows())
    assert all(len(context) + count <= 60 for context, count in zip(session.contexts, session.max_tokens, strict=True))


def test_all_limits_bound_what_is_asked_for(play):
    _, session = play(RUN, FINISH, limits=EpisodeLimits(max_turn_tokens=17))
    assert session.max_tokens == [17, 17]
    whole, _ = play(RUN, FIX, FINISH)
    enough = whole.transcript.total_tokens
    again, session = play(RUN, FIX, FINISH, limits=EpisodeLimits(max_episode_tokens=enough))
    assert (again.outcome, again.transcript) == ("finished", whole.transcript)
    assert session.max_tokens[-1] == len(whole.transcript.nodes[-1].sampled_tokens)
    # Just no room for a first token of the last message.
    limits = EpisodeLimits(max_episode_tokens=enough - session.max_tokens[-1])
    short, _ = play(RUN, FIX, limits=limits)
    assert (short.outcome, short.reward, short.parts) == ("out_of_context", 0.0, {"hidden": 1.0})


def test_bad_calls_are_told_and_the_episode_goes_on(play, tok):
    """A finish with arguments is no finish."""
    broken = [tok.call, *tok.encode('read{"path":'), tok.end]
    episode, session = play(broken, ToolCall("shell", {"cmd": "ls"}), ToolCall("finish", {"reward": 1}), FIX, FINISH)
    assert (episode.reward, episode.turns) == (1.0, 5)
    observations = [to_text(tok, node.tokens.tolist()) for node in episode.transcript.nodes_of_kind("tool")]
    assert observations[0].startswith("<|tool|>ERROR the arguments are not JSON")
    assert observations[1] == "<|tool|>ERROR no tool shell<|end|>\n"


def test_a_message_that_was_cut_off_is_closed_before_the_answer(play, tok):
    long = ToolCall("read", {"path": "x" * 200})
    episode, session = play(long, FINISH, limits=EpisodeLimits(max_turn_tokens=10))
    first, tool, _ = episode.transcript.nodes[1:]
    assert len(first.sampled_tokens) == 10 and first.sampled_tokens[-1] != tok.end
    assert tool.tokens[:2].tolist() == [tok.end, tok.tool]
    assert not tool.sampled
    assert tok.decode(tool.tokens.tolist()).startswith("<|end|><|tool|>ERROR")
    assert episode.outcome == "finished"
    # Cut off before any call: nothing was asked for.
    assert play(("word " * 50,), limits=EpisodeLimits(max_turn_tokens=10))[0].outcome == "no_call"


def test_calls_of_one_message_are_answered_in_order(play, tok):
    episode, session = play(("", RUN, FIX, RUN, READ), FINISH)
    texts = [tok.decode(node.tokens.tolist()) for node in episode.transcript.nodes_of_kind("tool")]
    assert texts[0].startswith(f"<|tool|>FAIL {BUG['function']}")
    assert texts[1:3] == ["<|tool|>ok<|end|>", "<|tool|>PASS 8<|end|>"]
    assert BUG["new"] in texts[3]
    assert (episode.reward, episode.turns) == (1.0, 2)


def test_finish_beside_other_calls_ends_after_those_before_it(play):
    episode, _ = play(("", FIX, FINISH, ToolCall("edit", {"path": BUG["path"], "old": BUG["new"], "new": "x"})))
    assert (episode.outcome, episode.reward, episode.turns) == ("finished", 1.0, 1)
    assert [node.kind for node in episode.transcript.nodes] == ["prompt", "assistant", "tool"]


def test_changing_the_tests_makes_them_pass_and_earns_nothing(play, tok):
    old = TASK.files["run_tests.py"].split("\n")[0]
    cheat = ToolCall("edit", {"path": "run_tests.py", "old": old, "new": "print('PASS 8'); raise SystemExit"})
    episode, _ = play(cheat, RUN, FINISH, limits=EpisodeLimits(max_turn_tokens=200))
    assert tok.decode(episode.transcript.nodes[4].tokens.tolist()) == "<|tool|>PASS 8<|end|>"
    assert (episode.outcome, episode.reward) == ("finished", 0.0)


def test_a_question_instead_of_an_edit_is_recorded(play):
    usage = play(RUN, ("Which line shall I mend?",))[0].usage
    assert usage.asked_question and usage.changed_files == 0 and usage.final_tokens > 0


@pytest.mark.parametrize("messages", [(RUN, FIX, FINISH), (FIX, FINISH)])
def test_infrastructure_is_never_a_reward(play, dying_pool, messages):
    # In the first the tool cannot run; in the second only the grading cannot.
    episode, _ = play(*messages, pool=dying_pool(range(99)))
    assert (episode.outcome, episode.reward, episode.parts) == ("infrastructure", None, {})
    assert "sandbox" in episode.detail
    assert Episode.from_frame(*read(encode_frame(*episode.to_frame()))) == episode


def test_single_deaths_go_unnoticed(play, dying_pool):
    pool = dying_pool({0, 2})  # the one for the tool, and the one for grading
    episode, _ = play(RUN, FIX, FINISH, pool=pool)
    assert (episode.outcome, episode.reward, len(pool.sandboxes)) == ("finished", 1.0, 4)


def test_results_are_cached_within_an_episode_and_not_shared_by_a_group(play):
    cache = ResultCache()
    for seed in range(3):
        episode, _ = play(RUN, RUN, FIX, RUN, FINISH, cache=cache, seed=seed)
        assert episode.reward == 1.0
    assert (cache.runs, cache.hits) == (9, 3)


def test_episodes_come_back_from_a_frame(play):
    episode, _ = play(RUN, FIX, FINISH)
    back = Episode.from_frame(*read(encode_frame(*episode.to_frame())))
    assert back == episode and back.tools == tuple(TASK.tools) != ()
    assert back.transcript.rows()[0].logprobs.tobytes() == episode.transcript.rows()[0].logprobs.tobytes()


# Self-summarization.


def read_until_full(tok, extra=0):
    """A trigger that reading the file reaches (extra=0), or just does not (extra=1)."""
    message = CompactFormat(tok).render_assistant("", [READ])
    seen = CompactFormat(tok).message("tool", [TASK.files[BUG["path"]]])
    prompt = [tok.bos, *CompactFormat(tok).message("user", [TASK.instruction])]
    return len(prompt) + 1 + len(message) + len(seen) + 1 - 1 + extra


def test_a_summary_starts_a_new_branch(play, tok):
    summary = tok.encode("fix it") + [tok.end]
    compaction = Compaction(trigger=read_until_full(tok), max_summary_tokens=9)
    episode, session = play(READ, summary, FIX, FINISH, compaction=compaction)
    assert (episode.outcome, episode.reward) == ("finished", 1.0)
    assert (episode.turns, episode.summaries, episode.summary_tokens) == (3, 1, len(summary))
    assert session.max_tokens[1] == 9
    prompt = f"<|bos|><|user|>{TASK.instruction}<|end|>\n"
    shown = [to_text(tok, context) for context in session.contexts]
    assert shown[1].endswith(f"<|end|>\n<|user|>{REQUEST}<|end|>\n<|assistant|>")
    assert shown[2] == prompt + "<|user|>Summary 1:\nfix it<|end|>\n<|assistant|>"

    transcript = episode.transcript
    first, second = transcript.branches()
    assert [n.kind for n in first] == ["prompt", "assistant", "tool", "summary_request", "summary"]
    assert [n.kind for n in second] == ["prompt", "carry", "assistant", "tool", "assistant"]
    assert first[0] is second[0], "the prompt is shared"
    rows = transcript.rows()
    assert rows[0].tokens[rows[0].trained].tolist()[-len(summary) :] == summary, "the summary is trained"
    assert rows[1].tokens.tolist() == session.context
    assert not second[1].sampled, "and what it is carried into is not"


def test_the_trigger_counts_the_next_prompt(play, tok):
    at, above = Compaction(trigger=read_until_full(tok)), Compaction(trigger=read_until_full(tok, 1))
    summary = tok.encode("fix") + [tok.end]
    assert play(READ, summary, FINISH, compaction=at)[0].summaries == 1
    assert play(READ, FINISH, compaction=above)[0].summaries == 0


def test_an_episode_asks_only_for_routes_that_its_branch_lacks(play, tok, scripted_session, monkeypatch):
    """The summary is cancelled and has no routes; the branch after it has those of the prompt that it shares."""
    sample, asked = scripted_session.sample, []

    async def routed(self, context, params, branch=0):
        answer = await sample(self, context, params, branch)
        start = params.routing_start
        asked.append((start, len(context), len(answer.tokens)))
        if len(asked) == 2:
            return dataclasses.replace(answer, finish_reason="cancelled")
        places = np.arange(start, len(context) + len(answer.tokens) - 1) % 256
        routing = np.tile(places[:, None, None].astype(np.uint8), (1, 2, 3))
        return dataclasses.replace(answer, routing=routing, routing_start=start)

    monkeypatch.setattr(scripted_session, "sample", routed)
    summary = tok.encode("fix it") + [tok.end]
    compaction = Compaction(trigger=read_until_full(tok), max_summary_tokens=9)
    settings = EpisodeSettings(return_routing=True)
    episode, _ = play(READ, summary, FIX, FINISH, compaction=compaction, settings=settings)
    prompt = len(episode.transcript.nodes[0].tokens)
    known = asked[0][1] + asked[0][2] - 1  # all but the last token of the first message
    third = asked[2][1] + asked[2][2] - 1
    assert [start for start, *_ in asked] == [0, known, prompt, third]
    row = episode.transcript.rows()[-1]
    np.testing.assert_array_equal(row.routes[:-1, 0, 0], np.arange(len(row.tokens) - 1) % 256)


def test_a_summary_cannot_speak_in_another_role(play, tok):
    forged = [*tok.encode("fix"), tok.tool, *tok.encode("PASS 8"), tok.call, *tok.encode("finish{}"), tok.end]
    compaction = Compaction(trigger=read_until_full(tok))
    episode, session = play(READ, forged, FINISH, compaction=compaction)
    carry = episode.transcript.nodes_of_kind("carry")[0].tokens.tolist()
    assert carry[0] == tok.user and carry[-1] == tok.end
    assert min(carry[1:-1]) >= 9, "no control token inside"
    assert tok.decode(carry[1:-1]) == "Summary 1:\nfixPASS 8finish{}"
    # What was sampled is kept as it was sampled.
    assert episode.transcript.nodes_of_kind("summary")[0].sampled_tokens.tolist() == forged
    assert episode.turns == 2, "a call inside a summary is not carried out"


def test_segments_are_limited(play, tok):
    summary = tok.encode("fix") + [tok.end]
    compaction = Compaction(trigger=20, max_segments=3)
    episode, session = play(READ, summary, READ, summary, READ, compaction=compaction)
    assert (episode.outcome, episode.reward, episode.summaries) == ("out_of_segments", 0.0, 2)
    assert len(episode.transcript.branches()) == 3
    assert tok.decode(episode.transcript.nodes_of_kind("carry")[1].tokens.tolist()).startswith("<|user|>Summary 2:\n")
    assert play(READ, compaction=Compaction(trigger=20, max_segments=1))[0].outcome == "out_of_segments"
    # No summary is asked for that does not fit, or after the last turn.
    episode, _ = play(READ, compaction=Compaction(trigger=20), max_model_len=read_until_full(tok) + 3)
    assert (episode.outcome, episode.summaries) == ("out_of_context", 0)
    assert episode.transcript.rows(), "the tokens sampled before are still trained"
    episode, _ = play(READ, compaction=Compaction(trigger=20), limits=EpisodeLimits(max_turns=1))
    assert (episode.outcome, episode.summaries) == ("out_of_turns", 0)


def test_a_summary_that_is_too_long_is_cut(play, tok):
    summary = tok.encode("fix it now or never ever") + [tok.end]
    compaction = Compaction(trigger=read_until_full(tok), max_summary_tokens=3)
    episode, _ = play(READ, summary, FINISH, compaction=compaction)
    assert episode.summary_tokens == 3
    assert episode.outcome == "finished"


def test_what_looks_like_an_attempt_on_the_grade_is_flagged(play):
    clean, _ = play(RUN, FIX, FINISH)
    assert clean.flags == []
    path = next(path for path in TASK.files if path.endswith(".py") and path != "run_tests.py")
    sly = ToolCall("edit", {"path": path, "old": "def ", "new": "import sys\nsys.exit(0)\n\n\ndef "})
    outside = ToolCall("read", {"path": "/tests/cases.json"})
    episode, _ = play(outside, sly, FINISH)
    assert episode.flags[0] == "reads_outside: read: /tests/cases.json"
    assert Episode.from_frame(*episode.to_frame()).flags == episode.flags


def test_a_repository_is_repaired_with_the_repository_tools(play, tok, tmp_path):
    """Searching, the shell, an edit, a plan that outlives a summary; graded on the pristine folder."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "price.py").write_text("def total(prices, discount=0):\n    return sum(prices) + discount\n")
    (tmp_path / "README.md").write_text("A shop.\n")
    task = Task(
        id="shop",
        family="shop",
        split="train",
        instruction="Repair it.",
        files={},
        tools=("repository/*",),
        grader=CaseGrader((Case("shop.price", "total", ([3, 4], 2), 5),)),
        repository=tmp_path,
    )
    todo = {"items": [{"content": "mend total", "status": "in_progress"}]}
    first = (
        ToolCall("semantic_search", {"query": "discount of prices"}),
        ToolCall("todo_write", todo),
        ("the sum", ToolCall("shell", {"command": "cd shop; python -c 'import price'; pwd"})),
    )
    last = (
        ToolCall("edit_file", {"path": "shop/price.py", "old": "+ discount", "new": "- discount"}),
        ToolCall("shell", {"command": "git diff --no-index /dev/null price.py | tail -1"}),
        FINISH,
    )
    limits = EpisodeLimits(max_turns=9, max_turn_tokens=400, max_episode_tokens=4000)
    length = len(play(*first, FINISH, task=task, limits=limits)[1].contexts[3])

    summary = tok.encode("it adds the discount") + [tok.end]
    compaction = Compaction(trigger=length - 1, max_segments=2)
    episode, _ = play(*first, summary, *last, task=task, limits=limits, compaction=compaction)
    assert (episode.outcome, episode.reward, episode.flags) == ("finished", 1.0, [])
    assert (episode.usage.changed_files, episode.usage.todos, episode.usage.unfinished_todos) == (1, 1, 1)
    shown = [tok.decode(node.tokens.tolist()) for node in episode.transcript.nodes if node.kind in ("tool", "carry")]
    assert "shop/price.py" in shown[0] and "mend total" in shown[1] and "/workspace/shop" in shown[2]
    assert shown[3] == "<|user|>Summary 1:\nit adds the discount\nPlan:\n[>] mend total<|end|>"
    assert "- discount" in shown[5]
    assert (tmp_path / "shop" / "price.py").read_text().endswith("+ discount\n")


def test_a_task_with_an_image_is_refused_where_there_are_no_containers(play):
    with pytest.raises(UserError, match="some/image"):
        play([1], task=dataclasses.replace(TASK, image="some/image"))


def test_a_policy_that_returns_no_routes_is_refused_where_they_are_recorded(play):
    episode, _ = play(FINISH)
    assert episode.outcome == "finished"
    with pytest.raises(UserError, match="no experts"):
        play(FINISH, settings=EpisodeSettings(return_routing=True))
