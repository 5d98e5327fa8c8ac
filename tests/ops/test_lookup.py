"""lookup: values, and gradients that are summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.ops.lookup import lookup
from tests.models.small import relative_error

RNG = np.random.default_rng(0)


def test_values_and_gradient_are_those_of_indexing():
    table, ids = RNG.standard_normal((7, 3)).astype(np.float32), RNG.integers(0, 7, (4, 5))
    weights = RNG.standard_normal((4, 5, 3)).astype(np.float32)
    np.testing.assert_array_equal(lookup(table, ids), table[ids])
    actual = jax.grad(lambda t: (lookup(t, ids) * weights).sum())(table)
    expected = np.zeros_like(table)
    np.add.at(expected, ids, weights)
    assert relative_error(actual, expected) < 1e-6


@pytest.mark.parametrize("rows", [300, 8192])
def test_a_row_used_many_times_gets_the_whole_sum_of_gradients(rows):
    ids = np.zeros(rows, np.int32)
    gradient = jax.grad(lambda t: lookup(t, ids).astype(jnp.float32).sum())(jnp.zeros((2, 1), jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient[0, 0]) == float(jnp.bfloat16(rows))
