"""The decode cache: attention's entries of every token and layer, and the tokens themselves."""

import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from composer_jax.models.attention import LayerCache
from composer_jax.models.attention_kinds import attention_kind
from composer_jax.models.config import ModelConfig
from composer_jax.ops.shapes import check_shapes
from composer_jax.parallel.mesh import BATCH_AXES

LANES = 128
"""Lanes of a TPU vector register. An array whose last axis is not a multiple is copied into padded form at the start of
every program; for the cache that copy would take most of the device's memory."""
TILE = 32
"""Consecutive tokens of a row that a TPU packs into one tile of 8-bit numbers; wider numbers have smaller tiles."""

Leaf = TypeVar("Leaf")


class Cache(NamedTuple, Generic[Leaf]):
    """Attention's cache entries of every token in B rows of at most C tokens; a pytree of arrays or of their specs.

    Entries beyond a row's context length are stale. The causal mask hides them, so a row is reused without clearing.
    """

    entries_LBCX: Leaf
    """[L,B,C,X] in the compute dtype or int8. X is the width of the attention kind's entry (MLA: R+P; grouped-query:
    N(K+P+V)), padded with zeros to a multiple of LANES where it is larger than LANES."""
    tokens_BC: Leaf
    """int32, read by the embedding taps."""
    scales_LBCG: Leaf | None = None
    """float32 scales of int8 entries, one per part of an entry (MLA: latent and rotary key; grouped-query: the keys and
    the values of each head). None in the compute dtype."""

    @property
    def capacity(self: "Cache[jax.Array]") -> int:
        return self.tokens_BC.shape[1]

    def check(self: "Cache[jax.Array]") -> None:
        """Asserts that the arrays have the shapes and dtypes of one cache."""
        check_shapes(
            entries_LBCX=(self.entries_LBCX, None),
            tokens_BC=(self.tokens_BC, jnp.int32),
            scales_LBCG=(self.scales_LBCG, jnp.float32),
        )


