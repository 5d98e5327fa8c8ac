"""Checksums of weights: sums of bits by which a learner and a sampler tell that they hold the same weights.

Of three tensors, after the sampler's cast, the bit patterns are added modulo 2**32, once as they are and once with a
weight that depends on the place. Such sums are exact in any order, so they depend neither on sharding nor on the mesh,
and one that differs says that the tensors differ. The second sum also sees layers or columns that changed places.

A checksum reads its tensors once: the sum of their bytes over the devices that share them, over the memory bandwidth.
The three tensors of Kimi K2.5 in bfloat16 have 685 GB, 0.67 GB on each of 1,024 chips, and the learner's cast of them
takes as much memory while it is read. Some dozens of bytes are sent.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.ops.quantization import QuantizedArray
from composer_jax.sampler.rollout_weights import convert_weight

N_WEIGHTS = 3
ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
"""What an index counts in the second sum, by its dimension. Odd: no power of two in a shape takes digits away."""


@dataclasses.dataclass(frozen=True)
class WeightChecksum:
    """The checksum of one weight."""

    name: str
    """Its path in Params, such as moe_layers/attention/out."""
    dtype: str
    shape: tuple[int, ...]
    checksum: str
    """Hexadecimal: 16 digits, or 32 for 8-bit numbers with scales."""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} with the checksum {self.checksum}"


WeightChecksums = tuple[WeightChecksum, ...]
"""Of the weights that `checked_weights` names."""


class WeightMismatch(UserError):
    """A sampler holds, or would hold, other weights than the learner's."""


