"""Grouped matrix product on Hopper GPUs, by Pallas kernels for their warpgroup instructions (wgmma) and TMA copies.

    y[t]  = x[t] @ w[g(t)]              dx[t] = dy[t] @ w[g(t)]^T
    dw[e] = sum over the rows t of group e of x[t]^T dy[t]

dw is JAX's kernel (jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu). y and dx are a kernel after JAX's
ragged_dot_mgpu, in which every tile searches its group among all groups in unrolled code: right for a few groups, but
with 384 of them ptxas spills 1.2 KB of registers and a tile's search takes as long as its product. Here XLA computes
the table of tiles first, and rows without a group are written as zeros. Sums are float32, results have the dtype of x.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.local_gpu import local_gpu
from composer_jax.ops.vma import pcast_varying, varying_axes, without_vma_checks

ROWS = 8
"""Divides the rows: a TMA copy of an array in tiles of 8 rows."""
DEPTH = 64
"""Columns of x (rows of it in dw) that one step of a kernel multiplies: 128 bytes, the widest row of a TMA copy."""
STAGES = 3
"""Steps whose operands are on the chip at once. Two blocks of threads, each with a tile of its own, then fit into the
shared memory of a multiprocessor: while one stores its tile, the other multiplies."""
DW_STAGES = 4
"""The same in JAX's kernel, which runs one block of threads per multiprocessor."""
STRIP = 8
"""Tiles of the same rows that run one after the other, so that the L2 cache serves the rows and matrices they share."""


