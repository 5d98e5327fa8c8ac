"""8-bit weights are within half a step of the originals, column by column."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.ops.quantization import LARGEST, quantize_weight


def half_step(weight, scales, dtype):
    """float8_e4m3fn has 3 bits after the leading one, and numbers below 2**-6 have steps of 2**-9."""
    return scales / 2 if dtype == "int8" else np.maximum(np.abs(weight) * 2.0**-4, scales * 2.0**-10)


CASES = [
    ((5,), (0,), "float32"),
    ((3, 4), (), "float32"),
    ((4, 3), (0,), "bfloat16"),
    ((2, 5, 3), (0, 2), "float32"),
    ((3, 4, 2, 5), (1, 2), "bfloat16"),
    ((1, 2, 3), (0, 1, 2), "float32"),
]
"""Shape, axes that a column runs over, and dtype of a weight."""


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize(("shape", "in_axes", "source"), CASES)
def test_a_weight_is_within_half_a_step(dtype, shape, in_axes, source):
    """Columns differ by factors of up to 10**8, and some are zero."""
    columns = [1 if axis in in_axes else size for axis, size in enumerate(shape)]
    quantize = jax.jit(lambda weight: (q := quantize_weight(weight, in_axes, dtype), q.dequantize("float32")))
    for seed in range(40):
        rng = np.random.default_rng(seed)
        magnitudes = 10 ** rng.uniform(-6, 2, columns) * rng.integers(0, 2, columns)
        weight = jnp.asarray(rng.standard_normal(shape) * magnitudes, source)
        quantized, back = quantize(weight)
        assert quantized.values.shape == shape and quantized.values.dtype == dtype
        assert quantized.scales.shape == tuple(columns) and quantized.scales.dtype == jnp.float32
        exact, scales = np.asarray(weight, np.float64), np.asarray(quantized.scales, np.float64)
        error = np.abs(np.asarray(back, np.float64) - exact)
        assert (error <= half_step(exact, scales, dtype) * (1 + 1e-5)).all()
        assert np.abs(np.asarray(quantized.values, np.float64)).max() <= LARGEST[dtype]


@pytest.mark.parametrize("dtype", LARGEST)
def test_the_largest_number_of_a_column_is_exact(dtype):
    weight = jnp.array([[1.0, -3.0, 0.0], [-0.5, 0.25, 0.0]])
    quantized = quantize_weight(weight, (0,), dtype)
    largest = LARGEST[dtype]
    np.testing.assert_array_equal(np.asarray(quantized.values, np.float32)[0], [largest, -largest, 0])
    np.testing.assert_allclose(quantized.scales, [[1 / largest, 3 / largest, 0]], rtol=1e-6)
    assert quantized.dequantize("bfloat16").dtype == jnp.bfloat16
