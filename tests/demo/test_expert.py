"""The experts: as good as they can be, fallible in detail, the same traces for the same seed, in real episodes."""

import asyncio
import random
import re
from collections import Counter

import pytest

from composer_jax.agent.episode_context import EpisodeLimits
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.demo import bugfix, memory_chain
from composer_jax.demo.bugfix_expert import bugfix_script
from composer_jax.demo.prompts import REQUESTS
from composer_jax.demo.splits import constants
from composer_jax.errors import UserError
from composer_jax.tasks import Task
from tests.demo.expert_episodes import make_traces
from tests.demo.generate import generate
from tests.to_text import to_text

LIMITS = EpisodeLimits(max_turns=60, max_turn_tokens=100, max_episode_tokens=10_000)
TRIGGER = 64
"""Tokens of context that a chain exceeds after some files, whatever their names are."""


def play(pool, tok, tasks, compaction=None, seed=0, **more):
    compaction = compaction or short_compaction(None)
    episodes = asyncio.run(
        make_traces(tasks, lambda task, index: compaction, pool, tok, limits=LIMITS, seed=seed, **more)
    )
    return list(zip(tasks, episodes, strict=True))


def traces(pool, tok, family, count, compaction=None, **more):
    return play(pool, tok, [generate(family, "train", 1, index) for index in range(count)], compaction, **more)


def short_compaction(trigger, style="short"):
    return Compaction(trigger, REQUESTS[style], max_segments=10, max_summary_tokens=200)


def said(episode, tok, kind="assistant"):
    return [to_text(tok, node.sampled_tokens.tolist()) for node in episode.transcript.nodes_of_kind(kind)]


def calls(episode, tok):
    """Every call, in order."""
    nodes = episode.transcript.nodes_of_kind("assistant")
    return [call for node in nodes for call in CompactFormat(tok).parse(node.sampled_tokens.tolist()).calls]


# -- Bug fixing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "unseen"])
def test_without_slips_one_bug_takes_six_calls(pool, tok, slip_rate, split):
    slip_rate(0.0)
    messages = set()
    for task, episode in play(pool, tok, [bugfix.generate(split, 1, index, bugs=1) for index in range(8)]):
        assert (episode.outcome, episode.reward) == ("finished", 1.0), said(episode, tok)
        names = [call.name for call in calls(episode, tok)]
        assert names == ["run_tests", "grep", "read", "edit", "run_tests", "finish"]
        (bug,) = task.metadata["bugs"]
        assert said(episode, tok)[3].startswith(f"{bug['head'].removeprefix('def ')}<|call|>"), "it quotes the file"
        messages.add(episode.turns)
    assert messages == {5, 6}, "the tests after the repair, in its message or in one of their own"


def test_two_bugs_are_repaired_and_no_file_is_read_twice(pool, tok, slip_rate):
    slip_rate(0.0)
    files = Counter()
    for task, episode in play(pool, tok, [bugfix.generate("train", 1, index, bugs=2) for index in range(10)]):
        assert (episode.outcome, episode.reward) == ("finished", 1.0), said(episode, tok)
        read = [call.arguments["path"] for call in calls(episode, tok) if call.name == "read"]
        assert sorted(read) == sorted({bug["path"] for bug in task.metadata["bugs"]})
        files[len(read)] += 1
        names = Counter(call.name for call in calls(episode, tok))
        assert names == {"run_tests": 3, "grep": len(read), "read": len(read), "edit": 2, "finish": 1}
    assert set(files) == {1, 2}, "both bugs in one file, and one in each"


def test_slips_are_seen_and_recovered_from_but_never_trained(pool, tok, slip_rate):
    """What a model is taught is right even where the expert was not; and there is much to recover from."""
    slip_rate(0.3)
    errors = Counter()
    for task, episode in traces(pool, tok, "bugfix", 60):
        assert (episode.outcome, episode.reward) == ("finished", 1.0)
        repairs = {(bug["path"], bug["old"], bug["new"]) for bug in task.metadata["bugs"]}
        nodes = episode.transcript.nodes
        for node, answer in zip(nodes, nodes[1:], strict=False):
            if node.kind != "assistant":
                continue
            observation = tok.decode(answer.tokens.tolist())
            call, *_ = CompactFormat(tok).parse(node.sampled_tokens.tolist()).calls
            if "ERROR" in observation:
                assert not node.trained, observation
                known = ("no such file", "same", "not in", "not JSON")
                errors[next((error for error in known if error in observation), "other")] += 1
            elif call.name == "edit":
                assert node.trained
                repairs.remove(tuple(call.arguments[name] for name in ("path", "old", "new")))
        assert not repairs, "every bug was repaired, and nothing else was edited"
        [row] = episode.transcript.rows()
        assert row.trained.sum() == sum(len(n.sampled_tokens) for n in nodes if n.trained)
    assert {"no such file", "same", "not in", "not JSON"} <= set(errors), errors
    assert sum(errors.values()) > 25


