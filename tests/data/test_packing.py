"""Packing: nothing lost, nothing twice, each document whole; positions, segments and weights in place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.data.packing import pack_documents, packed_batch, plan_packing
from composer_jax.errors import UserError

S, B = 16, 3


def documents(lengths):
    """Every token of every document is unique, and so is its weight."""
    tokens = np.arange(1, sum(lengths) + 1)
    pieces = np.split(tokens, np.cumsum(lengths)[:-1]) if lengths else []
    return [(piece, piece / 2) for piece in pieces]


@given(lengths=st.lists(st.integers(1, S), max_size=40))
def test_nothing_is_lost_split_or_twice(lengths):
    given_documents = documents(lengths)
    batches, _ = pack_documents(given_documents, seq_len=S, batch_size=B)
    packed = []
    for batch in batches:
        for field in (batch.tokens, batch.positions, batch.segments, batch.weights):
            assert field.shape == (B, S)
        for tokens, positions, segments, weights in zip(
            batch.tokens, batch.positions, batch.segments, batch.weights, strict=True
        ):
            used = segments.max()
            assert sorted(set(segments[segments > 0])) == list(range(1, used + 1))
            for segment in range(1, used + 1):
                inside = segments == segment
                packed.append(tokens[inside].tolist())
                assert positions[inside].tolist() == list(range(inside.sum()))
                assert np.flatnonzero(inside).tolist() == list(
                    range(np.flatnonzero(inside)[0], np.flatnonzero(inside)[0] + inside.sum())
                )
                assert weights[inside].tolist() == [0, *(tokens[inside][1:] / 2)]
            padding = segments == 0
            assert not (tokens[padding].any() or positions[padding].any() or weights[padding].any())
    expected = [tokens.tolist() for tokens, _ in given_documents]
    assert sorted(packed) == sorted(expected)


@given(lengths=st.lists(st.integers(1, S), max_size=40))
def test_first_fit_leaves_no_document_a_place_further_left(lengths):
    packing = plan_packing(lengths, seq_len=S, batch_size=B)
    assert len(packing.rows) % B == 0
    row_of = {document: row for document, row, _, _ in packing.spans()}
    assert sorted(row_of) == list(range(len(lengths)))
    for document, row in row_of.items():
        for left in range(row):
            earlier = sum(lengths[d] for d in packing.rows[left] if d < document)
            assert earlier + lengths[document] > S


def test_place_puts_any_values_where_the_tokens_are():
    packing = plan_packing([2, 3, 2], seq_len=4, batch_size=2)
    assert packing.rows == ((0, 2), (1,))
    routing = [np.full((n, 2, 5), i + 1) for i, n in enumerate([2, 3, 2])]
    placed = packing.place(routing, np.uint8)
    assert placed.shape == (2, 4, 2, 5) and placed.dtype == np.uint8
    assert placed[:, :, 1, 3].tolist() == [[1, 1, 3, 3], [2, 2, 2, 0]]
    assert packing.segments().tolist() == [[1, 1, 2, 2], [1, 1, 1, 0]]
    with pytest.raises(ValueError, match="document 1 has 3 tokens but 2 values"):
        packing.place([np.zeros(2), np.zeros(2), np.zeros(2)], np.float32)


def test_too_long_and_empty_documents():
    with pytest.raises(UserError, match="2 of 3 documents .*30"):
        pack_documents(documents([17, 3, 30]), seq_len=S, batch_size=B)
    with pytest.raises(ValueError, match="document 1 is empty"):
        pack_documents(documents([3, 0]), seq_len=S, batch_size=B)
    assert pack_documents([], seq_len=S, batch_size=B)[0] == []


def test_weights_and_tokens_outside_of_documents_are_cleared():
    batch = packed_batch(np.full((1, 6), 7), np.asarray([[1, 1, 2, 2, 2, 0]]), np.ones((1, 6), np.float32))
    assert batch.tokens.tolist() == [[7, 7, 7, 7, 7, 0]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert batch.weights.tolist() == [[0, 1, 0, 1, 1, 0]]
    dtypes = [f.dtype.name for f in (batch.tokens, batch.positions, batch.segments, batch.weights)]
    assert dtypes == ["int32", "int32", "int32", "float32"]