def supports(x_TD: jax.Array, w_EDF: jax.Array) -> bool:
    """Returns whether the kernels take these operands on this process's GPU: bfloat16 or float16, with rows and widths
    that ROWS and DEPTH divide."""
    gpu = local_gpu()
    if gpu is None or gpu.capability != (9, 0) or x_TD.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    return x_TD.shape[0] % ROWS == 0 and all(width % DEPTH == 0 for width in w_EDF.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def hopper(zero_rest: bool, x_TD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Returns the product of every row with the matrix of its group, [T,F] in the dtype of x; arguments are those of
    ops/grouped_matmul.py: grouped_matmul, if `supports` them. Rows without a group give zeros in any case."""
    return _call(_multiply, x_TD, w_EDF, sizes_E)


def _backward(zero_rest, saved, dy_TF):
    x_TD, w_EDF, sizes_E = saved
    dx_TD = _call(functools.partial(_multiply, transposed=True), dy_TF, w_EDF, sizes_E)
    if zero_rest:
        # JAX's kernel multiplies rows of other groups by zero, so that a NaN in a row without a group would reach dw.
        inside = (jnp.arange(x_TD.shape[0]) < sizes_E.sum())[:, None]
        x_TD, dy_TF = jnp.where(inside, x_TD, 0), jnp.where(inside, dy_TF, 0)
    return dx_TD, _call(_outer, x_TD, dy_TF, sizes_E), None


hopper.defvjp(lambda zero_rest, *operands: (hopper(zero_rest, *operands), operands), _backward)


def _call(kernel, *arrays: jax.Array) -> jax.Array:
    """Calls a kernel, which JAX types without VMA, on arrays that vary along the same mesh axes."""
    with without_vma_checks() as plain:
        result = kernel(*map(plain, arrays))
    return pcast_varying(result, varying_axes(arrays[0]))


class Tiles(NamedTuple):
    """The tiles of rows, each with rows of one group; int32 arrays with an entry per tile."""

    groups: jax.Array  # E for rows without a group
    blocks: jax.Array  # the tile lies within rows block * height .. block * height + height
    firsts: jax.Array  # its first row, counted from the first of the block
    counts: jax.Array  # its rows; 0 in the unused entries at the end


def tiles_of_groups(sizes_E: jax.Array, rows: int, height: int) -> Tiles:
    """Returns the tiles of all rows: blocks of `height` rows, cut where a group ends."""
    sizes = jnp.append(sizes_E, rows - sizes_E.sum())
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    first_blocks = starts // height
    tiles = jnp.where(sizes > 0, (ends - 1) // height - first_blocks + 1, 0)
    last_tiles = jnp.cumsum(tiles)
    tile = jnp.arange(-(-rows // height) + len(sizes_E))
    group = jnp.searchsorted(last_tiles, tile, side="right", method="compare_all")
    group = jnp.minimum(group, len(sizes_E)).astype(jnp.int32)
    block = first_blocks[group] + tile - (last_tiles - tiles)[group]
    first, end = (jnp.clip(edge[group] - block * height, 0, height) for edge in (starts, ends))
    return Tiles(group, block, first, end - first)


def tile_height(rows: int, groups: int) -> int:
    """Returns the rows of a tile of y: 128, or 64 where so few rows share a group that larger tiles would be emptier
    than they are faster."""
    return 128 if rows > 64 * groups else 64


def tile_width(width: int) -> int:
    """Returns the columns of a tile, which divide `width`: 128 or 64."""
    return 128 if width % 128 == 0 else 64


@functools.partial(jax.jit, static_argnames="transposed")
def _multiply(x_TD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Returns rows times the matrix of their group or its transpose; zeros in rows without a group."""
    # Imported here: importing Pallas takes a quarter of a second, and only these GPUs need it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (rows, depth), (groups, *matrix) = x_TD.shape, w_EDF.shape
    width = matrix[0 if transposed else 1]
    height, columns = tile_height(rows, groups), tile_width(width)
    tiles = tiles_of_groups(sizes_E, rows, height)
    grid = len(tiles.groups), width // columns

    def body(group_ref, block_ref, first_ref, count_ref, x_ref, w_ref, y_ref):
        tile, column = plgpu.planar_snake(jax.lax.axis_index("tile"), grid, 1, STRIP)
        group, block, first, count = group_ref[tile], block_ref[tile], first_ref[tile], count_ref[tile]

        def multiply(sum_ref):
            @pl.when(group < groups)
            def _():
                plgpu.emit_pipeline(
                    lambda _, x, w: plgpu.wgmma(sum_ref, x, w.transpose((1, 0)) if transposed else w),
                    grid=(depth // DEPTH,),
                    in_specs=[
                        plgpu.BlockSpec((height, DEPTH), lambda step: (block, step), delay_release=1),
                        plgpu.BlockSpec((columns, DEPTH), lambda step: (column, step), delay_release=1)
                        if transposed
                        else plgpu.BlockSpec((DEPTH, columns), lambda step: (step, column), delay_release=1),
                    ],
                    max_concurrent_steps=STAGES,
                )(x_ref, w_ref.at[jnp.minimum(group, groups - 1)])

            return sum_ref[...]

        def store(tile_ref, product):
            tile_ref[...] = product.astype(y_ref.dtype)
            plgpu.commit_smem()
            to = y_ref.at[:, pl.ds(column * columns, columns)]
            _copy_rows(tile_ref, to, first, block * height, count, most=min(height, rows))

        @pl.when(count > 0)
        def _():
            product = pl.run_scoped(multiply, plgpu.ACC((height, columns)))  # pyright: ignore[reportPrivateImportUsage]
            pl.run_scoped(functools.partial(store, product=product), plgpu.SMEM((height, columns), y_ref.dtype))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), x_TD.dtype),
        grid=(grid[0] * grid[1],),
        grid_names=("tile",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return kernel(*tiles, x_TD, w_EDF)


def _copy_rows(tile_ref, y_ref, first: jax.Array, start: jax.Array, count: jax.Array, *, most: int) -> None:
    """Copies the rows first .. first + count of a tile to start + first .. of y; count is at most `most`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # A copy has a static number of rows, so the count is written as a sum of powers of two.
    size = 1 << (most.bit_length() - 1)
    while size:

        @pl.when(count & size != 0)
        def _(first=first, size=size):
            plgpu.copy_smem_to_gmem(tile_ref.at[pl.ds(first, size)], y_ref.at[pl.ds(start + first, size)])

        first, size = first + (count & size), size // 2
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@jax.jit
def _outer(x_TD: jax.Array, dy_TF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Returns x^T dy summed over the rows of each group, [E,D,F]."""
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    return transposed_ragged_dot(
        x_TD,
        dy_TF,
        group_sizes=sizes_E,
        block_m=tile_width(x_TD.shape[1]),
        block_n=tile_width(dy_TF.shape[1]),
        block_k=DEPTH,
        max_concurrent_steps=DW_STAGES,
        grid_block_n=STRIP,
    )