def test_a_wrong_repair_is_not_a_target_and_the_right_one_replaces_it(pool, tok, slip_rate):
    slip_rate(0.0, wrong=0.5)
    tries = Counter()
    for task, episode in traces(pool, tok, "bugfix", 30):
        assert (episode.outcome, episode.reward) == ("finished", 1.0)
        lines = {bug["function"]: bug["old"] for bug in task.metadata["bugs"]}
        wrong = {bug["function"]: bug["wrong"] for bug in task.metadata["bugs"]}
        right = {bug["function"]: bug["new"] for bug in task.metadata["bugs"]}
        tried = Counter()
        nodes = episode.transcript.nodes
        for node in (node for node in nodes if node.kind == "assistant"):
            message = CompactFormat(tok).parse(node.sampled_tokens.tolist())
            if message.calls[0].name != "edit":
                continue
            function = message.content.partition("(")[0]
            edit = message.calls[0].arguments
            assert edit["old"] == lines[function], "it replaces what is there now"
            lines[function] = edit["new"]
            assert node.trained == (edit["new"] == right[function])
            if not node.trained:
                assert edit["new"] in wrong[function] and message.calls[1].name == "run_tests"
                tried[function, edit["new"]] += 1
        assert lines == right and set(tried.values()) <= {1}, "none is tried twice"
        tries[len(tried)] += 1
    assert tries[0] and tries[1] and tries[2]


def test_the_script_repairs_every_bug_whatever_slips():
    """Thousands of scripts without sandboxes."""
    for index in range(2000):
        task = generate("bugfix", "train", 8, index % 200)
        script = bugfix_script(task, random.Random(index), slip=0.3, wrong=0.0)
        broken = {bug["function"]: bug for bug in task.metadata["bugs"]}
        turn = next(script)
        for _ in range(500):
            if turn.call.name == "finish":
                break
            for function, bug in list(broken.items()):
                if turn.call.arguments == {name: bug[name] for name in ("path", "old", "new")} and not turn.cut:
                    del broken[function]
            report = f"FAIL {next(iter(broken))}(1) is 2, want 3" if broken else "PASS 8"
            turn = script.send(report if "run_tests" in (turn.call.name, *(c.name for c in turn.more)) else "ok")
        assert turn.call.name == "finish" and not broken


def test_constants_of_slips_belong_to_the_split(pool, tok, slip_rate):
    slip_rate(0.3)
    allowed = {"0", "1", *map(str, constants("train", 2, 99))}
    numbers = set()
    for _, episode in traces(pool, tok, "bugfix", 60):
        # A call that is cut short may end within a number.
        whole = [call for call in calls(episode, tok) if isinstance(call, ToolCall)]
        edits = [call.arguments for call in whole if call.name == "edit"]
        numbers |= {n for edit in edits for text in edit.values() for n in re.findall(r"\d+", text)}
    assert len(numbers) > 30 and numbers <= allowed


# -- Memory chains ------------------------------------------------------------------------------------------------


def items_in(text):
    return set(re.findall(r"^item_\d+ = \w+$", text, re.MULTILINE))


@pytest.mark.parametrize("style", ["short", "long"])
def test_summaries_say_what_was_read_and_a_long_one_all_of_it(pool, tok, style):
    summaries = 0
    for task, episode in traces(pool, tok, "memory_chain", 12, short_compaction(TRIGGER, style)):
        assert episode.outcome == "finished" and episode.summaries >= 2
        assert style == "short" or episode.reward == 1.0
        shown = set()
        for node in episode.transcript.nodes:
            text = to_text(tok, node.tokens.tolist()).replace("<|end|>", "\n").replace("<|tool|>", "\n")
            if node.kind == "tool":
                shown |= items_in(text)
            if node.kind == "summary":
                summaries += 1
                kept = items_in(to_text(tok, node.sampled_tokens.tolist()).replace("<|end|>", ""))
                assert kept <= shown <= set(task.metadata["items"])
                # After the last file, a short one keeps the item that is asked for, if the expert knows it.
                assert len(kept) <= 1 if style == "short" else kept == shown
                assert all(title in text for title in ("Goal:", "Facts:", "Next:")) == (style == "long")
    assert summaries >= 24


def test_without_compaction_the_item_is_copied_from_the_context(pool, tok):
    for task, episode in traces(pool, tok, "memory_chain", 6):
        assert (episode.outcome, episode.reward, episode.summaries) == ("finished", 1.0, 0)
        assert episode.turns == memory_chain.STEPS == task.max_turns
        assert said(episode, tok)[-1].startswith(f"{next(iter(task.metadata['items']))}<|call|>edit")


# -- All traces ---------------------------------------------------------------------------------------------------


def test_traces_depend_on_the_seed_and_not_on_the_timing(pool, tok):
    compaction = short_compaction(TRIGGER)
    one = traces(pool, tok, "memory_chain", 10, compaction, seed=3, concurrency=1)
    many = traces(pool, tok, "memory_chain", 10, compaction, seed=3, concurrency=10)
    assert [e for _, e in one] == [e for _, e in many]
    other = traces(pool, tok, "memory_chain", 10, compaction, seed=4)
    assert [e.transcript for _, e in one] != [e.transcript for _, e in other]


def test_every_trace_is_reported_once(pool, tok):
    done = []
    result = traces(pool, tok, "bugfix", 6, concurrency=3, on_done=done.append)
    assert sorted(e.task_id for e in done) == sorted(e.task_id for _, e in result)


def test_traces_have_no_weights_behind_them(pool, tok):
    [(_, episode)] = traces(pool, tok, "memory_chain", 1)
    [row] = episode.transcript.rows()
    assert (row.logprobs == 0).all() and (row.versions == -1).all()


def test_what_no_expert_can_do_is_said(pool, tok):
    with pytest.raises(UserError, match="expert of bugfix writes no summaries"):
        traces(pool, tok, "bugfix", 1, short_compaction(20))
    task = Task.from_json({**generate("bugfix", "train", 0, 0).to_json(), "family": "swe"})
    known = "bugfix or one_bug or two_bugs or three_bugs or memory_chain or few_lookups or many_lookups"
    with pytest.raises(UserError, match=f"no expert for task family 'swe'; use {known}"):
        play(pool, tok, [task])
