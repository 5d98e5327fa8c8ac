"""Grouped products may leave any value in rows without an expert of this device: what they leave goes nowhere."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.ops.activation import swiglu
from composer_jax.ops.grouped_matmul import blocked, grouped_matmul
from composer_jax.parallel.dispatch import Biases, Experts, compute

T, K, E, D, F = 12, 3, 4, 6, 10


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product_that_leaves_nan(zero_rest, x, w, sizes):
    y = blocked(x, w, sizes)
    return y if zero_rest else jnp.where(rest(x, sizes), jnp.nan, y)


def rest(x, sizes):
    return (jnp.arange(len(x)) >= sizes.sum())[:, None]


def backward(zero_rest, saved, dy):
    x, w, sizes = saved
    _, transpose = jax.vjp(blocked, x, w, sizes)
    dx, dw, _ = transpose(dy)
    if not zero_rest:
        dx = jnp.where(rest(x, sizes), jnp.nan, dx)
        # A kernel may multiply rows without a group by zero, which is zero for finite numbers only.
        dw += (jnp.where(rest(x, sizes), x, 0).sum() + jnp.where(rest(x, sizes), dy, 0).sum()) * 0
    return dx, dw, None


product_that_leaves_nan.defvjp(
    lambda zero_rest, *operands: (product_that_leaves_nan(zero_rest, *operands), operands), backward
)


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def chosen_experts(x, gates, experts):
    ids = np.random.default_rng(1).integers(-1, E + 2, (T, K))  # -1 is padding, E and E + 1 are another device's
    return compute.compute_chosen_experts(x, ids, gates, experts, swiglu)


def experts_of_rows(x, gates, experts):
    return compute.compute_rows(x, np.arange(T) % (E + 1), experts, swiglu)


@pytest.mark.parametrize("f", [chosen_experts, experts_of_rows])
def test_values_and_gradients_do_not_depend_on_what_products_leave_there(monkeypatch, f):
    x, gates, dy, *matrices = arrays((T, D), (T, K), (T, D), (E, D, F), (E, D, F), (E, F, D))
    experts = Experts(*matrices, Biases(*arrays((E, F), (E, F), (E, D))))

    def value_and_gradients():
        y, transpose = jax.vjp(f, x, gates, experts)
        return y, transpose(dy)

    expected = jax.jit(value_and_gradients)()
    leave_nan = lambda *operands, zero_rest=True: product_that_leaves_nan(zero_rest, *operands)  # noqa: E731
    monkeypatch.setattr(compute, "grouped_matmul", leave_nan)
    actual = jax.jit(lambda: value_and_gradients())()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), actual, expected)


def selects(f, *operands):
    """The shapes that a program for TPUs selects between."""
    text = jax.jit(f).trace(*operands).lower(lowering_platforms=("tpu",)).as_text()
    return re.findall(r"stablehlo.select .*, tensor<(?:(.*)x)?\w+>\n", text)


@pytest.mark.parametrize("zero_rest, count", [(True, 3), (False, 0)])
def test_a_tpu_program_has_masks_around_a_product_only_where_they_are_asked_for(zero_rest, count):
    def gradients(x, w, sizes, dy):
        return jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, zero_rest=zero_rest), x, w)[1](dy)

    assert len(selects(gradients, *arrays((T, D), (E, D, F)), jnp.zeros(E, jnp.int32), *arrays((T, F)))) == count


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
