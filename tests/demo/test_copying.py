"""The copy curriculum: every token with weight repeats an earlier one."""

import numpy as np
import pytest

from composer_jax.data.tokenizer import SPECIAL
from composer_jax.demo.copying import copy_row


@pytest.mark.parametrize("seq_len", [32, 128, 512])
def test_every_weighted_token_repeats_an_earlier_one(seq_len):
    shares = []
    for index in range(50):
        tokens, weights = copy_row(0, index, seq_len=seq_len, vocab_size=1024)
        assert tokens.shape == weights.shape == (seq_len,)
        assert tokens.min() >= len(SPECIAL) and tokens.max() < 1024
        assert len(set(tokens.tolist())) <= 256
        assert weights[0] == 0 and set(weights.tolist()) == {0.0, 1.0}
        shares.append(weights.mean())
        # A run of weights is a repeat: with the token before it, it stands somewhere earlier in the row.
        edges = np.flatnonzero(np.diff(np.concatenate([[0], weights, [0]])))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            repeat = tokens[start - 1 : stop].tolist()
            earlier = tokens[: start - 1].tolist()
            assert any(earlier[i : i + len(repeat)] == repeat for i in range(len(earlier)))
    assert 0.35 < np.mean(shares) < 0.75


def test_rows_depend_on_seed_and_index_alone():
    def row(seed, index):
        return copy_row(seed, index, seq_len=64, vocab_size=500)[0].tolist()

    assert row(1, 7) == row(1, 7)
    assert len({tuple(row(s, i)) for s in range(3) for i in range(5)}) == 15


def test_a_small_vocabulary_is_enough():
    tokens, _ = copy_row(0, 0, seq_len=40, vocab_size=len(SPECIAL) + 4)
    assert tokens.max() < len(SPECIAL) + 4
