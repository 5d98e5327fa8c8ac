"""Documents that share a row do not see each other: not through attention, not through the embedding taps, not through
MTP."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.models.definition import Definition
from composer_jax.train.losses import LanguageLoss
from tests.models.small import forward, random_weights, relative_error, rows, small

CONFIG = small(embedding_taps=3)
# Disjoint vocabularies: the gradient of an embedding row then belongs to one document.
FIRST, SECOND, THIRD = list(range(1, 9)), list(range(20, 31)), list(range(40, 45))
PACKED = rows([[FIRST, SECOND, THIRD]], 32)


@pytest.fixture(scope="module")
def weights():
    return random_weights(CONFIG)


def test_packed_logits_are_those_of_documents_alone(weights):
    packed = forward(CONFIG)(*weights, PACKED)
    alone = forward(CONFIG)(*weights, rows([[FIRST], [SECOND], [THIRD]], 32))
    start = 0
    for row, document in enumerate((FIRST, SECOND, THIRD)):
        n = len(document)
        assert relative_error(packed["logits"][0, start : start + n], alone["logits"][row, :n]) < 1e-5
        # The last position of a document has no next token, so MTP says nothing there.
        found, wanted = packed["mtp_logits"][0, start : start + n - 1], alone["mtp_logits"][row, : n - 1]
        assert relative_error(found, wanted) < 1e-5
        start += n


def test_padding_and_its_length_change_nothing(weights):
    short = forward(CONFIG)(*weights, rows([[SECOND]], 11))
    noisy = rows([[SECOND]], 32)
    noisy["tokens"][0, 11:] = 63
    long = forward(CONFIG)(*weights, noisy)
    assert relative_error(long["logits"][0, :11], short["logits"][0]) < 1e-5
    np.testing.assert_array_equal(long["counts"], short["counts"])


@pytest.fixture(scope="module")
def embedding_gradient(weights):
    """Jitted: loss weights [1,S] -> gradient of the embedding table, with MTP in the loss."""

    @jax.jit
    def gradient(loss_weights):
        def loss(params):
            decoder = Definition(CONFIG).bind(params, weights[1])
            return LanguageLoss(mtp_weight=0.5)(decoder, PACKED | {"weights": loss_weights}, jnp.float32(1)).loss

        return jax.grad(loss)(weights[0])["embedding"]["table"]

    return gradient


@pytest.mark.parametrize("document", [0, 1, 2])
def test_no_gradient_crosses_from_one_document_to_another(embedding_gradient, document):
    """Exactly zero, not small."""
    start = (0, 8, 19)[document]
    documents = (FIRST, SECOND, THIRD)
    loss_weights = np.zeros((1, 32), np.float32)
    loss_weights[0, start + 1 : start + len(documents[document])] = 1
    gradient = np.asarray(embedding_gradient(loss_weights))
    for other in range(3):
        if other == document:
            assert np.abs(gradient[documents[other][:-1]]).max(1).min() > 0
        else:
            np.testing.assert_array_equal(gradient[documents[other]], 0)


def test_another_first_document_changes_no_loss_of_the_second(weights):
    """MTP at the last position of a document sees the next document's first token; the loss must not."""
    loss_weights = np.zeros((1, 32), np.float32)
    loss_weights[0, 1:8] = 1

    @jax.jit
    def loss(batch):
        return LanguageLoss(mtp_weight=0.5)(Definition(CONFIG).bind(*weights), batch, jnp.float32(1)).loss

    others = [rows([[FIRST, SECOND[::-1], THIRD]], 32), rows([[FIRST]], 32)]
    wanted = loss(PACKED | {"weights": loss_weights})
    for other in others:
        assert loss(other | {"weights": loss_weights}) == pytest.approx(float(wanted), rel=1e-6)


def test_taps_reach_back_to_the_start_of_the_document_and_no_further(weights):
    @jax.jit
    def embed(tokens, positions):
        return Definition(CONFIG).bind(*weights).embedding(tokens, positions)

    table = np.asarray(weights[0]["embedding"]["table"], np.float64)
    taps = np.asarray(weights[0]["embedding"]["taps"], np.float64)
    found = np.asarray(embed(PACKED["tokens"], PACKED["positions"]))[0]
    start = 0
    for document in (FIRST, SECOND, THIRD):
        for t in range(len(document)):
            wanted = table[document[t]] + sum(table[document[t - j]] @ taps[j - 1] for j in range(1, min(t, 3) + 1))
            assert relative_error(found[start + t], wanted) < 1e-5
        start += len(document)
