"""Permutations of tokens: values, and that each pair of functions are transposes."""

import jax
import numpy as np

from composer_jax.ops.permutation import permute_tokens, slots_to_tokens, tokens_to_slots, unpermute_tokens
from tests.models.small import relative_error

T, K, D = 11, 3, 4
RNG = np.random.default_rng(0)
ORDER = RNG.permutation(T * K)
PLACES = np.argsort(ORDER).reshape(T, K)
X = RNG.standard_normal((T, D)).astype(np.float32)
Y = RNG.standard_normal((T * K, D)).astype(np.float32)


def test_a_pair_gets_its_token_and_a_token_the_sum_of_its_pairs():
    rows = permute_tokens(X, ORDER, PLACES)
    for t in range(T):
        for j in range(K):
            np.testing.assert_array_equal(rows[PLACES[t, j]], X[t])
    assert relative_error(unpermute_tokens(rows, ORDER, PLACES), K * X) < 1e-6


def test_each_is_the_transpose_of_the_other():
    there = float((permute_tokens(X, ORDER, PLACES) * Y).sum())
    assert abs(there - float((X * unpermute_tokens(Y, ORDER, PLACES)).sum())) < 1e-4
    dx = jax.vjp(lambda x: permute_tokens(x, ORDER, PLACES), X)[1](Y)[0]
    dy = jax.vjp(lambda y: unpermute_tokens(y, ORDER, PLACES), Y)[1](X)[0]
    plain_dx = jax.vjp(lambda x: x[ORDER // K], X)[1](Y)[0]
    plain_dy = jax.vjp(lambda y: y[PLACES].sum(1), Y)[1](X)[0]
    assert relative_error(dx, plain_dx) < 1e-6
    assert relative_error(dy, plain_dy) < 1e-6


# Seven slots of which two are empty, for pairs of which most have none.
PAIRS = np.array([4, T * K, 0, 32, 5, T * K, 17])
SLOTS = np.full(T * K, len(PAIRS))
SLOTS[PAIRS[PAIRS < T * K]] = np.flatnonzero(PAIRS < T * K)
SLOTS = SLOTS.reshape(T, K)
Z = RNG.standard_normal((len(PAIRS), D)).astype(np.float32)


def test_empty_slots_are_zero_and_pairs_without_one_add_nothing():
    rows = np.zeros((len(PAIRS), D), np.float32)
    tokens = np.zeros((T, D), np.float32)
    for slot, pair in enumerate(PAIRS):
        if pair < T * K:
            rows[slot] = X[pair // K]
            tokens[pair // K] += Z[slot]
    np.testing.assert_array_equal(tokens_to_slots(X, PAIRS, SLOTS), rows)
    assert relative_error(slots_to_tokens(Z, PAIRS, SLOTS), tokens) < 1e-6
    np.testing.assert_array_equal(jax.vjp(lambda z: slots_to_tokens(z, PAIRS, SLOTS), Z)[1](X)[0], rows)
    assert relative_error(jax.vjp(lambda x: tokens_to_slots(x, PAIRS, SLOTS), X)[1](Z)[0], tokens) < 1e-6
