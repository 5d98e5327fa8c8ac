"""Bugs with contradictory notes: one person of three is right, and the messages suffice for one attempt at each."""

import asyncio
import dataclasses
from collections import Counter

import pytest

from composer_jax.agent.episode_context import EpisodeLimits
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.demo import bugfix_expert, notes
from composer_jax.demo.exercises import note_exercise
from composer_jax.demo.functions import FOUR_WAY_KINDS, KINDS
from composer_jax.demo.notes import PEOPLE, RELIABLE, OneBug, ThreeBugs, TwoBugs
from composer_jax.errors import UserError
from tests.demo.expert_episodes import make_traces
from tests.demo.repairs import failing, hidden, passes, repaired, right_lines, states, visible

FAMILIES = [OneBug(), TwoBugs(), ThreeBugs()]


@pytest.fixture(params=FAMILIES, ids=lambda family: family.FAMILY)
def family(request):
    return request.param


def test_a_task_is_a_function_of_its_arguments(family):
    assert family.generate("train", 3, 5) == family.generate("train", 3, 5)
    tasks = [family.generate(split, seed, i) for split in ("train", "heldout") for seed in (0, 1) for i in range(50)]
    assert len({task.digest for task in tasks}) == len({task.id for task in tasks}) == len(tasks)
    assert {task.family for task in tasks} == {family.FAMILY}


def test_as_many_functions_fail_as_the_family_says(family):
    for index in range(60):
        task = family.generate("heldout", 0, index)
        broken = {bug["function"] for bug in task.metadata["bugs"]}
        assert len(broken) == len(task.metadata["bugs"]) == family.BUGS
        assert failing(task.files, visible(task)) == failing(task.files, hidden(task)) == broken


def test_notes_contradict_each_other_and_one_of_them_is_right(family):
    for index in range(60):
        task = family.generate("heldout", 1, index)
        for bug in task.metadata["bugs"]:
            texts = {person: task.files[f"{person}/{bug['function']}"] for person in PEOPLE}
            claims = set()
            for person, text in texts.items():
                said, repair = bug["notes"][person]
                assert text == f"{said} in {bug['path']}\n" and said.startswith(f"{bug['function']}: ")
                assert bug["claims"][repair] == said.partition(": ")[2]
                claims.add(said)
            assert len(claims) == 3
            repairs = {person: line for person, (_, line) in bug["notes"].items()}
            assert repairs.pop(RELIABLE) == bug["new"]
            assert sorted(repairs.values()) == sorted(bug["wrong"]) and bug["old"] not in repairs.values()
        assert sum("/" in path for path in task.files) == 3 * family.BUGS


def test_the_tests_agree_with_one_person():
    """Every repair that a note describes is carried out, and the hidden tests say whether it is right."""
    for index in range(60):
        task = OneBug().generate("heldout", 1, index)
        (bug,) = task.metadata["bugs"]
        states = {person: repaired(task, {bug["function"]: line}) for person, (_, line) in bug["notes"].items()}
        assert [person for person, files in states.items() if all(passes(files, hidden(task)))] == [RELIABLE]


def test_everybody_is_right_equally_often_where_nobody_is_reliable():
    tasks = [notes.generate("two_bugs", 2, "train", 0, index, reliable=None) for index in range(300)]
    right = [
        next(person for person, (_, line) in bug["notes"].items() if line == bug["new"])
        for task in tasks
        for bug in task.metadata["bugs"]
    ]
    assert set(Counter(right)) == set(PEOPLE) and min(Counter(right).values()) > 170
    same = sum(a == b for a, b in zip(right[::2], right[1::2], strict=True))
    assert 70 < same < 130, "drawn for every bug"


def test_nothing_else_says_what_a_function_should_return(family):
    for index in range(60):
        task = family.generate("train", 1, index)
        modules = [text for path, text in task.files.items() if path.endswith(".py") and path != "run_tests.py"]
        assert sum(text.count("def ") for text in modules) == 4
        assert not any("#" in text for text in (*modules, task.files["cases.json"]))
        assert task.instruction == "Fix the failing test."


def test_visible_tests_pass_where_every_bug_is_repaired_and_hidden_ones_agree(family):
    """Every state that an agent reaches with lines of the bugs' kinds; one wrong line in it fails both."""
    for index in range(20):
        task = family.generate("heldout", 2, index)
        right = 0
        for lines in states(task):
            files, is_right = repaired(task, lines), lines == right_lines(task)
            assert all(passes(files, visible(task))) == all(passes(files, hidden(task))) == is_right, (task.id, lines)
            right += is_right
        assert right == 1


def test_kinds_are_those_whose_expressions_have_words():
    kinds = {OneBug().generate("train", 0, index).metadata["kind"] for index in range(100)}
    assert kinds == set(FOUR_WAY_KINDS) == set(KINDS) - {"constant", "composed"}


def test_nobody_else_has_notes():
    with pytest.raises(UserError, match="reliable='joe', but notes are those of ann, bob, eve"):
        notes.generate("one_bug", 1, "train", 0, 0, reliable="joe")


