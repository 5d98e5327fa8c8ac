"""The grouped product of CPUs and GPUs against a loop in float64, values and gradients, for every shape of groups."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composer_jax.ops.group_rounds import MOST_IN_ONE_ROUND, rounds
from composer_jax.ops.grouped_matmul import BLOCK, blocked, grouped_matmul
from tests.models.small import relative_error

D, F = 5, 7


def loop(x, w, sizes, dy):
    """y, dx, dw in float64."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros((len(x), w.shape[2])), np.zeros_like(x), np.zeros_like(w)
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
        start += size
    return y, dx, dw


FORMS = pytest.mark.parametrize("form", [blocked, rounds])


@partial(jax.jit, static_argnums=0)
def ours(form, x, w, sizes, dy):
    y, pull = jax.vjp(lambda x, w: form(x, w, sizes), x, w)
    return y, *pull(dy)


@FORMS
@settings(max_examples=25)
@given(
    sizes=st.lists(st.sampled_from([0, 0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3]), min_size=3, max_size=3),
    left_over=st.sampled_from([0, 1, BLOCK]),
    seed=st.integers(0, 2**31),
)
@example(sizes=[0, 0, 0], left_over=1, seed=0)
@example(sizes=[0, 0, 3], left_over=0, seed=0)
def test_it_equals_the_loop_over_groups(form, sizes, left_over, seed):
    total = 8 * BLOCK if sum(sizes) + left_over > 2 * BLOCK else sum(sizes) + left_over  # few shapes to compile
    if total == 0:
        return
    rng = np.random.default_rng(seed)
    x, dy = (rng.standard_normal((total, n)).astype(np.float32) for n in (D, F))
    w = rng.standard_normal((len(sizes), D, F)).astype(np.float32)
    actual = ours(form, x, w, np.array(sizes, np.int32), dy)
    for name, a, b in zip(("y", "dx", "dw"), actual, loop(x, w, sizes, dy), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * max(np.abs(b).max(), 1), name


def test_the_form_for_tpus_gives_the_same():
    """On this platform XLA lowers ragged_dot to other operations; the TPU kernel itself runs on TPUs only."""
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((17, n)).astype(np.float32) for n in (D, F))
    w, sizes = rng.standard_normal((3, D, F)).astype(np.float32), np.array([5, 0, 12], np.int32)
    y, pull = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)
    for a, b in zip((y, *pull(dy)), loop(x, w, sizes, dy), strict=True):
        assert relative_error(a, b) < 1e-5


@FORMS
def test_rows_without_a_group_give_zeros_even_if_they_are_nan(form):
    x = np.full((BLOCK + 3, D), np.nan, np.float32)
    x[:4] = 1
    dy = np.where(np.isnan(x[:, :1]), np.inf, np.ones((len(x), F), np.float32))
    y, dx, dw = ours(form, x, np.ones((2, D, F), np.float32), np.array([1, 3], np.int32), dy)
    np.testing.assert_array_equal(y[4:], 0)
    np.testing.assert_array_equal(y[:4], D)
    np.testing.assert_array_equal(dx[4:], 0)
    np.testing.assert_array_equal(dw[0], 1)
    np.testing.assert_array_equal(dw[1], 3)


@FORMS
def test_bfloat16_is_accumulated_in_float32(form):
    rows = 40 * BLOCK
    x, w = np.ones((rows, 1)), np.ones((1, 1, 1))
    y, dx, dw = ours(
        form, *(jnp.asarray(a, jnp.bfloat16) for a in (x, w)), np.array([rows]), jnp.ones((rows, 1), jnp.bfloat16)
    )
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16,) * 3
    assert float(dw[0, 0, 0]) == rows  # in bfloat16, 256 + 1 is 256


def test_a_cpu_multiplies_block_after_block_a_gpu_a_block_of_every_group_and_a_tpu_runs_ragged_dot():
    shapes = [jax.ShapeDtypeStruct(s, t) for s, t in (((512, D), "float32"), ((3, D, F), "float32"), ((3,), "int32"))]
    traced = jax.jit(grouped_matmul).trace(*shapes)
    cpu, gpu, tpu = (traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda", "tpu"))
    assert "batching_dims" in gpu and "while" in gpu and "ragged_dot" not in gpu
    assert "batching_dims" not in cpu and "while" in cpu and "ragged_dot" not in cpu
    assert "ragged_dot" in tpu and "while" not in tpu


@pytest.mark.parametrize("most", [40, MOST_IN_ONE_ROUND])
def test_a_gpu_takes_one_round_without_a_loop_where_no_group_has_many_rows(most):
    rows, sizes = 3 * MOST_IN_ONE_ROUND, np.array([40, 0, 1, 17], np.int32)
    rng = np.random.default_rng(most)
    x, dy = (rng.standard_normal((rows, n)).astype(np.float32) for n in (D, F))
    w = rng.standard_normal((len(sizes), D, F)).astype(np.float32)
    form = partial(rounds, most_per_group=most)
    for a, b in zip(ours(form, x, w, sizes, dy), loop(x, w, sizes, dy), strict=True):
        assert relative_error(a, b) < 1e-5

    def lowered(most):
        gradients = jax.jit(lambda *operands: jax.vjp(partial(grouped_matmul, most_per_group=most), *operands)[1](dy))
        return gradients.trace(x, w, sizes).lower(lowering_platforms=("cuda",)).as_text()

    assert "stablehlo.while" not in lowered(most)
    assert "stablehlo.while" in lowered(None)


def test_a_group_of_more_rows_than_a_gpu_was_told_gives_nan_instead_of_losing_rows():
    x, w, dy = np.ones((20, D), np.float32), np.ones((2, D, F), np.float32), np.ones((20, F), np.float32)
    form = partial(rounds, most_per_group=9)
    for sizes, is_wrong in ([9, 9], False), ([0, 10], True):
        y, dx, dw = ours(form, x, w, np.array(sizes, np.int32), dy)
        rows = slice(sum(sizes))
        assert [np.isnan(a).any() for a in (y[rows], dx[rows], dw)] == [is_wrong] * 3


@FORMS
@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_a_block(form, rows):
    rng = np.random.default_rng(rows)
    x, dy = (rng.standard_normal((rows, n)).astype(np.float32) for n in (D, F))
    w = rng.standard_normal((2, D, F)).astype(np.float32)
    sizes = np.array([rows - 1, 1], np.int32)
    for a, b in zip(ours(form, x, w, sizes, dy), loop(x, w, sizes, dy), strict=True):
        assert relative_error(a, b) < 1e-5
