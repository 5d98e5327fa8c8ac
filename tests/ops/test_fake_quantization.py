"""Rounding to MXFP8, NVFP4' and INT4 against loops over blocks that search the formats' numbers for the nearest."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.ops.fake_quantization import (
    divide,
    fake_int4,
    fake_mxfp8,
    fake_nvfp4,
    round_e2m1,
    round_e4m3,
    scaled_nvfp4,
)
from tests.many import many

F32 = np.float32
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # code 127 is NaN
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FAKE = {"mxfp8": fake_mxfp8, "nvfp4": fake_nvfp4, "int4": fake_int4}


def nearest(x, grid: np.ndarray) -> np.float64:
    """The number of the grid nearest to x, of two the one with an even code, with the sign of x."""
    distance = np.abs(abs(np.float64(x)) - grid)
    best = np.flatnonzero(distance == distance.min())
    return np.copysign(grid[best[best % 2 == 0][0] if len(best) > 1 else best[0]], x)


def mxfp8_row(row):
    out = np.zeros(len(row))
    for start in range(0, len(row), 32):
        block = row[start : start + 32].astype(np.float64)
        if block.any():
            s = 2.0 ** np.ceil(np.log2(np.abs(block).max() / 448))
            out[start : start + 32] = [s * nearest(v / s, E4M3) for v in block]
    return out


def nvfp4_row(row):
    """Each operation in float32, as the hardware has them."""
    out, g = np.zeros(len(row)), np.abs(row).max() / F32(6 * 448)
    for start in range(0, len(row), 16):
        block = row[start : start + 16]
        s = F32(nearest(np.abs(block).max() / (F32(6) * g), E4M3)) if g else F32(0)
        if s:
            out[start : start + 16] = [F32(nearest(v / (s * g), E2M1)) * s * g for v in block]
    return out


def int4_row(row):
    out = np.zeros(len(row))
    for start in range(0, len(row), 32):
        s = np.abs(row[start : start + 32]).max() / F32(7)
        if s:
            out[start : start + 32] = [F32(nearest(v / s, np.arange(8))) * s for v in row[start : start + 32]]
    return out


ORACLES = {"mxfp8": mxfp8_row, "nvfp4": nvfp4_row, "int4": int4_row}


def random_rows(seed: int, rows: int, width: int) -> np.ndarray:
    """Rows, and blocks of them, differ by many powers of two; some numbers are zero, some powers of two, some ties."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width)) * 2.0 ** rng.integers(-40, 40, (rows, 1))
    x *= 2.0 ** rng.integers(-8, 8, (rows, -(-width // 16))).repeat(16, 1)[:, :width]
    special = rng.choice(E2M1, x.shape) * 2.0 ** rng.integers(-3, 9, x.shape)
    return np.where(rng.random(x.shape) < 0.3, special * rng.choice([-1, 1], x.shape), x).astype(F32)


@pytest.mark.parametrize("name", FAKE)
@settings(max_examples=many(12), deadline=None)
@given(seed=st.integers(0, 10**6), width=st.sampled_from([1, 16, 33, 70]))
def test_every_number_is_that_of_a_loop(name, seed, width):
    x = random_rows(seed, 3, width)
    expected = np.stack([ORACLES[name](row) for row in x]).astype(F32)
    fake = jax.jit(FAKE[name], static_argnums=1)
    np.testing.assert_array_equal(fake(x, 1), expected)
    np.testing.assert_array_equal(fake(x.T, 0), expected.T)


@pytest.mark.parametrize(
    ("rounding", "dtype", "largest"),
    [(round_e4m3, ml_dtypes.float8_e4m3fn, 448), (round_e2m1, ml_dtypes.float4_e2m1fn, 6)],
    ids=["e4m3", "e2m1"],
)
def test_roundings_are_the_saturating_casts_of_ml_dtypes(rounding, dtype, largest):
    grid = (E4M3 if largest == 448 else E2M1).astype(F32)
    ties = (grid[1:] + grid[:-1]) / 2
    around = [np.nextafter(ties, F32(0)), ties, np.nextafter(ties, F32(np.inf)), grid, [449, 465, 1e30, 1e-30]]
    spread = np.exp(np.random.default_rng(0).uniform(-9, 8, 20_000))
    x = np.concatenate([*around, spread]).astype(F32)
    x = np.concatenate([x, -x])
    expected = np.clip(x, -largest, largest).astype(dtype).astype(F32)
    np.testing.assert_array_equal(np.asarray(jax.jit(rounding)(x)), expected)


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(448.0, 1.0), (np.nextafter(F32(448), F32(449)), 2.0), (224.0, 0.5), (256.0, 1.0), (1.0, 2.0**-8), (1e30, None)],
)
def test_the_scale_of_mxfp8_rounds_up_to_a_power_of_two(amax, scale):
    """The smallest subnormal number of e4m3 is 2^-9: its half is rounded to zero, more than that is not."""
    scale = 2.0 ** np.ceil(np.log2(float(amax) / 448)) if scale is None else scale
    x = np.array([amax, scale * 2.0**-10, scale * 2.0**-10 * 1.01], F32)
    np.testing.assert_array_equal(np.asarray(fake_mxfp8(jnp.asarray(x), 0))[1:], [0, F32(scale) * F32(2.0**-9)])


def test_quotients_are_those_of_ieee():
    """A plain quotient by a constant or a broadcast is none: XLA multiplies by the reciprocal."""
    x = np.exp(np.random.default_rng(1).uniform(-30, 30, (3000, 16))).astype(F32)
    column = x[:, :1]
    for divisor in (column, x[:1]):
        np.testing.assert_array_equal(jax.jit(divide)(x, divisor), x / divisor)
    np.testing.assert_array_equal(jax.jit(lambda x: divide(x, 7.0))(x), x / F32(7))
    _, g = jax.jit(scaled_nvfp4, static_argnums=1)(column, 1)
    np.testing.assert_array_equal(g, column / F32(6 * 448))
    # The largest number of a group of INT4 is 7 s.
    np.testing.assert_array_equal(jax.jit(fake_int4, static_argnums=1)(column, 1), column / F32(7) * F32(7))
    assert (np.asarray(jax.jit(lambda x: x / 7.0)(x)) != x / F32(7)).any()  # the reason for `divide`


@pytest.mark.parametrize("name", FAKE)
def test_zeros_stay_and_infinities_become_nan(name):
    x = np.zeros((4, 64), F32)
    x[1, 40], x[2, 5], x[3] = 1e30, np.inf, np.nan
    y = np.asarray(FAKE[name](jnp.asarray(x), 1))
    assert not y[0].any() and np.flatnonzero(y[1]).tolist() == [40]
    assert np.isnan(y[2, :16]).all() and np.isnan(y[3]).all()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_values_are_exact_in_bfloat16(name):
    x = jnp.asarray(random_rows(3, 8, 64), jnp.bfloat16)
    wide = FAKE[name](x.astype(jnp.float32), 1)
    values = wide if name == "mxfp8" else scaled_nvfp4(x, 1).values
    np.testing.assert_array_equal(values.astype(jnp.bfloat16).astype(jnp.float32), values)
    rounded = FAKE[name](x, 1)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_row_alone_is_the_row_in_a_batch(name):
    batch = random_rows(5, 7, 96)
    together = np.asarray(jax.jit(FAKE[name], static_argnums=1)(batch, 1))
    for i, row in enumerate(batch):
        np.testing.assert_array_equal(np.asarray(jax.jit(FAKE[name], static_argnums=1)(row[None], 1))[0], together[i])


@pytest.mark.parametrize(("name", "least", "most"), [("mxfp8", 0.02, 0.03), ("nvfp4", 0.07, 0.1), ("int4", 0.08, 0.12)])
def test_the_mean_relative_error_of_normal_numbers(name, least, most):
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(F32)
    error = np.abs(np.asarray(FAKE[name](jnp.asarray(x), 1)) - x).mean() / np.abs(x).mean()
    assert least < error < most


def test_the_gradient_of_int4_passes_straight_through():
    x, dy = (np.random.default_rng(i).standard_normal((3, 40)).astype(F32) for i in (0, 1))
    y, transpose = jax.vjp(lambda x: fake_int4(x, 1), jnp.asarray(x))
    assert np.abs(np.asarray(y) - x).max() > 0.05
    np.testing.assert_array_equal(transpose(jnp.asarray(dy))[0], dy)