# -- The expert ---------------------------------------------------------------------------------------------------


LIMITS = EpisodeLimits(max_turns=50, max_turn_tokens=100, max_episode_tokens=6000)


def play(pool, tok, tasks):
    return asyncio.run(make_traces(tasks, lambda *_: Compaction(None), pool, tok, limits=LIMITS))


def calls(episode, tok):
    nodes = episode.transcript.nodes_of_kind("assistant")
    return [call for node in nodes for call in CompactFormat(tok).parse(node.sampled_tokens.tolist()).calls]


def without_limit(task):
    return dataclasses.replace(task, max_turns=None)


def test_who_reads_the_right_notes_has_a_message_to_spare(pool, tok, slip_rate, monkeypatch, family):
    slip_rate(0.0)
    monkeypatch.setattr(bugfix_expert, "draw_order", lambda rng: [RELIABLE])
    tasks = [family.generate("heldout", 3, i) for i in range(12)]
    for task, episode in zip(tasks, play(pool, tok, tasks), strict=True):
        assert (episode.outcome, episode.reward) == ("finished", 1.0)
        modules = {bug["path"] for bug in task.metadata["bugs"]}
        assert episode.turns == 2 + 2 * family.BUGS + len(modules) <= task.max_turns - 1
        read = [call.arguments["path"] for call in calls(episode, tok) if call.name == "read"]
        assert sorted(read) == sorted({*modules, *(f"{RELIABLE}/{bug['function']}" for bug in task.metadata["bugs"])})


def test_the_wrong_notes_are_one_message_too_many(pool, tok, slip_rate, monkeypatch):
    slip_rate(0.0)
    monkeypatch.setattr(bugfix_expert, "draw_order", lambda rng: [*PEOPLE[1:], RELIABLE])
    tasks = [OneBug().generate("heldout", 3, i) for i in range(4)]
    assert {(e.outcome, e.reward) for e in play(pool, tok, tasks)} == {("out_of_turns", 0.0)}
    whole = play(pool, tok, [without_limit(task) for task in tasks])
    assert {(e.outcome, e.reward, e.turns) for e in whole} == {("finished", 1.0, 9)}


def test_the_expert_reads_everybodys_notes_equally_often(pool, tok, slip_rate):
    slip_rate(0.0)
    tasks = [without_limit(OneBug().generate("train", 4, i)) for i in range(90)]
    first, attempts = Counter(), Counter()
    for episode in play(pool, tok, tasks):
        assert (episode.outcome, episode.reward) == ("finished", 1.0)
        assert all(node.trained for node in episode.transcript.nodes_of_kind("assistant")), "an attempt is not a slip"
        first[calls(episode, tok)[1].arguments["path"].partition("/")[0]] += 1
        attempts[sum(call.name == "edit" for call in calls(episode, tok))] += 1
    assert set(first) == set(PEOPLE) and min(first.values()) > 15
    assert set(attempts) == {1, 2, 3} and min(attempts.values()) > 15


def test_the_tests_name_the_function_and_nothing_else(pool):
    task = OneBug().generate("heldout", 4, 0)
    (bug,) = task.metadata["bugs"]

    async def outputs():
        sandbox = await pool.acquire(task.files)
        texts = []
        for line in (bug["old"], "return unknown", "raise SystemExit(0)", "return (", bug["new"]):
            await sandbox.write(bug["path"], repaired(task, {bug["function"]: line})[bug["path"]])
            texts.append((await sandbox.run(["python", "run_tests.py"])).stdout)
        await sandbox.close()
        return texts

    *wrong, broken_module, right = asyncio.run(outputs())
    assert wrong == [f"FAIL {bug['function']}\n"] * 3
    assert broken_module.startswith("FAIL ") and len(broken_module.split()) == 2
    assert right.startswith("PASS ")


def test_a_note_exercise_is_a_piece_of_the_experts_conversation(pool, tok, slip_rate):
    slip_rate(slip=0.0)
    tasks = [without_limit(notes.generate("one_bug", 1, "train", 7, index, reliable=None)) for index in range(4)]
    for task, episode in zip(tasks, play(pool, tok, tasks), strict=True):
        (bug,) = task.metadata["bugs"]
        (row,) = episode.transcript.rows()
        whole = row.tokens.tolist()
        places = []
        for person in PEOPLE:
            tokens, trained = note_exercise(task, person, tok)
            assert tokens.dtype == "int32" and trained.dtype == bool and len(tokens) == len(trained)
            places += [i for i in range(len(whole)) if whole[i : i + len(tokens)] == tokens.tolist()]
            step = tokens[trained].tolist()
            [call] = CompactFormat(tok).parse(step).calls
            assert (call.name, call.arguments) == ("read", {"path": bug["path"]})
            assert tokens[-len(step) :].tolist() == step and bug["path"] in tok.decode(tokens[~trained].tolist())
        assert len(places) == 1, "the module is read after the first note"
