"""Data sources by name and by import path."""

import numpy as np
import pytest

from composer_jax.data.documents import DocumentSource
from composer_jax.data.pipeline import pretraining_batches
from composer_jax.data.sources import SourceConfig, SourceInputs, make_sources
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.data.traces import TraceSource
from composer_jax.errors import UserError


def users_source(inputs: SourceInputs, *, repeat: int) -> TraceSource:
    """What a user's module would define: the run's documents as traces, `repeat` times each."""
    return TraceSource([(document, np.ones(len(document), bool)) for document in inputs.documents] * repeat)


USERS = f"{__name__}:users_source"


@pytest.fixture(scope="module")
def inputs():
    return SourceInputs([np.arange(20, 30)] * 3, Tokenizer.train(["some text"] * 10, 300), seed=7)


def test_sources_are_built_by_name_and_by_import_path(inputs):
    sources = make_sources((SourceConfig("documents", 0.25), SourceConfig(USERS, 0.75, {"repeat": 2})), inputs)
    assert list(sources) == ["documents", USERS]
    assert isinstance(sources["documents"][0], DocumentSource)
    assert [source.identity()["count"] for source, _ in sources.values()] == [3, 6]
    batch = next(pretraining_batches(sources, seq_len=16, batch_size=8, seed=0))
    # Rows of documents are full; a row of the other source holds one document and padding.
    assert sum((batch.segments == 0).any(axis=1)) == 6


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([SourceConfig(), SourceConfig()], "pretrain.sources names documents twice"),
        ([SourceConfig(USERS, options={"times": 2})], "refuses options={'times': 2}"),
        ([SourceConfig("no.such.module:source")], "pretrain.sources.name='no.such.module:source' cannot be imported"),
    ],
    ids=str,
)
def test_sources_that_cannot_be_built_are_refused(inputs, configs, message):
    with pytest.raises(UserError, match=message):
        make_sources(configs, inputs)


def test_a_value_out_of_range_is_refused_by_its_name():
    with pytest.raises(UserError, match="pretrain.sources.name='copying' is unknown; use one of documents"):
        SourceConfig("copying")
    with pytest.raises(UserError, match="pretrain.sources: documents has weight=-0.5"):
        SourceConfig("documents", -0.5)
