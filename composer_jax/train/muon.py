"""Muon: momentum whose matrices are orthogonalised, and AdamW for all other weights.

    M = momentum M + G        O = NS(G + momentum M)        W = W - rate (0.2 sqrt(max(m, n)) O + weight_decay W)

(Jordan et al. 2024; the factor, which gives the update the usual root mean square of AdamW's, is Moonlight's, arXiv
2502.16982, section 2.2.) NS, the Newton-Schulz iteration (`orthogonalize`), applies to the matrix of each layer,
expert and attention head by itself (ModelDef.matrix_axes). The learning rate is the same for both kinds of weights.

On a mesh a device holds shards of many matrices. An all-to-all turns them into whole matrices of fewer, which the
device orthogonalises, and a second one turns them back (Composer 2.5, cursor.com/blog/composer-2-5). Devices that hold
the same shards share the matrices as well. Matrices of equal shape and sharding travel and are computed in one batch.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from composer_jax.models.model_def import ModelDef, Params
from composer_jax.models.parameter import MatrixAxes

UPDATE_RMS = 0.2
"""Root mean square of an update, divided by the learning rate; AdamW's in practice (Moonlight, section 2.2)."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial a x + b x^3 + c x^5 that every step applies to the singular values (Jordan et al. 2024, Muon;
Moonlight, arXiv 2502.16982, section 2.1). They do not converge to 1 but reach 0.7 to 1.2 within few steps."""
CHUNK_ELEMENTS = 2**26
"""Largest number of elements that are computed at a time, which bounds the temporaries of a large stack."""


class MuonState(NamedTuple):
    momentum: Params


class StackSharding(NamedTuple):
    """How a stack of matrices is laid out; stacks with the same one are concatenated."""

    m: int
    n: int
    """Shape of a device's shard of one matrix."""
    in_mesh_axes: tuple[str, ...]
    out_mesh_axes: tuple[str, ...]
    """Mesh axes that shard the two dimensions of a matrix, the first varying slowest."""
    replicated: tuple[str, ...]
    """Mesh axes along which devices hold the same shards."""


def scale_by_muon(momentum: float, definition: ModelDef, mesh: Mesh | None) -> optax.GradientTransformation:
    """Orthogonalised momentum for a tree of matrices, in which optax has masked all other weights.

    Args:
      mesh: that of the weights; None computes all matrices on every device.
    """

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Params, MuonState]:
        moments = jax.tree.map(lambda g, m: g + momentum * m, updates, state.momentum)
        nesterov = jax.tree.map(lambda g, m: g + momentum * m, updates, moments)
        return orthogonalize_tree(nesterov, definition, mesh), MuonState(moments)

    return optax.GradientTransformation(init, update)


def orthogonalize_tree(tree: Params, definition: ModelDef, mesh: Mesh | None) -> Params:
    """Returns 0.2 sqrt(max(m, n)) NS(x) of every matrix of a tree that has nothing but matrices of the network."""
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(tree), strict=True)
    structure, axes_of = jax.tree.structure(tree), definition.matrix_axes()
    axes = [_node(axes_of, path) for path in paths]
    if mesh is None:
        return jax.tree.unflatten(structure, orthogonalize_shards(leaves, axes, [PartitionSpec()] * len(leaves), {}))
    specs_of, _ = definition.specs(mesh)
    specs = tuple(_node(specs_of, path) for path in paths)

    def program(*shards: jax.Array) -> tuple[jax.Array, ...]:
        with jax.named_scope("muon"):
            return tuple(orthogonalize_shards(shards, axes, specs, dict(mesh.shape)))

    sharded = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=specs,
        out_specs=specs,
        # The gather over replicated axes gives every device the same values, which its type does not say.
        check_vma=False,
    )
    return jax.tree.unflatten(structure, sharded(*leaves))


def orthogonalize_shards(
    shards: Sequence[jax.Array],
    axes: Sequence[MatrixAxes],
    specs: Sequence[PartitionSpec],
    mesh_shape: dict[str, int],
) -> list[jax.Array]:
    """Returns 0.2 sqrt(max(m, n)) NS(x) of every matrix, inside the per-device program of a mesh.

    Args:
      shards: this device's part of each weight. axes, specs: of each weight.
      mesh_shape: mesh axis -> size; empty outside any mesh.
    """
    stacks = [_to_stack(x, of) for x, of in zip(shards, axes, strict=True)]
    groups: dict[StackSharding, list[int]] = {}
    for i, (stack, of, spec) in enumerate(zip(stacks, axes, specs, strict=True)):
        sharding = _stack_sharding(stack, shards[i].ndim, of, spec, mesh_shape)
        groups.setdefault(sharding, []).append(i)
    out = list(shards)
    for sharding, members in groups.items():
        joined = jnp.concatenate([stacks[i] for i in members])
        offsets = list(itertools.accumulate(len(stacks[i]) for i in members))[:-1]
        results = jnp.split(_orthogonalize_sharded(joined, sharding, mesh_shape), offsets)
        for i, result in zip(members, results, strict=True):
            out[i] = _from_stack(result, shards[i], axes[i])
    return out


