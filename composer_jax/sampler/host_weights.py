"""Weights of a version in this host's memory, which replace those of a sampler tensor by tensor."""

import dataclasses
from collections.abc import Collection

import jax
from jax.sharding import Sharding
from jax.typing import DTypeLike

from composer_jax.checkpoint.weight_chain import Shards
from composer_jax.checkpoint.weight_shards import place_weight, weight_name
from composer_jax.models.model_def import Params


@dataclasses.dataclass(frozen=True, eq=False)
class HostTensor:
    """One weight as it was published: a leaf of the trees that Sampler.update_serving takes instead of arrays."""

    name: str
    """Of the weight in the shards of a version, such as params/embed/table."""
    shape: tuple[int, ...]
    parts: Shards
    """Of all weights, those that the devices of this process hold; they must not change before the update has ended."""
    is_changed: bool
    """Whether the sampler may hold other bits in this process."""

    def place(self, dtype: DTypeLike, sharding: Sharding) -> jax.Array:
        """Returns the weight on the devices, cast on the host; every process of the sharding calls it."""
        return place_weight(self.name, self.parts, self.shape, dtype, sharding)


def host_weights(parts: Shards, like: Params, changed: Collection[str] | None) -> Params:
    """Returns a tree of HostTensors.

    Args:
      parts: of this process, as of weight_shards.parts_here(like).
      like: a tree of shapes, whose root names are those of the shards: {"params": ..., "router_bias": ...}.
      changed: names of the weights of which the sampler may hold other bits; None: all of them.
    """

    def tensor(path, leaf) -> HostTensor:
        name = weight_name(path)
        return HostTensor(name, leaf.shape, parts, changed is None or name in changed)

    return jax.tree_util.tree_map_with_path(tensor, like)


def is_on_host(weights: Params) -> bool:
    """Whether the leaves of a tree are HostTensors instead of arrays."""
    return any(isinstance(leaf, HostTensor) for leaf in jax.tree.leaves(weights))
