"""Memory chains: one fact of step 1, three summaries, a grader that knows; and an expert without a planted weakness."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from composer_jax.agent import summary
from composer_jax.agent.summary import FACTS
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.demo import memory_chain
from composer_jax.demo.expert_traces import ExpertTraces
from composer_jax.demo.memory_chain import CHANCE, STEPS, VALUES, MemoryChain, generate, item_line, next_line, quoted
from composer_jax.demo.memory_chain_expert import ChainNotes, chain_script, chain_summary
from composer_jax.demo.prompts import REQUESTS
from composer_jax.demo.splits import file_stems, is_heldout
from composer_jax.demo.texts import chain_texts
from composer_jax.errors import UserError
from composer_jax.schema.run_config import run_config
from composer_jax.stages.run_data import RunData
from composer_jax.stages.trace_sources import SourceContext
from composer_jax.tasks.grading import grade, initial_changes
from configs.memory_chain import SIZES, SUMMARY_TOKENS, get_config
from tests.demo.expert_episodes import make_traces
from tests.tasks.conftest import as_changes
from tests.to_text import to_text

CONFIG = run_config(get_config())
WHOLE = 40
"""Whole chains that the expert plays for these tests, and as many short ones."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The tokenizer of the config, whose lengths decide where summaries fall."""
    return RunData(CONFIG, tmp_path_factory.mktemp("run")).tokenizer


@pytest.fixture(scope="module")
def played(tokenizer, tmp_path_factory):
    """The expert's traces: (task, episode), whole chains first."""
    counts = {"chain": WHOLE, "chain_start": WHOLE}
    folder = tmp_path_factory.mktemp("traces")
    context = SourceContext(3, tokenizer, CompactFormat(tokenizer), CONFIG.agent, folder)
    return ExpertTraces(context, counts).play()


def answered(task, text):
    path = task.metadata["paths"][-1]
    return {path: task.files[path].replace(task.metadata["name"], text)}


# -- The family ---------------------------------------------------------------------------------------------------


def test_a_task_is_a_function_of_its_arguments_and_always_asks_for_the_first_item():
    assert generate("train", 3, 5) == MemoryChain().generate("train", 3, 5)
    tasks = [generate("heldout", 0, index) for index in range(400)]
    assert len({task.digest for task in tasks}) == 400
    for task in tasks:
        know = task.metadata
        (fact,) = know[FACTS]
        assert task.files[know["paths"][0]].startswith(f"{fact}\n") and know["name"] in task.files[know["paths"][-1]]
        assert know["name"] == "item_1" and "item" not in task.instruction, "nothing says what will be asked for"


def test_every_file_names_the_next_and_only_it():
    task = generate("train", 1, 2)
    paths = task.metadata["paths"]
    assert len(paths) == STEPS - 1 and list(task.files) == paths
    for at, path in enumerate(paths[:-1]):
        assert [other for other in paths if other in task.files[path]] in ([paths[at + 1]], [paths[at + 1][:-3]])
        assert task.files[path].endswith(f"{next_line(paths[at + 1])}\n")


def test_splits_share_the_values_and_no_file_name():
    stems = {
        split: {path.removesuffix(".py") for i in range(200) for path in generate(split, 0, i).files}
        for split in ("train", "heldout")
    }
    assert stems["train"].isdisjoint(stems["heldout"]) and stems["heldout"] <= set(file_stems("heldout"))
    assert all(is_heldout("file", stem) for stem in stems["heldout"])


def test_the_item_of_the_first_file_is_uniform_and_independent_of_the_others():
    items = [tuple(generate("heldout", 0, i).metadata["items"].values()) for i in range(4000)]
    first = Counter(values[0] for values in items)
    assert set(first) == set(VALUES) and max(first.values()) / 4000 < CHANCE + 0.03
    assert sum(values[0] == values[-1] for values in items) / 4000 == pytest.approx(CHANCE, abs=0.02)


