"""The experts: weak in strategy, fallible in detail, the same traces for the same seed, in the very same episodes."""

import asyncio
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from composer_jax.agent.episode import EpisodeLimits
from composer_jax.agent.summary import Compaction
from composer_jax.data import chat
from composer_jax.demo import recall
from composer_jax.demo.bugfix_expert import BugfixRates, bugfix_script
from composer_jax.demo.expert import Rates, make_traces
from composer_jax.demo.generate import generate
from composer_jax.demo.prompts import REQUESTS
from composer_jax.demo.recall import fact_line
from composer_jax.demo.recall_expert import RecallRates
from composer_jax.demo.splits import constants
from composer_jax.errors import UserError
from composer_jax.tasks import Task

LIMITS = EpisodeLimits(max_turns=16, max_turn_tokens=100, max_episode_tokens=6000)
PERFECT = Rates(
    BugfixRates(0, 0, right_fix=1, verify=1, slip=0),
    RecallRates(keep=1, max_others=0, boilerplate=0, slip=0),
)


def traces(pool, tok, family, count, compaction=None, rates=None, split="train", seed=0, **more):
    tasks = [generate(family, split, 1, index) for index in range(count)]
    compaction = compaction or compact(None)
    episodes = asyncio.run(
        make_traces(tasks, lambda task, index: compaction, pool, tok, limits=LIMITS, seed=seed, rates=rates, **more)
    )
    return list(zip(tasks, episodes, strict=True))


def compact(trigger, style="short", **more):
    return Compaction(trigger, REQUESTS[style], **({"max_summary_tokens": 64} | more))


def trigger_on_conf(tok):
    """A trigger that reading the configuration always fires; from a perfect summary on, nothing does."""
    shortest = 10**9
    for index in range(200):
        task = recall.generate("train", 1, index)
        texts = [
            task.instruction,
            task.files[task.metadata["conf"]],
            f'read{{"path":"{task.metadata["conf"]}"}}',
        ]
        shortest = min(shortest, sum(len(tok.encode(text)) for text in texts) + 8)
    return shortest - 1


def said(episode, tok, kind="assistant"):
    return [chat.to_text(tok, node.sampled_tokens.tolist()) for node in episode.transcript.nodes_of_kind(kind)]


@pytest.mark.parametrize("split", ["train", "unseen"])
def test_a_perfect_expert_repairs_everything(pool, tok, split):
    for _, episode in traces(pool, tok, "bugfix", 8, rates=PERFECT, split=split):
        assert (episode.outcome, episode.reward) == ("finished", 1.0), said(episode, tok)
        names = [re.search(r"<\|call\|>(\w+)", text)[1] for text in said(episode, tok)]
        assert names[:5] == ["run_tests", "grep", "read", "edit", "run_tests"]
        assert names[-1] == "finish"


def test_a_perfect_expert_recalls_everything_with_one_short_summary(pool, tok):
    compaction = compact(trigger_on_conf(tok))
    for task, episode in traces(
        pool, tok, "recall", 8, compaction, replace(PERFECT, recall=RecallRates(1, 0, 0, verify=0, slip=0))
    ):
        assert (episode.outcome, episode.reward, episode.summaries) == ("finished", 1.0, 1)
        know = task.metadata
        fact = fact_line(know["key"], know["facts"][know["key"]])
        assert said(episode, tok, "summary") == [fact + "<|end|>\n"]
        assert said(episode, tok)[2].startswith(fact + "<|call|>edit"), "the thought repeats the fact"


def test_without_compaction_the_fact_is_copied_from_the_file(pool, tok):
    for task, episode in traces(pool, tok, "recall", 8):
        assert (episode.outcome, episode.reward, episode.summaries) == ("finished", 1.0, 0)
        know = task.metadata
        edit = next(text for text in said(episode, tok) if "<|call|>edit" in text)
        assert edit.startswith(fact_line(know["key"], know["facts"][know["key"]]))


def test_the_expert_is_imperfect_by_strategy(pool, tok):
    done = traces(pool, tok, "bugfix", 150)
    rewards = [episode.reward for _, episode in done]
    assert 0.25 < sum(rewards) / len(rewards) < 0.55
    assert {episode.outcome for _, episode in done} == {"finished"}
    turns = Counter(len(targets(episode, tok)) for _, episode in done)
    assert turns[2] and turns[4] and turns[5] and turns[6], "gives up early, gives up late, verifies or not"
    for task, episode in done:
        know = task.metadata
        for text in said(episode, tok):
            if "<|call|>edit" in text:
                assert text.startswith(f"{know['head'].removeprefix('def ')}<|call|>")