def init_cache(config: ModelConfig, batch: int, capacity: int) -> Cache[jax.Array]:
    """Returns an empty cache: this device's shard inside the per-device program, the whole outside."""
    groups = attention_kind(config).cache_entry(config).groups
    shape, width = (config.n_layers, batch, capacity), sum(groups)
    if width >= LANES:
        width = -(-width // LANES) * LANES
    tokens_BC = jnp.zeros((batch, capacity), jnp.int32)
    if config.cache_dtype == "compute":
        return Cache(jnp.zeros((*shape, width), config.dtype), tokens_BC)
    return Cache(jnp.zeros((*shape, width), jnp.int8), tokens_BC, jnp.zeros((*shape, len(groups))))


def cache_spec(config: ModelConfig) -> Cache[PartitionSpec]:
    """Returns the PartitionSpecs of a cache.

    Entries that are sharded over `tensor` are concatenated device by device, which is not the order of a single
    device's entry; only the per-device program reads them.
    """
    entries = PartitionSpec(None, BATCH_AXES, None, attention_kind(config).cache_entry(config).mesh_axis)
    return Cache(entries, PartitionSpec(BATCH_AXES), None if config.cache_dtype == "compute" else entries)


def take_rows(cache: Cache[jax.Array], rows_N: jax.Array, window: int) -> Cache[jax.Array]:
    """Returns a cache of the rows `rows_N` with their first `window` entries."""
    check_shapes(rows_N=(rows_N, jnp.integer))
    return _map_arrays(lambda array, axis: jnp.take(_first(array, axis, window), rows_N, axis=axis), cache)


def put_rows(cache: Cache[jax.Array], rows_N: jax.Array, part: Cache[jax.Array]) -> Cache[jax.Array]:
    """Writes a cache that take_rows returned back to the rows `rows_N`; rows out of range are dropped."""
    check_shapes(rows_N=(rows_N, jnp.integer))
    at = rows_N, slice(part.capacity)
    return _map_arrays(lambda array, axis, new: array.at[(slice(None),) * axis + at].set(new, mode="drop"), cache, part)


def write_tokens(
    cache: Cache[jax.Array], tokens_BS: jax.Array, positions_BS: jax.Array, real_BS: jax.Array
) -> Cache[jax.Array]:
    """Writes tokens at their positions; tokens with real_BS false are dropped."""
    check_shapes(tokens_BS=(tokens_BS, jnp.integer), positions_BS=(positions_BS, jnp.integer), real_BS=(real_BS, bool))
    rows = jnp.arange(tokens_BS.shape[0])[:, None]
    index = _write_index(positions_BS, real_BS, cache.capacity)
    return cache._replace(tokens_BC=cache.tokens_BC.at[rows, index].set(tokens_BS, mode="drop"))


def write_layer(
    cache: Cache[jax.Array],
    layer: jax.Array,
    new_BSX: jax.Array,
    positions_BS: jax.Array,
    real_BS: jax.Array,
    window: int,
    groups: tuple[int, ...],
) -> tuple[Cache[jax.Array], LayerCache]:
    """Writes one layer's new entries in place; returns the cache and that layer's first `window` entries.

    Args:
      layer: integer scalar.
      groups: widths of the parts of an entry (models/attention.py: CacheEntry).
    """
    check_shapes(
        layer=(layer, jnp.integer),
        new_BSX=(new_BSX, jnp.floating),
        positions_BS=(positions_BS, jnp.integer),
        real_BS=(real_BS, bool),
    )
    index_BS = _write_index(positions_BS, real_BS, cache.capacity)

    def put(array, new):
        new = jnp.pad(new, ((0, 0), (0, 0), (0, array.shape[-1] - new.shape[-1]))).astype(array.dtype)
        if new.shape[1] == 1:
            return _put_token(array, layer, new[:, 0], index_BS[:, 0])
        return array.at[layer, jnp.arange(len(new))[:, None], index_BS].set(new, mode="drop")

    def get(array, width):
        return jax.lax.dynamic_slice(array, (layer, 0, 0, 0), (1, array.shape[1], window, width))[0]

    width = new_BSX.shape[-1]
    if cache.scales_LBCG is None:
        cache = cache._replace(entries_LBCX=put(cache.entries_LBCX, new_BSX))
        return cache, LayerCache(get(cache.entries_LBCX, width), None)
    values, scales = quantize(new_BSX, groups)
    entries_LBCX, scales_LBCG = put(cache.entries_LBCX, values), put(cache.scales_LBCG, scales)
    cache = cache._replace(entries_LBCX=entries_LBCX, scales_LBCG=scales_LBCG)
    return cache, LayerCache(get(entries_LBCX, width), get(scales_LBCG, len(groups)))


def _put_token(array_LBCX: jax.Array, layer: jax.Array, new_BX: jax.Array, index_B: jax.Array) -> jax.Array:
    """Writes one token into each row, row by row; an index beyond the last is dropped.

    Each write replaces the whole TILE that holds the token: a scatter of 8-bit numbers, or a write smaller than a TPU
    tile, makes the TPU rearrange the whole array twice for every layer and token.
    """
    n_layers, rows, capacity, width = array_LBCX.shape
    size = math.gcd(capacity, TILE)

    def put(row, tiles_LBTPX):
        tile, place = jnp.divmod(jnp.minimum(index_B[row], capacity - 1), size)
        at = (layer, row, tile, 0, 0)
        here = ((jnp.arange(size) == place) & (index_B[row] < capacity))[:, None]
        new = jnp.where(here, new_BX[row], jax.lax.dynamic_slice(tiles_LBTPX, at, (1, 1, 1, size, width)))
        return jax.lax.dynamic_update_slice(tiles_LBTPX, new, at)

    tiles_LBTPX = array_LBCX.reshape(n_layers, rows, capacity // size, size, width)
    return jax.lax.fori_loop(0, rows, put, tiles_LBTPX).reshape(array_LBCX.shape)


def quantize(x: jax.Array, groups: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns int8 [...,X] and float32 scales [...,G], one scale per group of the last axis.

    The largest magnitude of a group becomes 127; the rest is rounded.
    """
    parts = jnp.split(x.astype(jnp.float32), np.cumsum(groups)[:-1].tolist(), axis=-1)
    scales = [jnp.maximum(jnp.abs(part).max(-1, keepdims=True) / 127, 1e-30) for part in parts]
    values = [jnp.round(part / scale).astype(jnp.int8) for part, scale in zip(parts, scales, strict=True)]
    return jnp.concatenate(values, axis=-1), jnp.concatenate(scales, axis=-1)


def _write_index(positions_BS: jax.Array, real_BS: jax.Array, capacity: int) -> jax.Array:
    """Returns the position to write, or an index out of range (which drops the write) where real_BS is false."""
    return jnp.where(real_BS, positions_BS, capacity)


def _map_arrays(function: Callable[..., jax.Array], *caches: Cache[jax.Array]) -> Cache[jax.Array]:
    """Maps function(array, index of its row axis, same array of the other caches...) over the arrays of a cache."""
    entries, tokens, scales = zip(*caches, strict=True)
    return Cache(
        function(entries[0], 1, *entries[1:]),
        function(tokens[0], 0, *tokens[1:]),
        None if scales[0] is None else function(scales[0], 1, *scales[1:]),
    )


def _first(array: jax.Array, axis: int, window: int) -> jax.Array:
    return jax.lax.slice_in_dim(array, 0, window, axis=axis + 1)
