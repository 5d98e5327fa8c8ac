"""The demo's sources: exercises that fit into rows, expert traces by kind, texts for the tokenizer."""

import pytest

from composer_jax.data.chat_compact import CompactFormat
from composer_jax.demo.exercises import repair_exercises
from composer_jax.demo.expert_traces import ExpertTraces, expert_rates
from composer_jax.demo.texts import task_texts
from composer_jax.errors import UserError
from composer_jax.stages.config import run_config
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
    assert compactions["bugfix"].trigger is compactions["recall_uncompacted"].trigger is None
    assert compactions["recall_short"].request == "Summarize."
    assert compactions["recall_long"].request.startswith("Write a report")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"traces": {"genius": 3}}, "traces of ExpertTraces names 'genius'; use bugfix, recall_short"),
        ({"traces": {}, "rates": {"bugfix": {"genius": 1.0}}}, "the rate bugfix.genius of ExpertTraces is unknown"),
        ({"traces": {}, "rates": {"genius": {}}}, "rates of ExpertTraces names 'genius'; use bugfix or recall"),
    ],
)
def test_unknown_options_are_named(tmp_path, tokenizer, options, words):
    context = SourceContext(0, tokenizer, CompactFormat(tokenizer), SMOKE.agent, tmp_path)
    with pytest.raises(UserError, match=words):
        ExpertTraces(context, **options)


def test_rates_are_those_of_the_experts_where_nothing_is_changed():
    assert expert_rates({"bugfix": {"verify": 0.9}}).bugfix.verify == 0.9
    assert expert_rates({}).recall.keep == 0.5
