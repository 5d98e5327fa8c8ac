"""The grouped product of Hopper GPUs: JAX's interpreter runs the kernels here, and JAX lowers them for CUDA."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from composer_jax.ops import hopper_grouped_matmul
from composer_jax.ops.group_rounds import rounds
from composer_jax.ops.grouped_matmul import grouped_matmul
from composer_jax.ops.hopper_grouped_matmul import hopper, supports, tile_height, tiles_of_groups
from composer_jax.ops.local_gpu import LocalGpu
from tests.ops.hopper_interpreter import interpret_kernels, pretend_h100

T, D, F, E = 200, 320, 128, 4  # five steps of the kernel, which has buffers for three


def arrays(dtype, *shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def value_and_gradients(form):
    def f(x, w, sizes, dy):
        y, transpose = jax.vjp(lambda x, w: form(x, w, sizes), x, w)
        return y, *transpose(dy)

    return jax.jit(f)


def test_values_and_gradients_are_those_of_rounds(monkeypatch):
    pretend_h100(monkeypatch)
    x, w, dy = arrays(jnp.bfloat16, (T, D), (E, D, F), (T, F))
    ours, oracle = value_and_gradients(hopper), value_and_gradients(rounds)
    cases = (
        [30, 0, 37, 20],  # tiles with rows of several groups, an empty group, rows without a group
        [0, 0, 190, 0],  # nearly all rows in one group
        [70, 130, 0, 0],  # a last tile that ends beyond the rows
        [64, 64, 64, 8],  # groups that end where tiles do
    )
    with interpret_kernels(monkeypatch):
        for sizes in cases:
            rest = np.arange(T)[:, None] >= sum(sizes)
            operands = jnp.where(rest, jnp.nan, x), w, np.array(sizes, np.int32), jnp.where(rest, jnp.nan, dy)
            for name, a, b in zip(("y", "dx", "dw"), ours(*operands), oracle(*operands), strict=True):
                # Both sum in float32 and round once, in another order.
                np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (a, b)), 2**-7, 2**-7, err_msg=name)


@pytest.mark.parametrize("height", [4, 64])
def test_tiles_cover_every_row_once_and_hold_rows_of_one_group(height):
    rows, tiles_of = 14, jax.jit(tiles_of_groups, static_argnums=(1, 2))
    for sizes in [3, 0, 5, 4], [0, 0, 0, 0], [0, 14, 0, 0], [4, 4, 4, 2], [1, 1, 1, 1]:
        tiles = np.array(tiles_of(jnp.array(sizes, jnp.int32), rows, height))
        assert tiles.shape[1] == -(-rows // height) + len(sizes)
        covered = np.full(rows, -1)
        for group, block, first, count in tiles.T:
            assert 0 <= first and first + count <= height
            at = slice(block * height + first, block * height + first + count)
            assert (covered[at] == -1).all()
            covered[at] = group
        np.testing.assert_array_equal(covered, np.repeat(np.arange(5), [*sizes, rows - sum(sizes)]))


SHAPES = (512, 128), (E, 128, 192)  # more rows than the form of all GPUs takes in one round


@pytest.mark.parametrize(
    "gpu, dtype, shapes, supported",
    [
        ((9, 0), "bfloat16", SHAPES, True),
        ((9, 0), "float16", SHAPES, True),
        ((9, 0), "float32", SHAPES, False),
        ((9, 0), "bfloat16", ((516, 128), SHAPES[1]), False),
        ((9, 0), "bfloat16", ((512, 128), (E, 128, 96)), False),
        ((9, 0), "bfloat16", ((512, 96), (E, 96, 128)), False),
        ((8, 0), "bfloat16", SHAPES, False),
        ((10, 0), "bfloat16", SHAPES, False),
        (None, "bfloat16", SHAPES, False),
    ],
)
def test_other_gpus_dtypes_and_widths_take_the_form_of_all_gpus(monkeypatch, gpu, dtype, shapes, supported):
    pretend_h100(monkeypatch)
    gpu = gpu and LocalGpu("", gpu, None)
    monkeypatch.setattr(hopper_grouped_matmul, "local_gpu", lambda: gpu)
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    assert supports(x, w) == supported
    sizes = jax.ShapeDtypeStruct((E,), jnp.int32)
    assert kernels_and_loops(lambda *operands: grouped_matmul(*operands), x, w, sizes) == (
        (1, 0) if supported else (0, 1)
    )


def kernels_and_loops(f, *operands):
    text = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall(r"custom_call @mosaic_gpu", text)), text.count("stablehlo.while")


def test_y_and_both_gradients_are_kernels_on_an_h100(monkeypatch):
    pretend_h100(monkeypatch)
    rows, d, f, groups = 32768, 2048, 768, 128  # of Qwen3-30B-A3B
    x, w, dy = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, d), (groups, d, f), (rows, f)))
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    assert kernels_and_loops(value_and_gradients(grouped_matmul), x, w, sizes, dy) == (3, 0)


def test_the_few_rows_of_decoding_are_a_kernel_too(monkeypatch):
    """No loop either, and matrices of experts without rows are not read, which the form of all GPUs does."""
    pretend_h100(monkeypatch)
    conversations, k, d, f, groups = 64, 8, 2048, 768, 128  # of Qwen3-30B-A3B
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((conversations * k, d), (groups, d, f)))
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    form = functools.partial(grouped_matmul, most_per_group=conversations)
    assert kernels_and_loops(form, x, w, sizes) == (1, 0)


def test_every_kernel_waits_for_a_multiplication_before_its_operands_are_replaced():
    """The interpreter multiplies at once, so only the program shows it."""
    x, w, dy = arrays(jnp.bfloat16, (256, D), (E, D, F), (256, F))
    program = str(jax.make_jaxpr(value_and_gradients(hopper))(x, w, jnp.zeros(E, jnp.int32), dy))
    assert program.count("wgmma_wait") == program.count("wgmma_ref") == 3


def test_shard_map_types_the_results_and_sums_the_gradient_of_replicated_matrices(monkeypatch):
    pretend_h100(monkeypatch)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:2])
    rows, replicated = P("data"), P()
    step = jax.shard_map(
        value_and_gradients(grouped_matmul),
        mesh=mesh,
        in_specs=(rows, replicated, rows, rows),
        out_specs=(rows, rows, replicated),
    )
    x, w, dy = arrays(jnp.bfloat16, (256, D), (E, D, F), (256, F))
    assert kernels_and_loops(step, x, w, jnp.zeros(2 * E, jnp.int32), dy) == (3, 0)


def test_few_rows_a_group_take_low_tiles():
    assert (tile_height(32768, 128), tile_height(8192, 128)) == (128, 64)
