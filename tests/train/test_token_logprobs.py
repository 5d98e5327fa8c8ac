"""TokenScorer: the log-probabilities of the forward pass, on every mesh."""

import math

import jax
import numpy as np
import pytest

from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.train.scoring import TokenScorer
from tests.compilations import compiles_nothing
from tests.models.small import forward
from tests.train.small_step import CONFIG, make_batch

BATCH = make_batch(1)


@pytest.mark.parametrize("sizes", [{}, {"replica": 2, "expert": 2, "tensor": 2}, {"data": 2, "context": 4}], ids=str)
def test_scores_are_those_of_the_forward_pass(weights, sizes):
    scorer = TokenScorer(ModelDef(CONFIG), make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes))
    logits = forward(CONFIG)(*weights, {k: BATCH[k] for k in ("tokens", "positions", "segments")})["logits"]
    logprobs = np.asarray(jax.nn.log_softmax(logits[:, :-1]))
    expected = np.take_along_axis(logprobs, BATCH["tokens"][:, 1:, None], -1)[..., 0]
    actual = scorer(*weights, BATCH)
    assert actual.shape == BATCH["tokens"].shape and actual.dtype == np.float32
    predicted = BATCH["positions"][:, 1:] > 0
    np.testing.assert_allclose(actual[:, 1:][predicted], expected[predicted], rtol=2e-5, atol=2e-5)
    with compiles_nothing():
        scorer(*weights, make_batch(2))
