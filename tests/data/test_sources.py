"""Data sources by name and by import path."""

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from composer_jax.data.pipeline import pretraining_batches
from composer_jax.data.sources import SourceConfig, make_sources
from composer_jax.data.token_source import DocumentSource, SourceInputs, TraceSource
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError


def users_source(inputs: SourceInputs, *, repeat: int) -> TraceSource:
    """What a user's module would define: the run's documents as traces, `repeat` times each."""
    return TraceSource([(document, np.ones(len(document), bool)) for document in inputs.documents] * repeat)


USERS = f"{__name__}:users_source"


@pytest.fixture(scope="module")
def inputs():
    return SourceInputs([np.arange(20, 30)] * 3, Tokenizer.train(["some text"] * 10, 300), seed=7)


def test_sources_are_built_by_name_and_by_import_path(inputs):
    sources = make_sources(
        {"code": SourceConfig("documents", 0.25), "more": SourceConfig(USERS, 0.75, {"repeat": 2})}, inputs
    )
    assert list(sources) == ["code", "more"]
    assert isinstance(sources["code"][0], DocumentSource)
    assert [source.identity()["count"] for source, _ in sources.values()] == [3, 6]
    batch = next(pretraining_batches(sources, seq_len=16, batch_size=8, seed=0))
    # Rows of documents are full; a row of the other source holds one document and padding.
    assert sum((batch.segments == 0).any(axis=1)) == 6


def test_sources_that_cannot_be_built_are_refused(inputs):
    for make, word in (
        (lambda: SourceConfig(USERS, options={"times": 2}), "options={'times': 2} do not fit"),
        (lambda: SourceConfig("no.such.module:source"), "'no.such.module:source' cannot be imported"),
        (lambda: SourceConfig("copying"), "'copying' is unknown; use one of documents, prepared, source_tree"),
        (lambda: SourceConfig("documents", -0.5), "weight=-0.5"),
    ):
        with pytest.raises(UserError, match=word):
            make_sources({"x": make()}, inputs)


def texts_of(source, tok):
    """The texts of a source's documents, from enough full rows to hold each once."""
    row = next(iter(source.rows(seq_len=64, batch_size=1, seed=0)))
    return {text for text in tok.decode(row["tokens"].tolist()).split("<|eod|>") if text}


def test_source_trees_and_rows_of_text_are_documents(inputs, tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.txt").write_text("no source")
    (tmp_path / "rows.jsonl").write_text('{"text": "some text"}\n\n{"text": "more text", "id": 2}\n')
    parquet.write_table(pyarrow.table({"body": ["other text"]}), tmp_path / "rows.parquet")
    sources = {
        "tree": SourceConfig("source_tree", 1.0, {"path": str(tmp_path)}),
        "lines": SourceConfig("text_rows", 1.0, {"files": str(tmp_path / "rows.jsonl")}),
        "first": SourceConfig("text_rows", 1.0, {"files": [str(tmp_path / "rows.jsonl")], "max_bytes": 9}),
        "table": SourceConfig("text_rows", 1.0, {"files": str(tmp_path / "rows.parquet"), "field": "body"}),
    }
    texts = {name: texts_of(source, inputs.tokenizer) for name, (source, _) in make_sources(sources, inputs).items()}
    assert {"x = 1\n"} <= texts["tree"] and not any("no source" in text for text in texts["tree"])
    assert {"some text", "more text"} <= texts["lines"]
    assert "some text" in texts["first"] and "more text" not in texts["first"]
    assert "other text" in texts["table"]


def test_a_row_without_text_is_named(inputs, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "fine"}\n{"content": "x"}\n')
    with pytest.raises(UserError, match=r"rows.jsonl, line 2 has no text in the field 'text'; name its field"):
        make_sources({"x": SourceConfig("text_rows", options={"files": str(file)})}, inputs)
