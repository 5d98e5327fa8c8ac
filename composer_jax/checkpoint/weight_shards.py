"""Weights on devices as the named shards of a version (weight_chain.py), and back."""

import concurrent.futures
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from composer_jax.checkpoint.weight_chain import Parts, Published, Shard, Shards, WeightPublisher, other_network
from composer_jax.models.model_def import Params


def published_shards(params: Params, router_bias: Params) -> dict[Shard, np.ndarray]:
    """Returns the shards of what a learner publishes: its weights in bfloat16, and the router bias as it is."""
    shards = {}
    for path, array in jax.tree_util.tree_leaves_with_path({"params": params}):
        # JAX keeps the host's copy of an array as long as the array itself. So each rounded array is freed before the
        # next one is made, and bfloat16 weights, which live on, are copied first.
        rounded = jnp.copy(array) if array.dtype == jnp.bfloat16 else array.astype(jnp.bfloat16)
        shards |= _local_shards_of(weight_name(path), rounded)
        del rounded
    return shards | local_shards({"router_bias": router_bias})


class BackgroundPublisher:
    """Publishes versions in a thread, one after another, from copies in host memory.

    A copy takes 2 bytes per weight that this process holds. Two of them exist, because a patch needs the version
    before: a version that is not written when the next one comes makes `publish` wait.
    """

    def __init__(self, publisher: WeightPublisher) -> None:
        """publisher: its barrier is called in the thread."""
        self._publisher = publisher
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "publish")
        self._writing: concurrent.futures.Future[Published] | None = None

    def publish(self, params: Params, router_bias: Params, version: int) -> None:
        """Copies a version to host memory and begins to write it; the arrays can be donated when it returns.

        Raises what WeightPublisher.publish raised for the version before.
        """
        self.wait()
        shards = published_shards(params, router_bias)
        self._writing = self._pool.submit(self._publisher.publish, shards, version)

    def wait(self) -> None:
        """Returns when the last version is written. Raises what WeightPublisher.publish raises."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self.wait()


def local_shards(weights: Params) -> dict[Shard, np.ndarray]:
    """Returns the shards of a tree of arrays that this process holds; of equal shards, one process has one."""
    shards = {}
    for path, array in jax.tree_util.tree_leaves_with_path(weights):
        shards |= _local_shards_of(weight_name(path), array)
    return shards


def _local_shards_of(name: str, array: jax.Array) -> dict[Shard, np.ndarray]:
    shards = {}
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            shards[_indexed(name, shard.index, array.shape)[0]] = np.array(shard.data)
    return shards


def as_tree(arrays: Mapping[str, np.ndarray], like: Params) -> Params:
    """Returns received arrays as a tree.

    Args:
      like: a tree with the shapes, such as ModelDef.shapes(); its dtypes do not matter. Arrays that it lacks are left
        out, such as those of MTP modules that a sampler does not load.

    Raises:
      UserError: the arrays are those of another network.
    """
    named = {weight_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(like)}
    for name, shape in named.items():
        if name not in arrays or arrays[name].shape != shape:
            raise other_network(name, arrays[name].shape if name in arrays else None, shape)
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[weight_name(path)], like)


def parts_here(weights: Params) -> Parts:
    """Returns the parts of a tree of weights that the devices of this process hold; equal ones once.

    weights: their shapes, with shardings (ModelDef.abstract_weights) or without; the latter lie whole on one device.
    """
    parts = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        for index in _indices(leaf.shape, leaf.sharding).values():
            shard, shape = _indexed(weight_name(path), index, leaf.shape)
            parts[shard] = shape
    return parts


def placed_tree(parts: Shards, like: Params) -> Params:
    """Returns a tree of weights on the devices, from the parts of this process (parts_here of the same tree)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: place_weight(weight_name(path), parts, leaf.shape, leaf.dtype, leaf.sharding), like
    )


def place_weight(
    name: str, parts: Shards, shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding | None
) -> jax.Array:
    """Returns one weight on the devices, in a dtype, from the parts of this process.

    The devices get copies, so that parts can change afterwards. Every process of the sharding must call it.
    """
    on_devices = []
    for device, index in _indices(shape, sharding).items():
        part = parts[_indexed(name, index, shape)[0]]
        on_devices.append(jax.device_put(part.astype(dtype), device))  # a copy: CPU devices may share what they get
    return on_devices[0] if sharding is None else jax.make_array_from_single_device_arrays(shape, sharding, on_devices)


def _indices(shape: tuple[int, ...], sharding: Sharding | None) -> Mapping[Any, Any]:
    """Returns the places in an array that the devices of this process hold, by device; None is the default device."""
    if sharding is None:
        return {None: (slice(None),) * len(shape)}
    return sharding.addressable_devices_indices_map(shape)


def _indexed(name: str, index: Any, shape: tuple[int, ...]) -> tuple[Shard, tuple[int, ...]]:
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return Shard(name, tuple(low for low, _ in bounds), shape), tuple(high - low for low, high in bounds)


def weight_name(path: Any) -> str:
    """Returns the name of a weight in the shards of a version, from its path in a tree (jax.tree_util)."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