def targets(episode, tok):
    return [
        chat.to_text(tok, n.sampled_tokens.tolist()) for n in episode.transcript.nodes_of_kind("assistant") if n.trained
    ]


@pytest.mark.parametrize("family", ["bugfix", "recall"])
def test_slips_are_seen_and_recovered_from_but_never_trained(pool, tok, family):
    """What a model is taught is right even where the expert was not; and there is much to recover from."""
    errors = Counter()
    clumsy = Rates(BugfixRates(slip=0.3), RecallRates(slip=0.3))
    for task, episode in traces(pool, tok, family, 120, rates=clumsy):
        path, new = task.metadata["path"], task.metadata["new"]
        text = task.files[path]
        nodes = episode.transcript.nodes
        for node, answer in zip(nodes, nodes[1:], strict=False):
            if node.kind != "assistant":
                continue
            said = tok.decode(answer.tokens.tolist())
            [call] = chat.parse_assistant(tok, node.sampled_tokens.tolist()).calls
            if "ERROR" in said:
                assert not node.trained, said
                errors[next((e for e in ("no such file", "same", "not in", "not JSON") if e in said), "other")] += 1
            elif call.name == "edit":
                edit = call.arguments
                assert edit["old"] in text, "an edit that was meant to fail was carried out"
                text = text.replace(edit["old"], edit["new"])
                assert not node.trained or (edit["path"], edit["new"]) == (path, new)
        [row] = episode.transcript.rows()
        assert row.trained.sum() == sum(len(n.sampled_tokens) for n in nodes if n.trained)
    assert {"no such file", "same", "not in", "not JSON"} <= set(errors), errors
    assert sum(errors.values()) > 25


def test_the_script_never_runs_out_of_mistakes():
    """Thousands of scripts without sandboxes: whatever is answered, there is a next turn until the last."""
    clumsy = BugfixRates(0, 0, right_fix=0.2, retry=0.9, verify=0.9, slip=0.3)
    answers = {"run_tests": "FAIL f(1) is 2, want 3", "edit": "ok"}
    for index in range(3000):
        task = generate("bugfix", "train", 8, index % 300)
        script = bugfix_script(task, clumsy, random.Random(index))
        turn, line, seen = next(script), task.metadata["old"], 0
        while turn.call.name != "finish":
            if turn.call.name == "edit" and not turn.cut and turn.call.arguments["old"] == line:
                line = turn.call.arguments["new"]
            turn, seen = script.send(answers.get(turn.call.name, "def")), seen + 1
            assert seen < 500


@pytest.mark.parametrize("style", ["short", "long"])
def test_summaries_claim_only_what_was_done(pool, tok, style):
    compaction = compact(trigger_on_conf(tok), style, max_segments=8, max_summary_tokens=400)
    clumsy = Rates(recall=RecallRates(slip=0.4))
    for _, episode in traces(pool, tok, "recall", 40, compaction, rates=clumsy):
        done = set()
        for node, answer in zip(episode.transcript.nodes, episode.transcript.nodes[1:], strict=False):
            text = tok.decode(node.sampled_tokens.tolist())
            if node.kind == "assistant" and "ERROR" not in tok.decode(answer.tokens.tolist()):
                [call] = chat.parse_assistant(tok, node.sampled_tokens.tolist()).calls
                done.add(f"{call.name} {call.arguments.get('path')}")
            if node.kind == "summary":
                claimed = set(re.findall(r"read \w+\.py", text)) | {
                    edit.replace("edited", "edit") for edit in re.findall(r"edited \w+\.py", text)
                }
                assert claimed <= done
                read = {action for action in done if action.startswith("read")}
                assert style == "short" or read <= claimed, "no other file was read so far"


def test_constants_of_slips_belong_to_the_split(pool, tok):
    allowed = {"0", "1", *map(str, constants("train", 2, 99))}
    for _, episode in traces(pool, tok, "bugfix", 100):
        for text in said(episode, tok):
            if "<|call|>edit" in text:
                assert set(re.findall(r"\d+", text)) <= allowed, text


