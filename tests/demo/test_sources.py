"""The demo's sources: exercises that fit into rows, expert traces by kind, texts for the tokenizer."""

import dataclasses
import random

import pytest

from composer_jax.data.chat.compact import CompactFormat
from composer_jax.demo import memory_chain
from composer_jax.demo.exercises import repair_exercises
from composer_jax.demo.expert_traces import ExpertTraces
from composer_jax.demo.memory_chain import ShortMemoryChain, next_line
from composer_jax.demo.memory_chain_expert import ChainNotes, chain_summary
from composer_jax.demo.texts import task_texts
from composer_jax.errors import UserError
from composer_jax.schema.run_config import run_config
from composer_jax.stages.run_data import RunData
from composer_jax.stages.trace_sources import SourceContext
from configs.tiny import get_config

SMOKE = run_config(get_config("smoke"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The tokenizer of a run of the smoke size, under which every text is at its longest."""
    return RunData(SMOKE, tmp_path_factory.mktemp("run")).tokenizer


@pytest.mark.parametrize("size", ["smoke", "full"])
def test_exercises_fit_into_the_rows_of_both_stages(tokenizer, size):
    config = get_config(size)
    exercises = repair_exercises(3, 300, tokenizer, train_module=True)
    assert max(len(tokens) for tokens, _ in exercises) < min(config.pretrain.seq_len, config.sft.seq_len)


def test_task_texts_are_of_training_tasks_and_the_same_every_time():
    texts = list(task_texts(0, 3))
    assert texts == list(task_texts(0, 3))
    assert any(text.startswith("edit{") for text in texts) and any("def " in text for text in texts)


def test_every_kind_of_trace_has_a_compaction_in_the_demo_config():
    compactions = {kind: SMOKE.agent.compactions[name] for kind, (_, name) in ExpertTraces.KINDS.items()}
    assert {kind for kind, compaction in compactions.items() if compaction.trigger is None} == {
        "bugfix",
        "one_bug",
        "two_bugs",
        "chain_whole",
        "chain_start",
        "few_lookups",
        "many_lookups",
    }
    assert compactions["chain"].request == "Summarize."
    assert compactions["chain_long"].request.startswith("Write a report")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's config, and a tokenizer of its size that knows its texts."""
    sections = get_config()
    sections.data.tokenizer_bytes = 1  # one file of source code; the tasks are the rest
    config = run_config(sections)
    return config, RunData(config, tmp_path_factory.mktemp("demo")).tokenizer


def test_short_summaries_have_room_for_one_item_and_not_for_two(demo):
    """Wherever in a chain they are asked for: one that is cut loses the way."""
    config, tokenizer = demo
    limit, rng = config.agent.compactions["short"].max_summary_tokens, random.Random(0)
    for index in range(300):
        task = memory_chain.generate("train", 0, index, asked=None)
        notes = ChainNotes.of_summary(task, None)
        while not notes.is_at_end:
            notes.read(task)
            known = [notes.items, {name: value for name, value in notes.items.items() if rng.random() < 0.5}]
            for items in known if notes.is_at_end else known[:1]:
                summary = chain_summary(task, dataclasses.replace(notes, items=items), "short", rng)
                assert len(tokenizer.encode(summary)) < limit, f"with its end, {summary!r} is longer than {limit}"
                assert ChainNotes.of_summary(task, summary).following == notes.following
        two = "\n".join([*list(task.metadata["items"])[:2], next_line(task.metadata["paths"][1])])
        assert len(tokenizer.encode(two)) >= limit


def test_chains_play_to_the_end_with_the_compactions_of_the_demo(demo, tmp_path):
    """With the demo's limits, lengths of summaries included."""
    config, tokenizer = demo
    counts = {"bugfix": 6, "chain": 40, "chain_long": 12, "chain_start": 6, "chain_whole": 6}
    context = SourceContext(0, tokenizer, CompactFormat(tokenizer), config.agent, tmp_path)
    played = ExpertTraces(context, counts, chain_steps=ShortMemoryChain.STEPS).play()
    by_kind, first = {}, 0
    for kind, count in counts.items():
        by_kind[kind], first = [episode for _, episode in played[first : first + count]], first + count
    assert {episode.outcome for _, episode in played} == {"finished"}
    assert {kind for kind, episodes in by_kind.items() if all(e.reward == 1.0 for e in episodes)} == set(counts) - {
        "chain"
    }
    nodes = [episode.transcript.nodes for episode in by_kind["chain"]]
    order = {"".join({"assistant": "a", "summary": "S"}.get(node.kind, "") for node in episode) for episode in nodes}
    assert order == {"aaaSaaSaa"}, "whatever the names are, and never after the question"
    longest = max(len(row.tokens) for _, episode in played for row in episode.transcript.rows())
    assert longest <= min(config.sft.seq_len, config.sampler.max_model_len)
    for task, episode in played[6 + 40 : 6 + 40 + 12]:
        assert episode.summaries >= 2
        last = tokenizer.decode(episode.transcript.nodes_of_kind("summary")[-1].sampled_tokens.tolist())
        items = list(task.metadata["items"])
        kept = [item for item in items if item in last.split("\n")]
        assert kept == items[: len(kept)] and len(kept) >= 4, "every item of the files read so far"


def test_unknown_kinds_are_named(tmp_path, tokenizer):
    context = SourceContext(0, tokenizer, CompactFormat(tokenizer), SMOKE.agent, tmp_path)
    with pytest.raises(UserError, match="traces of ExpertTraces names 'genius'; use bugfix, one_bug, two_bugs, chain"):
        ExpertTraces(context, {"genius": 3})
