"""Files of conversations as a source of SFT: which rows are refused or dropped, and what is trained on."""

import dataclasses
import json

import numpy as np
import pytest

from composer_jax.agent.config import AgentConfig
from composer_jax.data.pipeline import trace_batches
from composer_jax.errors import UserError
from composer_jax.schema.training_config import TraceSourceConfig
from composer_jax.stages.run import Run
from composer_jax.stages.sft import sft
from composer_jax.stages.trace_sources import SourceContext, make_trace_source
from tests.data.formats import format_of
from tests.stages.base_model import write_base
from tests.stages.test_base import config_with

CHAT = format_of("chatml")


def row(*texts):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


GOOD, LONG, BAD = row("Hi", "Hello"), row("x", "y" * 300), row("x")


@pytest.fixture
def source(tmp_path):
    context = SourceContext(0, CHAT.tokenizer, CHAT, AgentConfig(), tmp_path, seq_len=128)

    def make(*rows, context=context, **options):
        file = tmp_path / "talk.jsonl"
        file.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in rows))
        config = TraceSourceConfig("conversations", {"files": str(file), **options})
        return make_trace_source("talk", config, context)

    make.context = context
    return make


def test_a_config_names_files_of_conversations(source, tmp_path):
    both = source(GOOD, GOOD, files=(str(tmp_path / "talk.jsonl"), str(tmp_path / "talk.jsonl")))
    joined = source(GOOD, GOOD, files=", ".join([str(tmp_path / "talk.jsonl")] * 2))
    traces = both.traces()
    assert len(joined.traces()) == len(traces)
    assert len(traces) == 4 and both.report()["conversations"].popitem()[1]["conversations"] == 4
    tokens, mask = traces[0]
    assert tokens[mask].tolist() == CHAT.render_assistant("Hello", [])


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ((GOOD, BAD), r"talk.jsonl, line 2: no message is the model's"),
        ((GOOD, "{\n"), r"talk.jsonl, line 2 is not JSON"),
        (("\n", LONG), r"talk.jsonl, line 2: the conversation has \d+ tokens and a row 128; raise sft.seq_len"),
        ((row("x", "<tool_call>"),), r"talk.jsonl, line 1: the content spells <tool_call>"),
        (
            (GOOD, {"messages": [*GOOD["messages"][:1], GOOD["messages"][1] | {"audio": "a.wav"}]}),
            "line 2: message 2: the",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(source, rows, sentence):
    with pytest.raises(UserError, match=sentence):
        source(*rows).traces()


def test_bad_rows_can_be_dropped_and_are_counted(source):
    made = source(GOOD, BAD, LONG, "{\n", GOOD, invalid="drop", too_long="drop")
    for _ in range(2):
        assert len(made.traces()) == 2
        assert list(made.report()["conversations"].values()) == [{"conversations": 2, "invalid": 2, "too_long": 1}]
    with pytest.raises(UserError, match="line 3: the conversation has"):
        source(GOOD, BAD, LONG, invalid="drop").traces()
    no_rows = dataclasses.replace(source.context, seq_len=None)
    assert len(source(GOOD, LONG, context=no_rows).traces()) == 2


def test_columns_that_are_not_read_are_logged_once_with_a_count(source, caplog):
    rows = [GOOD | {"difficulty": 3, "source": None}, GOOD | {"source": "x", "task_id": "y"}, GOOD | {"source": "z"}]
    assert len(source(*rows).traces()) == 3
    (record,) = caplog.records
    assert record.getMessage().endswith("SFT does not read these columns: difficulty (1 rows), source (2 rows).")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"invalid": "ignore"}, "the option invalid='ignore' of conversations is neither"),
        ({"file": "x"}, "config.sft.sources.talk.options=.* do not fit 'conversations'"),
        ({"files": "none.jsonl"}, "none.jsonl cannot be read"),
        ({"files": " , "}, "the option files of conversations is empty; name files, e.g. --config.sft.data"),
    ],
)
def test_options_that_do_not_fit_are_named(source, options, sentence):
    with pytest.raises(UserError, match=sentence):
        source(GOOD, **options).traces()


def test_an_unknown_kind_is_named(source):
    with pytest.raises(UserError, match="config.sft.sources.talk.kind='chats' is unknown; use one of conversations"):
        make_trace_source("talk", TraceSourceConfig("chats"), source.context)


def test_conversations_are_packed_and_a_stream_of_them_resumes(source):
    traces = source(*(row(f"Question {n}", f"Answer {n}") for n in range(9))).traces()

    def stream():
        return trace_batches(traces, seq_len=128, batch_size=2, seed=1)

    first, second = stream(), stream()
    batches = [next(first) for _ in range(6)]
    for _ in range(3):
        next(second)
    state = json.loads(json.dumps(second.get_state()))
    third = stream()
    third.set_state(state)
    for want in batches[3:]:
        got = next(third)
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_array_equal(got.weights, want.weights)
    assert batches[0].segments.max() > 1, "several conversations share a row"


def test_a_published_model_is_tuned_on_a_file_of_conversations(tmp_path, monkeypatch):
    config = config_with(write_base(tmp_path / "model"))
    config.sft.update({"steps": 2, "batch_size": 2, "seq_len": 128, "save_every": 2})
    file = tmp_path / "talk.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (GOOD, LONG, BAD)))
    options = {"files": str(file), "too_long": "drop"}
    config.sft.sources = {"talk": {"kind": "conversations", "options": options}}
    with Run(config, tmp_path / "run") as run:
        with monkeypatch.context() as patch, pytest.raises(UserError, match="line 3: no message is the model's"):
            patch.setattr(run.model, "initial_weights", None)  # a bad line ends the stage before weights are read
            sft(run)
    config.sft.sources = {}
    config.sft.update({"data": str(file), "bad_rows": "drop"})
    with Run(config, tmp_path / "again") as run:
        sft(run)
        result = run.workdir.stage_result("sft")
    assert result["conversations"] == {str(file): {"conversations": 1, "invalid": 1, "too_long": 1}}
    assert result["tokens"] > 0 and result["loss_last"] > 0
