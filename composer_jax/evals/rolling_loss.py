"""The rolling loss of a long text: each token is counted once, in rows whose context moves along.

Row r of `evals.score.windows` holds the tokens from r * stride on. All tokens of row 0 after the first are counted, and
of every later row the last `stride`, so that each has at least window - stride tokens before it.
"""

from typing import Any

import numpy as np


def counted_predictions(rows: np.ndarray, stride: int) -> np.ndarray:
    """Returns bool[B,S-1]: the predictions of rows[:, 1:] that count.

    Row by row, they are the predictions of all tokens of the text but the first, in order.
    """
    counted = rows[:, 1:] >= 0
    counted[1:, : rows.shape[1] - 1 - stride] = False
    return counted


def nll_by_context(logprobs: np.ndarray, rows: np.ndarray) -> list[dict[str, Any]]:
    """Returns the mean loss by the tokens of context: 1, 2 to 3, 4 to 7, 8 to 15 and so on.

    All predictions of all rows go in, counted or not: with a stride that is short beside the window, the same tokens
    are predicted after contexts of every length.

    Args:
      logprobs: [B,S-1] of rows[:, 1:].
      rows: tokens [B,S] with padding of negative ids.

    Returns:
      {"first", "last": least and most tokens of context, "predictions", "nll": nats per token} of each bin that is not
      empty.
    """
    real = rows[:, 1:] >= 0
    predictions = real.sum(0)
    totals = -np.where(real, logprobs, 0).sum(0, dtype=np.float64)
    bins = []
    first, most = 1, rows.shape[1] - 1
    while first <= most:
        last = min(2 * first - 1, most)
        place = slice(first - 1, last)  # column c is predicted after c + 1 tokens
        if count := int(predictions[place].sum()):
            bins.append({"first": first, "last": last, "predictions": count, "nll": float(totals[place].sum() / count)})
        first = last + 1
    return bins
