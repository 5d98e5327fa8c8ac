"""Which tokens temperature, top_k, top_p and min_p keep, against the logits warpers of transformers."""

import jax
import numpy as np
import pytest

from composer_jax.sampler.token_sampling import RowParams, process_logits

pytestmark = pytest.mark.parity

ROWS, VOCABULARY = 48, 211
PARAMS = [
    (0.7, 0.8, 20, 0),
    (1.0, 0.95, 0, 0),
    (1.3, 1.0, 7, 0),
    (0.6, 0.3, 0, 0),
    (1.0, 0.001, 0, 0),
    (2.0, 0.9, 500, 0),
    (0.2, 1.0, 0, 0),
    (0.8, 1.0, 0, 0.05),
    (1.5, 0.9, 30, 0.2),
    (1.0, 1.0, 0, 1),
]


def warped(logits: np.ndarray, temperature: float, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """What generate() samples from: the warpers in its order, each where its parameter changes something."""
    import torch
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = torch.from_numpy(logits)
    if temperature != 1:
        scores = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores.log_softmax(-1).numpy()


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_distribution_is_that_of_the_warpers(params, ties):
    logits = np.random.default_rng(0).standard_normal((ROWS, VOCABULARY)).astype(np.float32) * 2
    if ties:
        logits = np.round(logits)
    temperature, top_p, top_k, min_p = (np.full(ROWS, value) for value in params)
    rows = RowParams(
        temperature.astype(np.float32),
        top_p.astype(np.float32),
        top_k.astype(np.int32),
        min_p.astype(np.float32),
        np.zeros(ROWS, np.int32),
    )
    ours = np.asarray(jax.nn.log_softmax(process_logits(logits, rows)))
    theirs = warped(logits, *params)
    if ties:  # which of equally likely tokens top_p keeps is arbitrary in PyTorch's sort, how many is not
        ours, theirs = np.sort(ours), np.sort(theirs)
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
    kept = np.isfinite(ours)
    assert kept.sum(-1).min() >= 1 and (not ties or params[1:] == (1.0, 0, 0) or kept.sum() < kept.size)
    np.testing.assert_allclose(ours[kept], theirs[kept], atol=1e-5)