def checked_weights(definition: ModelDef) -> tuple[str, ...]:
    """Returns the names of the three weights whose checksums are compared, from the network's shapes alone.

    They are the largest weights of the three largest parts of the trunk. In a large network these are a stack of expert
    or feed-forward blocks, its attention, and the embedding table; a stack holds all of its layers in one array.
    """
    largest: dict[str, tuple[int, str]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(ModelDef(definition.config).shapes()[0]):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        first, *rest = name.split("/")
        if first != "mtp":  # which a sampler may lack
            part = "/".join([first, *rest[:1]])
            largest[part] = min(largest.get(part, (0, "")), (-leaf.size, name))
    return tuple(sorted(name for _, name in sorted(largest.values())[:N_WEIGHTS]))


class ChecksumProgram:
    """Makes the checksums of the weights of a sampler, and of those of a learner after the sampler's cast.

    Each of the two compiles one program for each layout of the weights. Every process of a mesh must call them.
    """

    def __init__(self, definition: ModelDef) -> None:
        """definition: of the sampler's weights (rollout_model_def)."""
        shapes = definition.shapes()[0]
        self._abstract = {name: _at(shapes, name) for name in checked_weights(definition)}
        self._cast = jax.jit(
            lambda weights: {name: convert_weight(self._abstract[name], weights[name]) for name in weights}
        )

    def of_learner(self, params: Params) -> WeightChecksums:
        """Returns the checksums that a sampler has which holds these weights of a learner.

        Raises ValueError if the weights are not those of this network.
        """
        return checksums(self._cast(self._select(params)))

    def of_sampler(self, params: Params) -> WeightChecksums:
        """Returns the checksums of a sampler's own weights."""
        return checksums(self._select(params))

    def _select(self, params: Params) -> dict[str, Any]:
        try:
            return {name: _at(params, name) for name in self._abstract}
        except (KeyError, TypeError) as error:
            raise ValueError(f"the weights are not those of this network: they lack {error}") from error


def _at(params: Params, name: str) -> Any:
    return functools.reduce(lambda node, key: node[key], name.split("/"), params)


def checksums(weights: Mapping[str, jax.Array | QuantizedArray[jax.Array]]) -> WeightChecksums:
    """Returns the checksums of named weights, which lie on one mesh, or on one device.

    Raises UserError if devices that should hold the same part of a weight hold different ones.
    """
    by_name = {name: jax.tree.leaves(weight) for name, weight in weights.items()}
    arrays = [array for leaves in by_name.values() for array in leaves]
    mesh, specs = None, tuple(PartitionSpec() for _ in arrays)
    if isinstance(sharding := arrays[0].sharding, NamedSharding):
        mesh, specs = sharding.mesh, tuple(array.sharding.spec for array in arrays)
    least, most = np.asarray(_sum_bits(tuple(arrays), mesh, specs))
    sums = iter(zip(least.tolist(), most.tolist(), strict=True))
    out = []
    for name, leaves in by_name.items():
        digits = ""
        for low, high in (next(sums) for _ in leaves):
            if low != high:
                raise UserError(
                    f"{name} has different bits on devices that should hold the same ones (checksums "
                    f"{_digits(low)} to {_digits(high)}); start the command again, and check these hosts if it recurs."
                )
            digits += _digits(low)
        out.append(WeightChecksum(name, leaves[0].dtype.name, tuple(leaves[0].shape), digits))
    return tuple(out)


def sums_of_part(part: np.ndarray, start: Sequence[int]) -> tuple[int, int]:
    """Returns the share of a part of a weight in both sums of the weight, computed on the host.

    The part is read twice: the second sum follows from sums along each dimension.

    start: the part's first element in the weight.
    """
    bits, second = part.view(f"uint{8 * part.dtype.itemsize}"), 0
    for dim in reversed(range(part.ndim)):
        along = bits.reshape(-1, part.shape[dim]).sum(axis=0, dtype=np.uint32)
        index = np.arange(start[dim], start[dim] + part.shape[dim]).astype(np.uint32)
        second += int((along * index * np.uint32(ODD[dim % len(ODD)])).sum(dtype=np.uint32))
        bits = bits.sum(axis=-1, dtype=np.uint32)
    return int(bits), (int(bits) + second) % 2**32


def checksum_of_sums(
    name: str, weight: jax.ShapeDtypeStruct, sums_of_parts: Iterable[tuple[int, int]]
) -> WeightChecksum:
    """Returns the checksum of a weight, in the dtype of `weight`, from `sums_of_part` of parts that make it up."""
    sums = [sum(column) % 2**32 for column in zip(*sums_of_parts, strict=True)]
    return WeightChecksum(name, weight.dtype.name, tuple(weight.shape), _digits(sums))


def _digits(sums: Sequence[int]) -> str:
    return "".join(f"{number:08x}" for number in sums)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _sum_bits(arrays: tuple[jax.Array, ...], mesh: Mesh | None, specs: tuple[PartitionSpec, ...]) -> jax.Array:
    """Returns the two sums of each array as the smallest and the largest of all devices, uint32 [2,arrays,2]."""
    if mesh is None:
        sums = jnp.stack([_sums_of_shard(array, [()] * array.ndim) for array in arrays])
        return jnp.stack([sums, sums])

    def on_device(*shards: jax.Array) -> jax.Array:
        sums = []
        for shard, spec in zip(shards, specs, strict=True):
            axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
            axes += [()] * (shard.ndim - len(axes))
            sharded_axes = tuple(axis for of_dim in axes for axis in of_dim)
            of_shard = _sums_of_shard(shard, axes)
            sums.append(jax.lax.psum(of_shard, sharded_axes) if sharded_axes else of_shard)
        of_device = jnp.stack(sums)
        return jnp.stack([jax.lax.pmin(of_device, mesh.axis_names), jax.lax.pmax(of_device, mesh.axis_names)])

    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(*arrays)


def _sums_of_shard(shard: jax.Array, axes: Sequence[tuple[str, ...]]) -> jax.Array:
    """Returns the part of a shard in both sums of its array, uint32 [2]. axes: mesh axes of each dimension."""
    bits = jax.lax.bitcast_convert_type(shard, f"uint{8 * shard.dtype.itemsize}").astype(jnp.uint32)
    weight = jnp.ones(shard.shape, jnp.uint32)
    for dim, of_dim in enumerate(axes):
        index = jax.lax.broadcasted_iota(jnp.uint32, shard.shape, dim)
        if of_dim:
            index += jax.lax.axis_index(of_dim).astype(jnp.uint32) * np.uint32(shard.shape[dim])
        weight += index * np.uint32(ODD[dim % len(ODD)])
    return jnp.stack([bits.sum(dtype=jnp.uint32), (bits * weight).sum(dtype=jnp.uint32)])


def require_equal(
    sampler: WeightChecksums, learner: WeightChecksums, version: int, before: tuple[int, WeightChecksums] | None
) -> None:
    """Raises a WeightMismatch unless a sampler holds the weights of a learner.

    Args:
      sampler: of what it holds after the update.
      learner: what it should hold, as `version`.
      before: version and checksums of what it held before the update.
    """
    theirs, ours = ({one.name: one for one in side} for side in (learner, sampler))
    if theirs.keys() != ours.keys():
        raise WeightMismatch(
            f"the weights of version {version} come with checksums of {', '.join(theirs)}, and this sampler compares "
            f"{', '.join(ours)}; make them for the network that it serves."
        )
    wrong = [name for name in ours if ours[name] != theirs[name]]
    if not wrong:
        return
    name = wrong[0]
    mine, expected = ours[name], theirs[name]
    sentence = (
        f"weights of version {version} did not arrive in the sampler: {name} is {mine}, the learner's is {expected}"
    )
    if (mine.dtype, mine.shape) != (expected.dtype, expected.shape):
        raise WeightMismatch(f"{sentence}; give both sides the same sampler.param_dtype (of a server: --dtype).")
    if before is not None and sampler == before[1]:
        sentence += f"; it has the bits of version {before[0]}, which it held before"
    raise WeightMismatch(
        f"{sentence}; {len(wrong)} of {len(ours)} compared weights differ. Start the command again, which installs the "
        "latest checkpoint anew; if it recurs, try a sampler without sampler.mesh and sampler.param_dtype."
    )
