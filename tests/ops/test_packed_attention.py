"""Attention within rows: every form against a plain softmax, for whole rows and for one device's shard of a row."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.ops import packed_attention, splash
from composer_jax.ops.local_gpu import LocalGpu
from composer_jax.ops.packed_attention import AttentionMask
from composer_jax.parallel.context import zigzag_order
from tests.models.small import relative_error

RNG = np.random.default_rng(0)
B, T, H, N, X, V = 2, 256, 4, 2, 24, 16
WINDOW = 100
SEGMENTS = np.repeat([[1] * 90 + [2] * 120 + [0] * 46, [1] * 256], 1, axis=0).astype(np.int32)
PADDED = np.array([[1] * 200 + [2] * 100 + [0] * 468, [0] * 768], np.int32)
"""A row that ends in padding, and one of padding alone."""
K, VALUES = RNG.standard_normal((B, 768, N, X)), RNG.standard_normal((B, 768, N, V))
SINKS = RNG.standard_normal(H)
WHOLE = np.arange(T)
SECOND_OF_TWO = zigzag_order(T, 2)[T // 2 :]


def plain(q, k, v, sinks, order, windowed, segments=SEGMENTS):
    """In NumPy's letters: scores, mask, softmax with one more logit per head, weighted values; 0 for padding."""
    t = segments.shape[1]
    k, v = (jnp.repeat(a, H // N, axis=2) for a in (k, v))
    scores = jnp.einsum("bshx,bthx->bhst", q, k)
    back = order[:, None] - np.arange(t)[None, :]
    seen = (back >= 0) & ((back < WINDOW) | (not windowed))
    seen = seen & (segments[:, order, None] == segments[:, None, :])
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    if sinks is not None:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))], axis=-1)
    y = jnp.einsum("bhst,bthv->bshv", jax.nn.softmax(scores)[..., :t], v)
    return jnp.where(segments[:, order, None, None] > 0, y, 0)


def products(q, k, v, sinks, order, window, windowed, segments=SEGMENTS):
    whole = len(order) == segments.shape[1]
    mask = AttentionMask(jnp.asarray(order), segments[:, order], segments, whole, window)
    return packed_attention.products(q, k, v, mask, jnp.asarray(windowed), sinks)


def kernel(q, k, v, sinks, order, window, windowed, segments=SEGMENTS):
    fields = jnp.asarray(order, jnp.int32), jnp.asarray(segments[:, order]), jnp.asarray(segments)
    return splash.attend(q, k, v, *fields, window, jnp.asarray(windowed), sinks, interpret=True)


def value_and_gradients(function, order, sinks, t=T):
    q = np.random.default_rng(2).standard_normal((B, len(order), H, X)) / np.sqrt(X)
    operands = [jnp.asarray(a, jnp.float32) for a in (q, K[:, :t], VALUES[:, :t])]
    operands += [None if sinks is None else jnp.asarray(sinks)]
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
@pytest.mark.parametrize(
    ("order", "window", "windowed", "sinks"),
    [
        (WHOLE, None, False, None),
        (SECOND_OF_TWO, None, False, None),
        (SECOND_OF_TWO, WINDOW, True, SINKS),
        (WHOLE, WINDOW, False, SINKS),
    ],
    ids=["full", "part_of_full", "part_of_window", "full_of_windows"],
)
def test_every_form_equals_a_plain_softmax(monkeypatch, form, order, window, windowed, sinks):
    monkeypatch.setattr(splash, "BLOCK", 128)
    monkeypatch.setattr(splash, "MOST_PARTS", 0 if form is kernel_of_two else 16)
    actual = value_and_gradients(functools.partial(form, order=order, window=window, windowed=windowed), order, sinks)
    expected = value_and_gradients(functools.partial(plain, order=order, windowed=windowed), order, sinks)
    for f, w in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(w).max() > 0.01
        assert relative_error(f, w) < 2e-5