def test_any_item_can_be_asked_for():
    asked = Counter(generate("train", 0, i, asked=None).metadata["name"] for i in range(1000))
    assert set(asked) == {f"item_{number}" for number in range(1, STEPS - 1)} and min(asked.values()) > 100
    assert generate("train", 0, 0, asked=4).metadata["name"] == "item_4"
    for wrong in ({"steps": 2}, {"asked": 7}, {"asked": 0}):
        with pytest.raises(UserError, match="a chain of .* steps has"):
            generate("train", 0, 0, **wrong)


def test_in_a_real_sandbox(pool):
    async def check():
        task = generate("heldout", 5, 0)
        value = task.metadata[FACTS][0].removeprefix("item_1 = ")
        wrong = next(other for other in VALUES if other != value)
        assert (await grade(task, initial_changes(task), pool)).reward == 0.0
        assert (await grade(task, as_changes(answered(task, quoted(value))), pool)).reward == 1.0
        assert (await grade(task, as_changes(answered(task, quoted(wrong))), pool)).reward == 0.0

    asyncio.run(check())


# -- The expert ---------------------------------------------------------------------------------------------------


def test_three_summaries_fall_on_the_quarters_of_a_whole_chain(played):
    for task, episode in played[:WHOLE]:
        branches = episode.transcript.branches()
        assert [sum(node.kind == "tool" for node in branch) for branch in branches] == [2, 2, 2, 2]
        assert (episode.summaries, episode.turns, episode.outcome) == (3, STEPS, "finished")
        assert len(task.metadata["paths"]) == STEPS - 1


def test_a_branch_holds_the_task_and_one_summary(played, tokenizer):
    for _, episode in played[:WHOLE]:
        for branch in episode.transcript.branches()[1:]:
            assert [node.kind for node in branch[:3]] == ["prompt", "carry", "assistant"]
            text = to_text(tokenizer, branch[1].tokens.tolist())
            assert text.count("item_") == 1 and text.count("next = ") == 1


def test_the_expert_keeps_each_item_that_it_knows_with_the_same_probability():
    task, rng = generate("train", 0, 0, asked=None), random.Random(0)
    notes = ChainNotes.of_summary(task, None)
    for _ in range(2):
        notes.read(task)
    kept = Counter(chain_summary(task, notes, "short", rng).split("\n")[0] for _ in range(3000))
    assert set(kept) == set(list(task.metadata["items"])[:2]) and min(kept.values()) > 1300
    carried = chain_summary(task, notes, "short", rng)
    later = ChainNotes.of_summary(task, carried)
    assert list(later.items) == [carried.split("\n")[0]] and later.following == task.metadata["paths"][2]


def test_a_long_summary_keeps_every_item():
    task, rng = generate("train", 0, 0, asked=None), random.Random(0)
    notes = ChainNotes.of_summary(task, None)
    for read in range(1, STEPS - 1):
        notes.read(task)
        later = ChainNotes.of_summary(task, chain_summary(task, notes, "long", rng))
        assert later == notes and list(later.items) == list(task.metadata["items"])[:read]


@pytest.mark.parametrize("style", REQUESTS)
@pytest.mark.parametrize("knows", [True, False])
def test_a_summary_after_the_last_file_says_what_is_left_to_do(style, knows):
    task, rng = generate("train", 0, 0, asked=2), random.Random(0)
    notes = ChainNotes.of_summary(task, None)
    for _ in task.metadata["paths"]:
        notes.read(task)
    (asked,) = task.metadata[FACTS]
    if not knows:
        del notes.items[asked]
    lines = chain_summary(task, notes, style, rng).split("\n")
    path = task.metadata["paths"][-1]
    if style != "long":
        assert lines == ([asked, path] if knows else [f"{path}: item_2"])
    else:
        assert f"{path}: item_2" in lines and (asked in lines) == knows
    assert notes.is_at_end and not any(line.startswith("next") for line in lines)
    (turn,) = chain_script(task, ChainNotes.of_summary(task, "\n".join(lines)), rng)
    assert turn.call.name == "edit" and turn.call.arguments["path"] == path
    assert not knows or turn.thought == asked


def test_a_summary_that_lost_the_next_file_is_refused():
    task = generate("train", 0, 0)
    with pytest.raises(UserError, match="names no next file; raise max_summary_tokens"):
        ChainNotes.of_summary(task, f"{task.metadata[FACTS][0]}\nnext")


