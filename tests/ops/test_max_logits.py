"""The largest logits in blocks against a dense NumPy computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.ops import max_logits as module
from composer_jax.ops.max_logits import max_logits
from composer_jax.ops.packed_attention import AttentionMask

B, S, H, N, X = 2, 13, 4, 2, 3
SEGMENTS = np.array([[1] * 6 + [2] * 5 + [0] * 2, [1] * 2 + [2] * 9 + [3] * 2], np.int32)
RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((B, S, H, X)).astype(np.float32), RNG.standard_normal((B, S, N, X)).astype(np.float32)
WHOLE, SHARD = np.arange(S), np.array([3, 4, 5, 9, 10, 11])


def dense(order, window, windowed) -> np.ndarray:
    logits = np.einsum("bshx,bthx->bhst", Q[:, order], np.repeat(K, H // N, axis=2))
    distance = order[:, None] - np.arange(S)
    near = (distance >= 0) & (distance < (window if windowed else S))
    segments = SEGMENTS[:, order, None]
    visible = near & (segments == SEGMENTS[:, None]) & (segments > 0)
    return np.where(visible[:, None], logits, -np.inf).max((0, 2, 3))


@pytest.mark.parametrize("block", [4, 5, 512])
@pytest.mark.parametrize(("window", "windowed"), [(None, None), (3, True), (3, False)])
@pytest.mark.parametrize("order", [WHOLE, SHARD], ids=["whole", "shard"])
def test_blocks_of_any_size_find_the_largest_visible_logit(monkeypatch, block, window, windowed, order):
    monkeypatch.setattr(module, "BLOCK", block)
    mask = AttentionMask(jnp.asarray(order), SEGMENTS[:, order], SEGMENTS, is_whole_row=order is WHOLE, window=window)
    windowed_array = None if windowed is None else jnp.asarray(windowed)
    actual = jax.jit(lambda q, k: max_logits(q, k, mask, windowed_array))(Q[:, order], K)
    np.testing.assert_allclose(actual, dense(order, window, windowed), rtol=1e-6)


def test_it_has_no_gradient_and_is_minus_infinity_without_tokens():
    mask = AttentionMask(jnp.arange(S), jnp.asarray(SEGMENTS), jnp.asarray(SEGMENTS))
    gradient = jax.grad(lambda q: max_logits(q, jnp.asarray(K), mask).sum())(jnp.asarray(Q))
    assert not gradient.any()
    padding = jnp.zeros_like(SEGMENTS)
    assert (
        max_logits(jnp.asarray(Q), jnp.asarray(K), AttentionMask(jnp.arange(S), padding, padding)) == -jnp.inf
    ).all()
