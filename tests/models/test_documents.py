"""Documents that share a row do not see each other: not through attention, not through the embedding taps, not through
MTP."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from composer_jax.models.embedding import Embedding
from composer_jax.models.model_def import ModelDef
from composer_jax.train.losses import LanguageLoss, LanguageLossConfig
from tests.models.small import forward, random_weights, relative_error, rows, small

CONFIG = small(embedding_taps=3)
# Disjoint vocabularies: the gradient of an embedding row then belongs to one document.
FIRST, SECOND, THIRD = list(range(1, 9)), list(range(20, 31)), list(range(40, 45))
PACKED = rows([[FIRST, SECOND, THIRD]], 32)


@pytest.fixture(scope="module")
def weights():
    return random_weights(CONFIG)


def test_packed_logits_equal_those_of_separate_rows(weights):
    # Padding rows, so that both have one shape and one compiled program.
    packed = forward(CONFIG)(*weights, rows([[FIRST, SECOND, THIRD], [], []], 32))
    alone = forward(CONFIG)(*weights, rows([[FIRST], [SECOND], [THIRD]], 32))
    start = 0
    for row, document in enumerate((FIRST, SECOND, THIRD)):
        n = len(document)
        assert relative_error(packed["logits"][0, start : start + n], alone["logits"][row, :n]) < 1e-5
        # The last k positions of a document have no token k later, so module k says nothing there.
        for k, (together, apart) in enumerate(zip(packed["mtp_logits"], alone["mtp_logits"], strict=True), start=1):
            assert relative_error(together[0, start : start + n - k], apart[row, : n - k]) < 1e-5
        start += n


def test_padding_and_its_length_change_nothing(weights):
    short = forward(CONFIG)(*weights, rows([[SECOND]], 11))
    noisy = rows([[SECOND], [], []], 32)
    noisy["tokens"][0, 11:] = 63
    long = forward(CONFIG)(*weights, noisy)
    assert relative_error(long["logits"][0, :11], short["logits"][0]) < 1e-5
    np.testing.assert_array_equal(long["counts"], short["counts"])


@pytest.fixture(scope="module")
def loss_and_gradient(weights):
    """Jitted: rows, loss weights [1,S] -> (loss, gradient of the embedding table), with MTP in the loss."""

    @jax.jit
    def run(batch, loss_weights):
        def loss(params):
            decoder = ModelDef(CONFIG).bind(params, weights[1])
            return LanguageLoss(LanguageLossConfig(mtp_weight=0.5))(
                decoder, batch | {"weights": loss_weights}, jnp.float32(1)
            ).loss

        value, gradient = jax.value_and_grad(loss)(weights[0])
        return value, gradient["embedding"]["table"]

    return run


@pytest.mark.parametrize("document", [0, 1, 2])
def test_no_gradient_crosses_from_one_document_to_another(loss_and_gradient, document):
    """The gradient is exactly zero."""
    start = (0, 8, 19)[document]
    documents = (FIRST, SECOND, THIRD)
    loss_weights = np.zeros((1, 32), np.float32)
    loss_weights[0, start + 1 : start + len(documents[document])] = 1
    gradient = np.asarray(loss_and_gradient(PACKED, loss_weights)[1])
    for other in range(3):
        if other == document:
            assert np.abs(gradient[documents[other][:-1]]).max(1).min() > 0
        else:
            np.testing.assert_array_equal(gradient[documents[other]], 0)


def test_the_second_document_does_not_change_the_loss_of_the_first(loss_and_gradient):
    """MTP at the last position of a document sees the next document's first token; the loss must not."""
    loss_weights = np.zeros((1, 32), np.float32)
    loss_weights[0, 1:8] = 1
    expected, _ = loss_and_gradient(PACKED, loss_weights)
    for other in (rows([[FIRST, SECOND[::-1], THIRD]], 32), rows([[FIRST]], 32)):
        assert float(loss_and_gradient(other, loss_weights)[0]) == pytest.approx(float(expected), rel=1e-6)


def test_taps_reach_back_to_the_start_of_the_document_and_no_further():
    embedding = Embedding(CONFIG, rngs=nnx.Rngs(params=0))
    table, taps = (np.asarray(w.get_value(), np.float64) for w in (embedding.table, embedding.taps))
    actual = np.asarray(nnx.jit(lambda e, *args: e(*args))(embedding, PACKED["tokens"], PACKED["positions"]))[0]
    start = 0
    for document in (FIRST, SECOND, THIRD):
        for t in range(len(document)):
            expected = table[document[t]] + sum(table[document[t - j]] @ taps[j - 1] for j in range(1, min(t, 3) + 1))
            assert relative_error(actual[start + t], expected) < 1e-5
        start += len(document)