def test_the_expert_answers_what_it_knows_and_guesses_the_rest(played, tokenizer):
    known = Counter()
    for task, episode in played:
        last = episode.transcript.branches()[-1]
        answer = to_text(tokenizer, last[-2].sampled_tokens.tolist())
        context = to_text(tokenizer, [i for node in last[:-2] for i in node.tokens.tolist()])
        (fact,) = task.metadata[FACTS]
        shown = fact in context
        known[shown] += 1
        assert answer.startswith(fact) or not shown
        assert episode.reward == float(answer.startswith(fact))
    assert all(episode.reward == 1.0 for _, episode in played[WHOLE:]), "a short chain shows all items"
    assert known[False] > WHOLE // 2, "in a whole chain most items are forgotten"


def test_a_summary_has_room_for_one_item(played, tokenizer):
    lengths = [len(n.sampled_tokens) for _, e in played for n in e.transcript.nodes_of_kind("summary")]
    assert max(lengths) <= SUMMARY_TOKENS
    file = next_line(file_stems("train")[0])
    two = f"{item_line(1, VALUES[0])}\n{item_line(2, VALUES[1])}\n{file}"
    assert len(tokenizer.encode(two)) + 1 > SUMMARY_TOKENS


def test_rl_with_the_control_trains_the_same_messages_without_the_summaries(pool, tokenizer):
    async def play(name):
        task = generate("train", 0, 7)
        compaction = CONFIG.agent.compaction(name, "rl.compaction")
        (episode,) = await make_traces([task], lambda *_: compaction, pool, tokenizer, limits=CONFIG.agent.limits)
        return episode

    joint, frozen = (asyncio.run(play(name)) for name in ("short", "untrained"))
    assert joint.transcript.tokens == frozen.transcript.tokens and joint.facts_kept_last == frozen.facts_kept_last
    trained = [sum(int(row.trained.sum()) for row in e.transcript.rows()) for e in (joint, frozen)]
    assert trained[0] - trained[1] == joint.summary_tokens > 0
    same = replace(CONFIG.agent.compactions["untrained"], train_summaries=True)
    assert same == CONFIG.agent.compactions["short"]


# -- The config ---------------------------------------------------------------------------------------------------


def test_every_word_is_one_token_so_that_lengths_are_the_same_in_all_chains(tokenizer):
    words = {word for stem in file_stems("heldout") for word in stem.split("_")} | set(VALUES)
    assert {word for word in words if len(tokenizer.encode(word)) != 1} == set()


@pytest.mark.parametrize("size", SIZES)
def test_the_config_is_valid_and_its_longest_context_fits(size, played):
    config = run_config(get_config(size))
    longest = max(sum(len(n.tokens) for n in b) for _, e in played[:WHOLE] for b in e.transcript.branches())
    assert longest < config.sampler.max_model_len == config.rl.batches[-1][0]
    assert config.agent.limits.max_turns == STEPS == generate("train", 0, 0).max_turns


def test_the_texts_for_the_tokenizer_are_of_training_chains():
    texts = list(chain_texts(0, 3))
    assert texts == list(chain_texts(0, 3)) and any(text.startswith("edit{") for text in texts)
    assert not any(stem in text for text in texts for stem in file_stems("heldout"))


def test_an_unknown_size_or_kind_is_named(tmp_path, tokenizer):
    with pytest.raises(UserError, match="has no size 'huge'; use full, smoke"):
        get_config("huge")
    context = SourceContext(0, tokenizer, CompactFormat(tokenizer), CONFIG.agent, tmp_path)
    with pytest.raises(UserError, match="ExpertTraces names 'genius'; use bugfix, one_bug, two_bugs, chain"):
        ExpertTraces(context, {"genius": 3})


def test_facts_are_found_in_the_experts_summaries(chat_format, tok):
    task = memory_chain.generate("train", 0, 0)
    kept = summary.facts_kept(task, chat_format, tok.encode(f"{task.metadata[FACTS][0]}\nnext = x"))
    assert kept == 1.0
