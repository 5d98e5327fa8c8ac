"""Rolling windows compared with a loop over tokens: the counted predictions, their context and their bins."""

import numpy as np
import pytest

from composer_jax.evals.score import counted_predictions, nll_by_context, windows

SIZES = [(n, w, s) for w in (2, 5, 8) for s in range(1, w) for n in (2, w - 1, w, w + 1, 3 * w, 41) if n >= w]


@pytest.mark.parametrize(("count", "window", "stride"), SIZES)
def test_every_token_counts_once_with_the_context_that_is_promised(count, window, stride):
    ids = np.arange(100, 100 + count)
    rows = windows(ids, window, stride)
    counted = counted_predictions(rows, stride)
    np.testing.assert_array_equal(rows[:, 1:][counted], ids[1:])
    for row, column in np.argwhere(counted):
        context, token = column + 1, rows[row, column + 1] - 100
        assert context >= min(token, window - stride)
        np.testing.assert_array_equal(rows[row, :context], ids[token - context : token])


@pytest.mark.parametrize("stride", [None, 1, 3, 7])
def test_nll_by_context_is_that_of_a_loop_over_predictions(stride):
    rng = np.random.default_rng(0)
    rows = windows(np.arange(53), 16, stride)
    logprobs = rng.normal(-3, 1, (len(rows), 15)).astype(np.float32)
    groups = {}
    for row in range(len(rows)):
        for token in range(1, 16):
            if rows[row, token] >= 0:
                groups.setdefault(token.bit_length() - 1, []).append(-float(logprobs[row, token - 1]))
    bins = nll_by_context(logprobs, rows)
    assert [(b["first"], b["last"]) for b in bins] == [(1, 1), (2, 3), (4, 7), (8, 15)]
    assert [b["predictions"] for b in bins] == [len(groups[place]) for place in range(4)]
    np.testing.assert_allclose([b["nll"] for b in bins], [np.mean(groups[place]) for place in range(4)], rtol=1e-6)


def test_the_last_bin_ends_with_the_window_and_empty_bins_are_left_out():
    rows = windows(np.arange(6), 12)  # a row of six tokens and padding
    assert [(b["first"], b["last"], b["predictions"]) for b in nll_by_context(np.zeros((1, 11)), rows)] == [
        (1, 1, 1),
        (2, 3, 2),
        (4, 7, 2),
    ]
    rows = windows(np.arange(12), 12)
    assert nll_by_context(np.zeros((1, 11)), rows)[-1] == {"first": 8, "last": 11, "predictions": 4, "nll": 0.0}
