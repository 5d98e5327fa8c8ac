"""Grouped products may leave any value in rows without an expert of this device: what they leave goes nowhere."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.ops import quantized_matmul
from composer_jax.ops.activation import swiglu
from composer_jax.ops.grouped_matmul import blocked, grouped_matmul
from composer_jax.parallel.dispatch import Biases, Experts, compute
from composer_jax.parallel.dispatch.rounds import compute_in_rounds

T, K, E, D, F = 12, 3, 4, 6, 10


@jax.custom_vjp
def product_that_leaves_nan(x, w, sizes):
    return jnp.where(rest(x, sizes), jnp.nan, blocked(x, w, sizes))


def rest(x, sizes):
    return (jnp.arange(len(x)) >= sizes.sum())[:, None]


def backward(saved, dy):
    x, w, sizes = saved
    _, transpose = jax.vjp(blocked, x, w, sizes)
    dx, dw, _ = transpose(dy)
    # A kernel may multiply rows without a group by zero, which is zero for finite numbers only.
    dw += (jnp.where(rest(x, sizes), x, 0).sum() + jnp.where(rest(x, sizes), dy, 0).sum()) * 0
    return jnp.where(rest(x, sizes), jnp.nan, dx), dw, None


product_that_leaves_nan.defvjp(lambda *operands: (product_that_leaves_nan(*operands), operands), backward)


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def random_ids():
    """Different ones for each token; -1 is padding, E and E + 1 are another device's."""
    rng = np.random.default_rng(1)
    return np.stack([rng.permutation(np.arange(-1, E + 2))[:K] for _ in range(T)])


def chosen_experts(x, gates, experts):
    ids = random_ids()
    return compute.compute_chosen_experts(x, ids, gates, experts, swiglu)


def experts_of_rows(x, gates, experts):
    return compute.compute_rows(x, np.arange(T) % (E + 1), experts, swiglu)


def experts_in_rounds(x, gates, experts):
    ids = random_ids()
    return compute_in_rounds(x, ids, gates, experts, swiglu, rows=16)


@pytest.mark.parametrize("precision", ["none", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("f", [chosen_experts, experts_of_rows, experts_in_rounds])
def test_values_and_gradients_do_not_depend_on_what_products_leave_there(monkeypatch, f, precision):
    x, gates, dy, *matrices = arrays((T, D), (T, K), (T, D), (E, D, F), (E, D, F), (E, F, D))
    experts = Experts(*matrices, Biases(*arrays((E, F), (E, F), (E, D))), precision=precision)

    def value_and_gradients():
        y, transpose = jax.vjp(f, x, gates, experts)
        return y, transpose(dy)

    expected = jax.jit(value_and_gradients)()
    for module in (compute, quantized_matmul):
        monkeypatch.setattr(
            module, "grouped_matmul", lambda x, w, sizes, *_, **__: product_that_leaves_nan(x, w, sizes)
        )
    actual = jax.jit(lambda: value_and_gradients())()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), actual, expected)


def selects(f, *operands):
    """The shapes that a program for TPUs selects between."""
    text = jax.jit(f).trace(*operands).lower(lowering_platforms=("tpu",)).as_text()
    return re.findall(r"stablehlo.select .*, tensor<(?:(.*)x)?\w+>\n", text)


def test_a_tpu_program_has_no_masks_around_a_product():
    def gradients(x, w, sizes, dy):
        return jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)[1](dy)

    assert not selects(gradients, *arrays((T, D), (E, D, F)), jnp.zeros(E, jnp.int32), *arrays((T, F)))


def test_a_tpu_program_of_the_experts_has_no_pass_of_its_own_over_the_sorted_rows():
    x, gates, *matrices = arrays((T, D), (T, K), (E, D, F), (E, D, F), (E, F, D))

    def gradients(x, gates, experts):
        return jax.value_and_grad(lambda *operands: (chosen_experts(*operands) ** 2).sum(), (0, 1, 2))(
            x, gates, experts
        )

    shapes = selects(gradients, x, gates, Experts(*matrices))
    # XLA fuses the others with the activation and with the sum over a token's experts.
    assert f"{T}x{K}x{D}" in shapes and f"{T * K}x{F}" in shapes
    assert f"{T * K}x{D}" not in shapes
