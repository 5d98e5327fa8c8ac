"""Grouped matrix product on Hopper GPUs, by Pallas kernels for their warpgroup instructions (wgmma) and TMA copies.

    y[t]  = x[t] @ w[g(t)]              dx[t] = dy[t] @ w[g(t)]^T
    dw[e] = sum over the rows t of group e of x[t]^T dy[t]

The kernels are made after JAX's ragged_dot_mgpu and transposed_ragged_dot_mgpu (0.10.2 and 0.11.2), which do not serve
here. Both refill a buffer without waiting for the multiplication that reads it: they lack the wgmma_wait of JAX's
hopper_matmul_mgpu. In the first, every tile searches its group among all groups in unrolled code, and with 384 groups
ptxas spills 1.2 KB of registers per thread; here XLA computes the table of tiles beforehand. Rows without a group give
zeros, and no NaN in them reaches dw. Sums are float32, results have the dtype of x.
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
STRIP = 8
"""Tiles of the same rows that run one after the other, so that the L2 cache serves the rows and matrices they share."""


def supports(x_TD: jax.Array, w_EDF: jax.Array) -> bool:
    """Returns whether the kernels take these operands on this process's GPU.

    They take bfloat16 and float16, one of them for both, rows that ROWS divides, and widths that DEPTH divides.
    """
    gpu = local_gpu()
    if gpu is None or gpu.capability != (9, 0) or x_TD.dtype != w_EDF.dtype:
        return False
    if x_TD.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    return x_TD.shape[0] % ROWS == 0 and all(width % DEPTH == 0 for width in w_EDF.shape[1:])


@jax.custom_vjp
def hopper(x_TD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Returns each row times the matrix of its group, [T,F] in the dtype of x.

    Arguments are those of ops/grouped_matmul.py: grouped_matmul, of which `supports` takes some.
    """
    return _call(_multiply, x_TD, w_EDF, sizes_E)


def _backward(saved, dy_TF):
    x_TD, w_EDF, sizes_E = saved
    dx_TD = _call(functools.partial(_multiply, transposed=True), dy_TF, w_EDF, sizes_E)
    return dx_TD, _call(_outer, x_TD, dy_TF, sizes_E), None


hopper.defvjp(lambda *operands: (hopper(*operands), operands), _backward)


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

    def grouped_product(group_ref, block_ref, first_ref, count_ref, x_ref, w_ref, y_ref):
        tile, column = plgpu.planar_snake(jax.lax.axis_index("tile"), grid, 1, STRIP)
        group, block, first, count = group_ref[tile], block_ref[tile], first_ref[tile], count_ref[tile]

        def multiply(sum_ref):
            def step(_, x_ref, w_ref):
                plgpu.wgmma(sum_ref, x_ref, w_ref.transpose((1, 0)) if transposed else w_ref)
                plgpu.wgmma_wait(1)  # the step before has ended, and delay_release=1 lets its buffers be refilled

            w_block = (columns, DEPTH), lambda step: (column, step)
            if not transposed:
                w_block = (DEPTH, columns), lambda step: (step, column)
            plgpu.emit_pipeline(
                step,
                grid=(depth // DEPTH,),
                in_specs=[
                    plgpu.BlockSpec((height, DEPTH), lambda step: (block, step), delay_release=1),
                    plgpu.BlockSpec(*w_block, delay_release=1),
                ],
                max_concurrent_steps=STAGES,
            )(x_ref, w_ref.at[group])
            return sum_ref[...]

        def store(tile_ref, product):
            tile_ref[...] = product.astype(y_ref.dtype)
            plgpu.commit_smem()
            to = y_ref.at[:, pl.ds(column * columns, columns)]
            _copy_rows(tile_ref, to, first, block * height, count, most=min(height, rows))

        tile_memory = plgpu.SMEM((height, columns), y_ref.dtype)

        @pl.when((count > 0) & (group < groups))
        def _():
            product = pl.run_scoped(multiply, plgpu.ACC((height, columns)))  # pyright: ignore[reportPrivateImportUsage]
            pl.run_scoped(functools.partial(store, product=product), tile_memory)

        @pl.when((count > 0) & (group == groups))
        def _():
            pl.run_scoped(functools.partial(store, product=jnp.zeros((height, columns), y_ref.dtype)), tile_memory)

    result = jax.ShapeDtypeStruct((rows, width), x_TD.dtype)
    return _kernel(grouped_product, result, grid[0] * grid[1])(*tiles, x_TD, w_EDF)


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
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    shape = d, f = x_TD.shape[1], dy_TF.shape[1]
    lines, columns = map(tile_width, shape)
    grid = d // lines, f // columns
    ends_E = jnp.cumsum(sizes_E)

    def grouped_outer_product(start_ref, end_ref, x_ref, dy_ref, dw_ref):
        tile = jax.lax.axis_index("tile")
        group = tile // (grid[0] * grid[1])
        line, column = plgpu.planar_snake(tile % (grid[0] * grid[1]), grid, 1, STRIP)
        start, end = start_ref[group], end_ref[group]
        block = start // DEPTH

        def multiply(sum_ref):
            def step(index, x_ref, dy_ref):
                row = (block + index[0]) * DEPTH

                @pl.when((row < start) | (row + DEPTH > end))
                def _():
                    for ref in (x_ref, dy_ref):  # both, because the other rows may hold a NaN
                        rows = row + plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=plgpu.Layout.WGMMA)
                        ref[...] = jnp.where((rows >= start) & (rows < end), ref[...], jnp.zeros((), ref.dtype))
                    plgpu.commit_smem()

                plgpu.wgmma(sum_ref, x_ref.transpose((1, 0)), dy_ref)
                plgpu.wgmma_wait(1)

            plgpu.emit_pipeline(
                step,
                grid=(jnp.where(end > start, (end - 1) // DEPTH + 1 - block, 0),),
                in_specs=[
                    plgpu.BlockSpec((DEPTH, lines), lambda step: (block + step, line), delay_release=1),
                    plgpu.BlockSpec((DEPTH, columns), lambda step: (block + step, column), delay_release=1),
                ],
                max_concurrent_steps=STAGES,
            )(x_ref, dy_ref)
            return sum_ref[...]

        def store(tile_ref, product):
            tile_ref[...] = product.astype(dw_ref.dtype)
            plgpu.commit_smem()
            at = pl.ds(line * lines, lines), pl.ds(column * columns, columns)
            plgpu.copy_smem_to_gmem(tile_ref, dw_ref.at[group, *at])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        product = pl.run_scoped(multiply, plgpu.ACC((lines, columns)))  # pyright: ignore[reportPrivateImportUsage]
        pl.run_scoped(functools.partial(store, product=product), plgpu.SMEM((lines, columns), dw_ref.dtype))

    result = jax.ShapeDtypeStruct((len(sizes_E), d, f), x_TD.dtype)
    return _kernel(grouped_outer_product, result, len(sizes_E) * grid[0] * grid[1])(
        ends_E - sizes_E, ends_E, x_TD, dy_TF
    )


def _kernel(body, result: jax.ShapeDtypeStruct, tiles: int):
    """Returns a kernel that runs `body` for every tile in a block of threads; profiles call it by the body's name."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.kernel(
        body,
        out_type=result,
        grid=(tiles,),
        grid_names=("tile",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
