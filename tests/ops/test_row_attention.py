"""Attention within rows: every form against a plain softmax, for whole rows and for one device's shard of a row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.ops import row_attention, splash
from composer_jax.ops.row_attention import AttentionMask
from composer_jax.parallel.context import zigzag_order
from tests.models.small import relative_error

RNG = np.random.default_rng(0)
B, T, H, N, X, V = 2, 256, 4, 2, 24, 16
WINDOW = 100
SEGMENTS = np.repeat([[1] * 90 + [2] * 120 + [0] * 46, [1] * 256], 1, axis=0).astype(np.int32)
K, VALUES = RNG.standard_normal((B, T, N, X)), RNG.standard_normal((B, T, N, V))
SINKS = RNG.standard_normal(H)
WHOLE = np.arange(T)
SECOND_OF_TWO = zigzag_order(T, 2)[T // 2 :]


def plain(q, k, v, sinks, order, windowed):
    """In NumPy's letters: scores, mask, softmax with one more logit per head, weighted values."""
    k, v = (jnp.repeat(a, H // N, axis=2) for a in (k, v))
    scores = jnp.einsum("bshx,bthx->bhst", q, k)
    back = order[:, None] - np.arange(T)[None, :]
    seen = (back >= 0) & ((back < WINDOW) | (not windowed))
    seen = seen & (SEGMENTS[:, order, None] == SEGMENTS[:, None, :])
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    if sinks is not None:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))], axis=-1)
    return jnp.einsum("bhst,bthv->bshv", jax.nn.softmax(scores)[..., :T], v)


def products(q, k, v, sinks, order, window, windowed):
    whole = order is WHOLE
    mask = AttentionMask(jnp.asarray(order), SEGMENTS[:, order], SEGMENTS, whole, window)
    return row_attention.products(q, k, v, mask, jnp.asarray(windowed), sinks)


def kernel(q, k, v, sinks, order, window, windowed):
    fields = jnp.asarray(order, jnp.int32), jnp.asarray(SEGMENTS[:, order]), jnp.asarray(SEGMENTS)
    return splash.attend(q, k, v, *fields, window, jnp.asarray(windowed), sinks, interpret=True)


def value_and_gradients(function, order, sinks):
    q = np.random.default_rng(2).standard_normal((B, len(order), H, X)) / np.sqrt(X)
    operands = [jnp.asarray(a, jnp.float32) for a in (q, K, VALUES)] + [None if sinks is None else jnp.asarray(sinks)]
    weight = np.random.default_rng(1).standard_normal((B, len(order), H, V))

    def objective(*operands):
        y = function(*operands)
        return (y * weight).sum(), y

    argnums = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
    return jax.jit(jax.grad(objective, argnums, has_aux=True))(*operands)


def kernel_of_two(*args, **kwargs):
    """The backward pass in two kernels, as for long rows."""
    return kernel(*args, **kwargs)


@pytest.mark.parametrize("form", [products, kernel, kernel_of_two])
@pytest.mark.parametrize("order", [WHOLE, SECOND_OF_TWO], ids=["whole", "part"])
@pytest.mark.parametrize(
    ("window", "windowed", "sinks"),
    [(None, False, None), (WINDOW, True, SINKS), (WINDOW, False, SINKS)],
    ids=["full", "window", "full_of_windows"],
)
def test_every_form_equals_a_plain_softmax(monkeypatch, form, order, window, windowed, sinks):
    monkeypatch.setattr(splash, "BLOCK", 128)
    monkeypatch.setattr(splash, "MOST_PARTS", 0 if form is kernel_of_two else 16)
    actual = value_and_gradients(functools.partial(form, order=order, window=window, windowed=windowed), order, sinks)
    expected = value_and_gradients(functools.partial(plain, order=order, windowed=windowed), order, sinks)
    for f, w in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(w).max() > 0.01
        assert relative_error(f, w) < 2e-5
