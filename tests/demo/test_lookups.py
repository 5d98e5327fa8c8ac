"""Lookups: tasks whose files do not depend on each other, and an expert that reads them side by side or not."""

import asyncio
from collections import Counter

import pytest

from composer_jax.agent.episode_context import EpisodeLimits
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.demo.lookups import ANSWER_FILE, LOOKUPS, UNKNOWN, FewLookups, ManyLookups, lookup_texts
from composer_jax.demo.memory_chain import quoted
from composer_jax.demo.splits import file_stems
from composer_jax.tasks.grading import grade, initial_changes
from tests.demo.expert_episodes import make_traces
from tests.tasks.conftest import as_changes


@pytest.fixture(params=LOOKUPS.values(), ids=list(LOOKUPS))
def family(request):
    return request.param


def test_a_task_is_a_function_of_its_arguments(family):
    assert family.generate("train", 3, 5) == family.generate("train", 3, 5)
    tasks = [family.generate(split, seed, i) for split in ("train", "heldout") for seed in (0, 1) for i in range(50)]
    assert len({task.digest for task in tasks}) == len({task.id for task in tasks}) == len(tasks)
    assert {task.family for task in tasks} == {family.FAMILY}


def test_the_instruction_names_all_files_and_every_file_has_one_value(family):
    for split, other in (("train", "heldout"), ("heldout", "train")):
        for index in range(60):
            task = family.generate(split, 0, index)
            paths = task.metadata["paths"]
            assert len(set(paths)) == family.FILES and set(paths) <= set(file_stems(split)) - set(file_stems(other))
            assert task.instruction == f"Read {' '.join(paths)}." and list(task.files) == [*paths, ANSWER_FILE]
            assert task.metadata["answer"] == " ".join(task.files[path].strip() for path in paths)


def test_the_answer_has_every_name_with_its_value(pool):
    async def check():
        task = ManyLookups().generate("heldout", 5, 0)
        answer = task.metadata["answer"]
        swapped = " ".join(reversed(answer.split()))
        for text, reward in ((answer, 1.0), (swapped, 0.0), (answer.rpartition(" ")[0], 0.0)):
            files = {ANSWER_FILE: task.files[ANSWER_FILE].replace(UNKNOWN, quoted(text))}
            assert (await grade(task, as_changes(files), pool)).reward == reward
        assert (await grade(task, initial_changes(task), pool)).reward == 0.0

    asyncio.run(check())


LIMITS = EpisodeLimits(max_turns=50, max_turn_tokens=400, max_episode_tokens=6000)


def calls_by_message(episode, tok):
    nodes = episode.transcript.nodes_of_kind("assistant")
    return [CompactFormat(tok).parse(node.sampled_tokens.tolist()).calls for node in nodes]


def test_the_expert_reads_side_by_side_half_of_the_time_and_always_solves(pool, tok):
    tasks = [ManyLookups().generate("train", 4, i) for i in range(60)]
    tasks += [FewLookups().generate("train", 4, i) for i in range(60)]
    episodes = asyncio.run(make_traces(tasks, lambda *_: Compaction(None), pool, tok, limits=LIMITS))
    joined = Counter()
    for task, episode in zip(tasks, episodes, strict=True):
        assert (episode.outcome, episode.reward) == ("finished", 1.0) and episode.turns < task.max_turns
        *reads, last = calls_by_message(episode, tok)
        assert [call.arguments["path"] for message in reads for call in message] == task.metadata["paths"]
        assert [call.name for call in last] == ["edit", "finish"]
        joined[task.family] += len(task.metadata["paths"]) - len(reads)
        assert episode.usage.total_calls == len(task.metadata["paths"]) + 2
    # Of three boundaries in 60 tasks, and of one: binomial with probability 1/2, four standard deviations.
    assert abs(joined["many_lookups"] - 90) < 27 and abs(joined["few_lookups"] - 30) < 16


def test_the_tokenizer_sees_what_the_agent_writes():
    texts = list(lookup_texts(0, 2))
    assert len(texts) == 2 * 8 and texts[0].startswith("Read ") and "finish{}" in texts[7]
    assert texts != list(lookup_texts(1, 2)) and texts == list(lookup_texts(0, 2))