def _orthogonalize_sharded(stack_BMN: jax.Array, sharding: StackSharding, mesh_shape: dict[str, int]) -> jax.Array:
    """Returns scaled NS of a stack of shards, as the same shards."""
    size = lambda names: math.prod(mesh_shape[name] for name in names)  # noqa: E731
    dims = [(2, sharding.out_mesh_axes), (1, sharding.in_mesh_axes)]
    dims = [(dim, names) for dim, names in dims if size(names) > 1]
    x = _pad_to_multiple(stack_BMN, math.prod(size(names) for _, names in dims))
    for dim, names in dims:
        x = jax.lax.all_to_all(x, names, split_axis=0, concat_axis=dim, tiled=True)
    x = UPDATE_RMS * math.sqrt(max(x.shape[1:])) * _orthogonalize_replicated(x, sharding.replicated, mesh_shape)
    for dim, names in reversed(dims):
        x = jax.lax.all_to_all(x, names, split_axis=dim, concat_axis=0, tiled=True)
    return x[: len(stack_BMN)]


def _orthogonalize_replicated(
    stack_BMN: jax.Array, replicated: tuple[str, ...], mesh_shape: dict[str, int]
) -> jax.Array:
    """Returns NS of a stack that is the same along `replicated`, whose devices divide it; each computes a lone one."""
    shared, count = math.prod(mesh_shape[name] for name in replicated), len(stack_BMN)
    if shared == 1 or count == 1:
        return orthogonalize(stack_BMN)
    x = _pad_to_multiple(stack_BMN, shared)
    own = len(x) // shared
    mine = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(replicated) * own, own)
    return jax.lax.all_gather(orthogonalize(mine), replicated, axis=0, tiled=True)[:count]


def orthogonalize(stack_BMN: jax.Array, steps: int = 5) -> jax.Array:
    """Returns U V^T of each matrix U S V^T, approximately, [B,M,N] in the same dtype; a zero matrix stays zero."""
    chex.assert_rank(stack_BMN, 3)
    chex.assert_type(stack_BMN, jnp.floating)
    count, m, n = stack_BMN.shape
    chunk = max(1, CHUNK_ELEMENTS // (m * n))
    if count <= chunk:
        return _iterate(stack_BMN, steps)
    return jax.lax.map(lambda x_MN: _iterate(x_MN[None], steps)[0], stack_BMN, batch_size=chunk)


def _iterate(x: jax.Array, steps: int) -> jax.Array:
    a, b, c = COEFFICIENTS
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:  # the product below has the smaller side squared
        x = jnp.swapaxes(x, 1, 2)
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)
    # Jordan et al. run the iteration in bfloat16, so that a TPU's or GPU's rounding of float32 operands does no harm.
    default = jax.lax.Precision.DEFAULT
    multiply = functools.partial(jnp.matmul, precision=default)
    for _ in range(steps):
        gram = jnp.einsum("bmn,bkn->bmk", x, x, precision=default)
        x = a * x + multiply(b * gram + multiply(c * gram, gram), x)
    return jnp.swapaxes(x, 1, 2) if is_tall else x


def _pad_to_multiple(stack_BMN: jax.Array, size: int) -> jax.Array:
    """Appends zero matrices up to a multiple of `size`."""
    return jnp.pad(stack_BMN, ((0, -len(stack_BMN) % size), (0, 0), (0, 0)))


def _stack_sharding(
    stack: jax.Array, ndim: int, axes: MatrixAxes, spec: PartitionSpec, mesh_shape: dict[str, int]
) -> StackSharding:
    by_dim = [_names(entry) for entry in (*spec, *[None] * (ndim - len(spec)))]
    used = {name for names in by_dim for name in names}
    replicated = tuple(name for name, size in mesh_shape.items() if size > 1 and name not in used)
    _, m, n = stack.shape
    return StackSharding(m, n, by_dim[axes.in_axis], by_dim[axes.out_axis], replicated)


def _names(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of a dimension of a PartitionSpec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _to_stack(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    """Returns the matrices of a weight, [B,M,N]."""
    moved = jnp.moveaxis(x, (axes.in_axis, axes.out_axis), (-2, -1))
    return moved.reshape(-1, *moved.shape[-2:])


def _from_stack(stack: jax.Array, like: jax.Array, axes: MatrixAxes) -> jax.Array:
    moved = jnp.moveaxis(like, (axes.in_axis, axes.out_axis), (-2, -1))
    return jnp.moveaxis(stack.reshape(moved.shape), (-2, -1), (axes.in_axis, axes.out_axis))


def _node(tree: Any, path: Sequence[Any]) -> Any:
    """Returns the node of a nested dict that a key path leads to."""
    for key in path:
        tree = tree[key.key]
    return tree