@pytest.mark.parametrize(
    ("form", "window", "sinks"),
    [(products, WINDOW, SINKS), (kernel, None, None), (kernel, WINDOW, SINKS), (kernel_of_two, None, None)],
)
def test_padding_attends_to_nothing(monkeypatch, form, window, sinks):
    """Outputs and gradients of documents are those without padding, and those of padding are zero.

    The kernel's forward pass has blocks of 384 queries and its backward pass of 256, so that one of these has queries
    of a document and queries of a block that the forward pass skips.
    """
    monkeypatch.setattr(splash, "BLOCK", 512)
    monkeypatch.setattr(splash, "MOST_PARTS", 0 if form is kernel_of_two else 16)
    rules = dict(order=np.arange(768), windowed=window is not None, segments=PADDED)
    actual = value_and_gradients(functools.partial(form, window=window, **rules), rules["order"], sinks, 768)
    expected = value_and_gradients(functools.partial(plain, **rules), rules["order"], sinks, 768)
    for f, w in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(w).max() > 0.01
        assert relative_error(f, w) < 2e-5
    (_, dk, dv, *_), y = actual
    for array in (y, dk, dv):
        assert not array[PADDED == 0].any()


def test_sinks_have_a_float32_gradient_in_bfloat16_too():
    shapes = [(1, 128, H, X), (1, 128, N, X), (1, 128, N, V)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes] + [jax.ShapeDtypeStruct((H,), "float32")]

    def objective(q, k, v, sinks):
        segments = np.ones((1, 128), np.int32)
        return kernel(q, k, v, sinks, np.arange(128), None, False, segments).astype(jnp.float32).sum()

    gradients = jax.eval_shape(jax.grad(objective, (0, 3)), *operands)
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize(("gpu", "blocks"), [(LocalGpu("Tesla T4", (7, 5), 91002), 4), (None, 16)])
def test_a_gpu_without_a_fused_form_compiles_products_of_few_shapes(monkeypatch, gpu, blocks):
    monkeypatch.setattr(packed_attention, "local_gpu", lambda: gpu)
    rows = [jax.ShapeDtypeStruct((1, 2048, heads, 64), jnp.float32) for heads in (4, 2, 2)]

    def objective(q, k, v):
        segments = jnp.ones((1, 2048), jnp.int32)
        return packed_attention.attend_rows(q, k, v, AttentionMask(jnp.arange(2048), segments, segments)).sum()

    gradient = jax.jit(jax.grad(objective, (0, 1, 2))).trace(*rows)
    text = gradient.lower(lowering_platforms=("cuda",)).as_text()
    assert len(set(re.findall(r"dot_general.* : (\(.*)", text))) == 6 * blocks


def documents(*lengths: int) -> np.ndarray:
    """The segments of a row of 8192 tokens that holds documents of these lengths."""
    row = np.repeat(np.arange(len(lengths)) + 1, lengths).astype(np.int32)
    return np.pad(row, (0, 8192 - len(row)))


@pytest.mark.parametrize(
    ("segments", "blocks"),
    [
        (documents(), 0),
        (documents(100), 1),
        (documents(4096), 10),
        (documents(4000, 3000), 10 + 9),
        (documents(*[1024] * 8), 8),
        (documents(8192), 36),
    ],
    ids=["empty", "one_block", "half_padding", "two_documents", "eight_documents", "full"],
)
def test_the_kernel_computes_the_blocks_of_documents_only(segments, blocks):
    """A document costs the blocks up to the diagonal of those that it reaches into, padding none."""
    assert splash.computed_pairs(segments) == blocks * 1024**2


def test_rows_of_every_length_have_a_count():
    """A row of 48 tokens counts as one of 128, and a window hides blocks."""
    assert splash.computed_pairs(np.arange(48) // 40) == 128**2
    assert splash.computed_pairs(np.zeros(48, np.int32)) == 0
    assert splash.computed_pairs(documents(8192), window=1024) == (8 + 7) * 1024**2
