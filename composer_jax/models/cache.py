"""The decode cache: what attention keeps per token and layer, and the tokens themselves."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from composer_jax.models.config import ModelConfig
from composer_jax.parallel.mesh import BATCH_AXES
from composer_jax.parallel.sharding import axis_size

LANES = 128
"""Of a TPU's vector registers. It computes on rows of whole registers; of an array that has others it makes a copy in
that form at the beginning of every program, and of the cache that is most of a device's memory."""
TILE = 32
"""Tokens of a row that a TPU keeps together where each number has 8 bits; fewer where they have more."""


class Cache(NamedTuple):
    """What attention keeps of every token of B rows of at most C tokens.

    Entries beyond a row's context length are stale; the causal mask never shows them, so a row is reused as it is.
    """

    latents_LBCX: jax.Array
    """[L,B,C,X], X = R+P, or N(K+P+V) with grouped queries (ModelConfig.latent_dim), and zeros up to a whole number of
    LANES where it is more than them; in the compute dtype or int8."""
    tokens_BC: jax.Array
    """int32; read by the embedding taps."""
    scales_LBCG: jax.Array | None = None
    """float32, what the int8 numbers of each group are multiplied by: MLA's latent and its rotary key, or a head's keys
    and a head's values."""

    @property
    def capacity(self) -> int:
        return self.tokens_BC.shape[1]


class Entries(NamedTuple):
    """What one layer keeps of the first tokens of every row."""

    numbers_BTX: jax.Array
    """In the compute dtype or int8."""
    scales_BTG: jax.Array | None


def init_cache(config: ModelConfig, batch: int, capacity: int) -> Cache:
    """This device's part: latents are the same on all devices of `tensor`, heads of keys and values are its own."""
    shape, groups = (config.n_layers, batch, capacity), group_widths(config)
    width = sum(groups) if sum(groups) < LANES else -(-sum(groups) // LANES) * LANES
    tokens_BC = jnp.zeros((batch, capacity), jnp.int32)
    if config.cache_dtype == "compute":
        return Cache(jnp.zeros((*shape, width), config.dtype), tokens_BC)
    return Cache(jnp.zeros((*shape, width), jnp.int8), tokens_BC, jnp.zeros((*shape, len(groups))))


def group_widths(config: ModelConfig) -> tuple[int, ...]:
    """How the X numbers that this device keeps per token fall into groups of one magnitude."""
    if config.kv_lora_rank is not None:
        return config.kv_lora_rank, config.qk_rope_dim
    heads = config.n_kv_heads // axis_size("tensor")
    return (config.qk_nope_dim + config.qk_rope_dim,) * heads + (config.v_head_dim,) * heads


def cache_spec(config: ModelConfig) -> Cache:
    """How a cache lies on the mesh. With grouped queries the last axis is in an order that only devices know."""
    entries = PartitionSpec(None, BATCH_AXES, None, None if config.kv_lora_rank is not None else "tensor")
    return Cache(entries, PartitionSpec(BATCH_AXES), None if config.cache_dtype == "compute" else entries)


def take_rows(cache: Cache, rows_N: jax.Array, window: int) -> Cache:
    """The first `window` entries of some rows."""
    return _each(lambda array, axis: jnp.take(_first(array, axis, window), rows_N, axis=axis), cache)


def put_rows(cache: Cache, rows_N: jax.Array, part: Cache) -> Cache:
    """Puts entries that take_rows gave back; rows that are none of the cache's are dropped."""
    at = rows_N, slice(part.capacity)
    return _each(lambda array, axis, new: array.at[(slice(None),) * axis + at].set(new, mode="drop"), cache, part)


def write_tokens(cache: Cache, tokens_BS: jax.Array, positions_BS: jax.Array, real_BS: jax.Array) -> Cache:
    rows = jnp.arange(tokens_BS.shape[0])[:, None]
    index = _write_index(positions_BS, real_BS, cache.capacity)
    return cache._replace(tokens_BC=cache.tokens_BC.at[rows, index].set(tokens_BS, mode="drop"))


def write_layer(
    cache: Cache,
    layer: jax.Array,
    new_BSX: jax.Array,
    positions_BS: jax.Array,
    real_BS: jax.Array,
    window: int,
    groups: tuple[int, ...],
) -> tuple[Cache, Entries]:
    """Writes one layer's new latents in place; returns the cache and that layer's first `window` entries."""
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
        cache = cache._replace(latents_LBCX=put(cache.latents_LBCX, new_BSX))
        return cache, Entries(get(cache.latents_LBCX, width), None)
    values, scales = quantize(new_BSX, groups)
    cache = cache._replace(latents_LBCX=put(cache.latents_LBCX, values), scales_LBCG=put(cache.scales_LBCG, scales))
    return cache, Entries(get(cache.latents_LBCX, width), get(cache.scales_LBCG, len(groups)))


def _put_token(array_LBCX: jax.Array, layer: jax.Array, new_BX: jax.Array, index_B: jax.Array) -> jax.Array:
    """Puts one token into each row, row by row; an index beyond the last drops it.

    With the others of its TILE: to scatter 8-bit numbers, or to write fewer of them than a TPU packs together, makes it
    rearrange the whole array twice, for every layer and token.
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
    """int8 [...,X] and float32 scales [...,G]: each group's largest magnitude becomes 127, the rest is rounded."""
    parts = jnp.split(x.astype(jnp.float32), np.cumsum(groups)[:-1], axis=-1)
    scales = [jnp.maximum(jnp.abs(part).max(-1, keepdims=True) / 127, 1e-30) for part in parts]
    values = [jnp.round(part / scale).astype(jnp.int8) for part, scale in zip(parts, scales, strict=True)]
    return jnp.concatenate(values, axis=-1), jnp.concatenate(scales, axis=-1)


def _write_index(positions_BS: jax.Array, real_BS: jax.Array, capacity: int) -> jax.Array:
    """Where to write: the position, or out of range (which drops the write) for entries that are not real."""
    return jnp.where(real_BS, positions_BS, capacity)


def _each(function, *caches: Cache) -> Cache:
    """function(array, axis of its rows, the same array of further caches...) of every array there is."""
    fields = zip((1, 0, 1), *caches, strict=True)
    return Cache(*(None if array is None else function(array, axis, *more) for axis, array, *more in fields))


def _first(array: jax.Array, axis: int, window: int) -> jax.Array:
    return jax.lax.slice_in_dim(array, 0, window, axis=axis + 1)
