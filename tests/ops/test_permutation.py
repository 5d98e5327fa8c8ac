"""Permutations of tokens: values, and that the two functions are transposes."""

import jax
import numpy as np

from composer_jax.ops.permutation import permute_tokens, unpermute_tokens
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