def test_a_repair_that_failed_is_repaired(pool, tok):
    wrong_first = replace(PERFECT, bugfix=replace(PERFECT.bugfix, right_fix=0.5, retry=1, reread=0.5))
    retried = 0
    for _, episode in traces(pool, tok, "bugfix", 24, rates=wrong_first):
        edits = [n for n in episode.transcript.nodes_of_kind("assistant") if "edit" in tok.decode(n.tokens.tolist())]
        retried += len(edits) > 1
        assert [n.trained for n in edits[:-1]] == [False] * (len(edits) - 1)
        # The visible tests do not reveal every wrong repair; what they reveal is repaired until they pass.
        assert (episode.outcome, episode.reward) == ("finished", 1.0) or not edits[-1].trained
    assert retried >= 6


@pytest.mark.parametrize("style", ["short", "long"])
def test_summaries_say_only_what_is_true(pool, tok, style):
    compaction = compact(trigger_on_conf(tok), style, max_segments=6, max_summary_tokens=400)
    done = traces(pool, tok, "recall", 60, compaction)
    kept = boilerplate = first_summaries = 0
    for task, episode in done:
        know = task.metadata
        true = {fact_line(k, v) for k, v in know["facts"].items()}
        assert episode.summaries >= 1, "reading the configuration always fires the trigger"
        for number, text in enumerate(said(episode, tok, "summary")):
            facts = set(re.findall(r"^\w+ = \d+$", text.removesuffix("<|end|>\n"), re.MULTILINE))
            assert facts <= true
            if number == 0:
                first_summaries += 1
                kept += fact_line(know["key"], know["facts"][know["key"]]) in facts
                boilerplate += text.startswith("This is")
            if style == "long":
                assert all(section in text for section in ("Goal:", "Files:", "Facts:", "Done:", "Next:"))
    assert 0.3 < kept / first_summaries < 0.7
    assert (0.3 < boilerplate / first_summaries < 0.75) if style == "short" else boilerplate == 0
    rewards = [episode.reward for _, episode in done]
    assert 0.35 < sum(rewards) / len(rewards) < 0.9
    # Long reports are paid for in tokens, and in segments.
    per_summary = sum(e.summary_tokens for _, e in done) / sum(e.summaries for _, e in done)
    assert per_summary > 110 if style == "long" else per_summary < 40


def test_a_forgotten_fact_is_read_again_or_guessed(pool, tok):
    compaction = compact(trigger_on_conf(tok), max_segments=3)
    forgetful = RecallRates(keep=0, boilerplate=0, verify=0, slip=0)
    again = traces(pool, tok, "recall", 6, compaction, Rates(recall=replace(forgetful, reread=1)))
    assert {(e.outcome, e.reward) for _, e in again} == {("out_of_segments", 0.0)}
    guessed = traces(pool, tok, "recall", 6, compaction, Rates(recall=replace(forgetful, reread=0)))
    assert all(e.outcome == "finished" for _, e in guessed)
    assert sum(e.reward for _, e in guessed) <= 1
    for _, episode in guessed:
        edits = [text for text in said(episode, tok) if "<|call|>edit" in text]
        assert all(text.startswith("<|call|>") for text in edits), "a guess has no thought"


def test_traces_depend_on_the_seed_and_not_on_the_timing(pool, tok):
    compaction = compact(trigger_on_conf(tok))
    one = traces(pool, tok, "recall", 10, compaction, seed=3, concurrency=1)
    many = traces(pool, tok, "recall", 10, compaction, seed=3, concurrency=10)
    assert [e for _, e in one] == [e for _, e in many]
    other = traces(pool, tok, "recall", 10, compaction, seed=4)
    assert [e.transcript for _, e in one] != [e.transcript for _, e in other]


def test_every_trace_is_reported_once(pool, tok):
    done = []
    result = traces(pool, tok, "bugfix", 6, concurrency=3, on_done=done.append)
    assert sorted(e.task_id for e in done) == sorted(e.task_id for _, e in result)


def test_traces_have_no_weights_behind_them(pool, tok):
    [(_, episode)] = traces(pool, tok, "recall", 1)
    [row] = episode.transcript.rows()
    assert (row.logprobs == 0).all() and (row.versions == -1).all()


def test_what_no_expert_can_do_is_said(pool, tok):
    with pytest.raises(UserError, match="bugfix expert writes no summaries"):
        traces(pool, tok, "bugfix", 1, compact(20))
    task = Task.from_json({**generate("bugfix", "train", 0, 0).to_json(), "family": "swe"})
    with pytest.raises(UserError, match="no expert for task family 'swe'; use bugfix or recall"):
        asyncio.run(make_traces([task], lambda t, i: compact(None), pool, tok, limits=LIMITS))
