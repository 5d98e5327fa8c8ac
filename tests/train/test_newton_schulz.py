"""The iteration against its closed form: the polynomial of the singular values, computed by NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.train import muon
from composer_jax.train.muon import orthogonalize

A, B, C = muon.COEFFICIENTS


def closed_form(x: np.ndarray, steps: int) -> np.ndarray:
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(steps):
        s = A * s + B * s**3 + C * s**5
    return u * s @ vt


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 7)], ids=str)
@pytest.mark.parametrize("steps", [1, 5])
def test_singular_values_follow_the_polynomial(shape, steps):
    x = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    expected = np.stack([closed_form(matrix, steps) for matrix in x])
    np.testing.assert_allclose(orthogonalize(jnp.asarray(x), steps), expected, atol=2e-5)


def test_five_steps_bring_singular_values_near_one():
    """As long as they are not thousands of times smaller than the largest."""
    x = np.random.default_rng(1).standard_normal((4, 12, 30)).astype(np.float32)
    values = np.linalg.svd(np.asarray(orthogonalize(jnp.asarray(x))), compute_uv=False)
    assert 0.65 < values.min() and values.max() < 1.25


def test_a_zero_matrix_stays_zero():
    np.testing.assert_array_equal(orthogonalize(jnp.zeros((2, 3, 4))), 0)


def test_a_large_stack_is_computed_in_chunks_with_the_same_result(monkeypatch):
    x = jnp.asarray(np.random.default_rng(2).standard_normal((7, 4, 5)), jnp.float32)
    whole = orthogonalize(x)
    monkeypatch.setattr(muon, "CHUNK_ELEMENTS", 3 * 20)
    np.testing.assert_allclose(orthogonalize(x), whole, atol=1e-6)
