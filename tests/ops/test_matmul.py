"""The product with a weight against float64, values and gradients, and which operand its gradient transposes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from composer_jax.ops.matmul import matmul, matmul_to_float32
from composer_jax.parallel.mesh import make_mesh
from tests.models.small import relative_error

T = 24
SHAPES = [(16, 40), (40, 16), (8, 8)]


def operands(d, f):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((T, d), (d, f), (T, f))]


@pytest.mark.parametrize("shape", SHAPES)
def test_product_and_gradients_are_those_of_float64(shape):
    x, w, dy = operands(*shape)
    y, transpose = jax.vjp(matmul, x, w)
    wide = [a.astype(np.float64) for a in (x, w, dy)]
    expected = wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2]
    for actual, wanted in zip((y, *transpose(jnp.asarray(dy))), expected, strict=True):
        assert relative_error(actual, wanted) < 1e-6


def test_several_dimensions_are_contracted():
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, T, 3, 4), (3, 4, 5, 6), (2, T, 5, 6)))
    y, transpose = jax.vjp(functools.partial(matmul, contracted=2), x, w)
    wide = [a.astype(np.float64) for a in (x, w, dy)]
    expected = [
        np.einsum("bshv,hvxy->bsxy", *wide[:2]),
        np.einsum("bsxy,hvxy->bshv", wide[2], wide[1]),
        np.einsum("bshv,bsxy->hvxy", wide[0], wide[2]),
    ]
    for actual, wanted in zip((y, *transpose(jnp.asarray(dy))), expected, strict=True):
        assert relative_error(actual, wanted) < 1e-6


def test_gradients_have_the_dtype_of_their_operands():
    x, w, dy = (jnp.asarray(a, jnp.bfloat16) for a in operands(16, 40))
    y, transpose = jax.vjp(matmul, x, w)
    assert {a.dtype for a in (y, *transpose(dy))} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    ("product", "dtype", "most"), [(matmul, "float32", 1e-6), (matmul_to_float32, "bfloat16", 0.01)]
)
def test_replicated_weights_get_the_gradient_of_all_tokens(product, dtype, most):
    x, w, dy = operands(16, 40)
    mesh = make_mesh(jax.devices(), replica=8)
    tokens = PartitionSpec(mesh.axis_names)

    def gradient(x, w, dy):
        return jax.grad(lambda w: (product(x, w) * dy).sum())(w)

    program = jax.jit(
        jax.shard_map(gradient, mesh=mesh, in_specs=(tokens, PartitionSpec(), tokens), out_specs=PartitionSpec())
    )
    rounded = (jnp.asarray(a, dtype) for a in (x, w))
    assert relative_error(program(*rounded, dy), x.astype(np.float64).T @ dy) < most


@pytest.mark.parametrize(
    ("platform", "d", "f", "transposed"), [("cpu", 16, 40, 16), ("cpu", 40, 16, 16), ("tpu", 16, 40, 40)]
)
def test_on_a_cpu_the_gradient_of_the_weight_transposes_the_narrower_operand(platform, d, f, transposed):
    gradient = jax.jit(lambda x, w, dy: jax.vjp(matmul, x, w)[1](dy)[1])
    program = gradient.trace(*operands(d, f)).lower(lowering_platforms=(platform,)).as_text()
    (first_operand,) = re.findall(r"contracting_dims = \[0\] x \[0\].*: \(tensor<(\w+)>,", program)
    assert first_operand == f"{T}x{transposed}xf32"


def test_a_float32_result_of_bfloat16_operands_has_the_gradients_of_a_rounded_one():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((2, 2048, 8), (8, 12)))
    dy = jnp.asarray(1 + rng.standard_normal((2, 2048, 12)) / 4, jnp.float32)
    y, transpose = jax.vjp(matmul_to_float32, x, w)
    wide_x, wide_w = (np.asarray(a, np.float64) for a in (x, w))
    assert y.dtype == jnp.float32 and relative_error(y, wide_x @ wide_w) < 1e-6
    expected = np.asarray(dy) @ wide_w.T, np.einsum("bsd,bsf->df", wide_x, np.asarray(dy))
    for actual, wanted, operand in zip(transpose(dy), expected, (x, w), strict=True):
        assert actual.dtype == operand.dtype and relative_error(actual, wanted) < 0.01


@pytest.mark.parametrize(("dtype", "multiplied"), [("bfloat16", "bf16"), ("float32", "f32"), ("float16", "f32")])
def test_gradients_of_a_float32_result_are_products_in_bfloat16_where_the_operands_are(dtype, multiplied):
    x, w, dy = operands(16, 40)
    gradient = jax.jit(lambda x, w, dy: jax.vjp(matmul_to_float32, x, w)[1](dy))
    program = gradient.trace(jnp.asarray(x, dtype), jnp.asarray(w, dtype), dy).lower(lowering_platforms=("cuda",))
    of_gradients = re.findall(r"dot_general.*: \(tensor<\d+x\d+x(\w+)>", program.as_text())
    assert of_gradients == 2 * [multiplied]


def test_gradients_that_float16_cannot_hold_are_summed_before_they_are_rounded():
    x, w = jnp.ones((2048, 8), jnp.float16), jnp.ones((8, 12), jnp.float16)
    dw = jax.vjp(matmul_to_float32, x, w)[1](jnp.full((2048, 12), 1e-8, jnp.float32))[1]
    assert relative_error(dw, np.full((8, 12), 2048e-8)) < 0.01
