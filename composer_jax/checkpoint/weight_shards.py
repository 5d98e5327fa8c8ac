"""Weights on devices as the named shards of a version (weight_chain.py), and back."""

import concurrent.futures
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.checkpoint.weight_chain import Published, Shard, WeightPublisher
from composer_jax.errors import UserError
from composer_jax.models.model_def import Params


def published_shards(params: Params, router_bias: Params) -> dict[Shard, np.ndarray]:
    """Returns the shards of what a learner publishes: its weights in bfloat16, and the router bias as it is."""
    shards = {}
    for path, array in jax.tree_util.tree_leaves_with_path({"params": params}):
        # JAX keeps the host's copy of an array as long as the array itself. So each rounded array is freed before the
        # next one is made, and bfloat16 weights, which live on, are copied first.
        rounded = jnp.copy(array) if array.dtype == jnp.bfloat16 else array.astype(jnp.bfloat16)
        shards |= _local_shards_of(_name(path), rounded)
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
        shards |= _local_shards_of(_name(path), array)
    return shards


def _local_shards_of(name: str, array: jax.Array) -> dict[Shard, np.ndarray]:
    shards = {}
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            start = tuple(part.indices(size)[0] for part, size in zip(shard.index, array.shape, strict=True))
            shards[Shard(name, start, array.shape)] = np.array(shard.data)
    return shards


def as_tree(arrays: Mapping[str, np.ndarray], like: Params) -> Params:
    """Returns received arrays as a tree.

    Args:
      like: a tree with the shapes, such as ModelDef.shapes(); its dtypes do not matter. Arrays that it lacks are left
        out, such as those of MTP modules that a sampler does not load.

    Raises:
      UserError: the arrays are those of another network.
    """
    named = {_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(like)}
    for name, shape in named.items():
        if name not in arrays or arrays[name].shape != shape:
            other = f"has the shape {arrays[name].shape}, not {shape}" if name in arrays else "is missing"
            raise UserError(f"the weights that were received are those of another network: {name} {other}.")
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[_name(path)], like)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
