"""Products of rounded operands against NumPy, forward and backward, and what a token's result depends on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from composer_jax.ops.fake_quantization import fake_mxfp8, fake_nvfp4
from composer_jax.ops.quantized_matmul import quantized_grouped_matmul, quantized_matmul
from composer_jax.parallel.mesh import make_mesh
from tests.models.small import relative_error

RNG = np.random.default_rng(0)
T, D, F = 70, 48, 80
FORWARD = {"mxfp8": fake_mxfp8, "nvfp4": fake_nvfp4}
X, DY = (RNG.standard_normal(s).astype(np.float32) * 4.0 ** RNG.integers(-3, 3, s) for s in ((T, D), (T, F)))
W = RNG.standard_normal((3, D, F)).astype(np.float32) * 4.0 ** RNG.integers(-3, 3, (3, D, F))
SIZES = np.array([33, 0, 30], np.int32)
"""Seven rows have no group; blocks of rows that began at row 32 would mix groups."""


ROUND = {fake: jax.jit(fake, static_argnums=1) for fake in (fake_mxfp8, fake_nvfp4)}


def rounded(fake, x, axis):
    return np.asarray(ROUND[fake](x, axis), np.float64)


def expected_product(precision, x, w, dy):
    """y, dx and dw of their formulas in float64."""
    y = rounded(FORWARD[precision], x, 1) @ rounded(FORWARD[precision], w, 0)
    dx = rounded(fake_mxfp8, dy, 1) @ rounded(fake_mxfp8, w, 1).T
    return y, dx, rounded(fake_mxfp8, x, 0).T @ rounded(fake_mxfp8, dy, 0)


@pytest.mark.parametrize("precision", FORWARD)
def test_product_and_gradients_are_those_of_their_formulas(precision):
    @jax.jit
    def run(x, w, dy):
        y, transpose = jax.vjp(functools.partial(quantized_matmul, precision=precision), x, w)
        return y, *transpose(dy)

    results = run(X, W[0], DY)
    for actual, wanted in zip(results, expected_product(precision, X, W[0], DY), strict=True):
        assert relative_error(actual, wanted) < 1e-6
    assert relative_error(results[0], X.astype(np.float64) @ W[0]) > 0.01


@pytest.mark.parametrize("precision", FORWARD)
def test_a_grouped_product_is_a_product_of_each_group(precision):
    @jax.jit
    def run(x, w, dy):
        y, transpose = jax.vjp(lambda x, w: quantized_grouped_matmul(x, w, SIZES, precision), x, w)
        return y, *transpose(dy)

    y, dx, dw = run(X, W, DY)
    start = 0
    for group, size in enumerate(SIZES):
        rows = slice(start, start := start + size)
        wanted = expected_product(precision, X[rows], W[group], DY[rows]) if size else (0, 0, np.zeros((D, F)))
        for actual, part in zip((y[rows], dx[rows], dw[group]), wanted, strict=True):
            assert not size or relative_error(actual, part) < 1e-6
        assert size or not np.asarray(dw[group]).any()
    assert not np.asarray(y[start:]).any() and not np.asarray(dx[start:]).any()


@pytest.mark.parametrize("precision", FORWARD)
@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
def test_a_token_depends_on_no_other_token(precision, grouped):
    """The last token grows fifty times, as a token after the others and as another row of the batch: the results of
    the others are the same to the last bit, and so are their gradients."""

    @jax.jit
    def run(x, dy):
        if grouped:
            sizes = jnp.array([33, 0, T - 33], jnp.int32)
            y, transpose = jax.vjp(lambda x: quantized_grouped_matmul(x, W, sizes, precision), x)
        else:
            y, transpose = jax.vjp(lambda x: quantized_matmul(x, jnp.asarray(W[0]), precision), x)
        return y, transpose(dy)[0]

    louder = np.r_[np.ones(T - 1), 50].astype(np.float32)[:, None]
    for before, after in zip(run(X, DY), run(X * louder, DY * louder), strict=True):
        np.testing.assert_array_equal(before[:-1], after[:-1])
        assert (np.asarray(before)[-1] != np.asarray(after)[-1]).any()


def test_a_scale_of_the_whole_tensor_would_leak():
    """The control of the test above: one g for all tokens changes tokens before the loud one."""
    louder = np.r_[np.ones(T - 1), 50].astype(np.float32)[:, None]
    whole = lambda x: np.asarray(fake_nvfp4(jnp.asarray(x).reshape(1, -1), 1)).reshape(x.shape)  # noqa: E731
    assert (whole(X)[:-1] != whole(X * louder)[:-1]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_have_the_dtype_of_their_operand(dtype):
    x, w, dy = jnp.asarray(X, dtype), jnp.asarray(W, dtype), jnp.asarray(DY, dtype)
    y, transpose = jax.vjp(lambda x, w: quantized_grouped_matmul(x, w, jnp.asarray(SIZES), "nvfp4"), x, w)
    assert {a.dtype for a in (y, *transpose(dy))} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("precision", FORWARD)
def test_a_contracted_axis_on_several_devices_is_that_of_one(precision):
    x, w, dy = X[:32, [*range(32)] * 2], W[0][[*range(32)] * 2], DY[:32]
    x[:, 32:] *= 3  # another largest number on the second device

    def run(x, w, dy, mesh_axis=None):
        def product(x, w):
            y = quantized_matmul(x, w, precision, mesh_axis)
            return y if mesh_axis is None else jax.lax.psum(y, mesh_axis)

        y, transpose = jax.vjp(product, x, w)
        return y, *transpose(dy)

    p = PartitionSpec
    specs = (p(None, "tensor"), p("tensor", None), p())
    mapped = jax.shard_map(
        functools.partial(run, mesh_axis="tensor"),
        mesh=make_mesh(jax.devices()[:2], tensor=2),
        in_specs=specs,
        out_specs=(p(), *specs[:2]),
    )
    for actual, wanted in zip(jax.jit(mapped)(x, w, dy), run(x, w, dy), strict=True):
        assert relative_error(actual, wanted) < 1e-6
