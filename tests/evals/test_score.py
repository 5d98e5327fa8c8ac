"""Scores against the Decoder's own logits in float64, on one device and on eight; windows."""

import jax
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.evals.score import CHUNK, score, windows
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from tests.models.small import random_weights, small

CONFIG = small(n_layers=2, vocab_size=290, max_context=600, n_mtp_modules=0, embedding_taps=0, dispatch="ring")
DEFINITION = ModelDef(CONFIG)
WEIGHTS = random_weights(CONFIG)
RNG = np.random.default_rng(0)


def one_device():
    return make_mesh(jax.devices()[:1])


@jax.jit
def forward(params, bias, tokens):
    decoder = DEFINITION.bind(params, bias)
    positions = np.arange(tokens.shape[1])[None]
    return decoder.logits(decoder(tokens, positions, jax.numpy.ones_like(tokens)).last_BSD)


def reference(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(logits, logprobs) of one row without padding."""
    logits = np.asarray(forward(*WEIGHTS, tokens[None]))[0].astype(np.float64)
    normal = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits, np.take_along_axis(normal[:-1], tokens[1:, None], 1)[:, 0]


@pytest.mark.parametrize("length", [2, CHUNK, 2 * CHUNK + 1])
def test_scores_are_those_of_the_network(length):
    tokens = RNG.integers(0, CONFIG.vocab_size, (3, length))
    scores = score(DEFINITION, *WEIGHTS, tokens, mesh=one_device(), rows=2, logits=True)
    assert (scores.logprobs.shape, scores.logits.shape) == ((3, length - 1), (3, length, CONFIG.vocab_size))
    in_pieces = score(DEFINITION, *WEIGHTS, tokens, mesh=one_device(), rows=2)  # the vocabulary a piece at a time
    assert in_pieces.logits is None
    np.testing.assert_allclose(in_pieces.logprobs, scores.logprobs, atol=1e-5)
    for row, logprobs, logits in zip(tokens, *scores, strict=True):
        wanted_logits, wanted = reference(row)
        assert np.abs(logits - wanted_logits).max() < 1e-5
        assert np.abs(logprobs - wanted).max() < 1e-5


def test_padding_scores_nothing_and_changes_nothing():
    tokens = RNG.integers(0, CONFIG.vocab_size, (2, 20))
    short = tokens.copy()
    short[1, 12:] = -1
    whole, cut = (score(DEFINITION, *WEIGHTS, t, mesh=one_device(), rows=2).logprobs for t in (tokens, short))
    np.testing.assert_array_equal(cut[1, 11:], 0)
    np.testing.assert_allclose(cut[1, :11], whole[1, :11], atol=1e-5)
    np.testing.assert_allclose(cut[0], whole[0], atol=1e-5)


@pytest.mark.parametrize("sizes", [{"replica": 2, "expert": 4}, {"data": 2, "context": 2, "tensor": 2}], ids=str)
def test_eight_devices_score_as_one(sizes):
    mesh = make_mesh(**sizes)
    tokens = RNG.integers(0, CONFIG.vocab_size, (11, 15))  # neither the rows nor their length divide
    params, bias = jax.device_put(WEIGHTS, DEFINITION.shardings(mesh))
    scores = score(DEFINITION, params, bias, tokens, mesh=mesh).logprobs
    np.testing.assert_allclose(scores, score(DEFINITION, *WEIGHTS, tokens, mesh=one_device()).logprobs, atol=1e-5)


def test_windows_share_one_token_and_cover_all():
    ids = np.arange(23)
    rows = windows(ids, 8)
    np.testing.assert_array_equal(rows[:, 0], [0, 7, 14, 21])
    np.testing.assert_array_equal(np.sort(rows[:, 1:][rows[:, 1:] >= 0]), ids[1:])
    np.testing.assert_array_equal(windows(ids, 8, stride=7), rows)
    np.testing.assert_array_equal(windows(ids[:8], 8), ids[None, :8])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros((2, 3)), r"float64\[2, 3\]"),
        (np.zeros(3, int), r"int64\[3\]"),
        (np.zeros((0, 3), int), r"int64\[0, 3\]"),
        (np.zeros((2, 1), int), "one token"),
        (np.zeros((1, 601), int), "max_context=600"),
        (np.full((1, 3), 290), "token id 290"),
        (np.array([[1, -1, 2]]), "padding"),
        (np.array([[-1, -1]]), "padding"),
    ],
)
def test_tokens_that_cannot_be_scored(tokens, message):
    with pytest.raises(UserError, match=message):
        score(DEFINITION, *WEIGHTS, tokens, mesh=one_device())
