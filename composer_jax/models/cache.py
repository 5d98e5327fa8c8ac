"""The decode cache: what attention keeps per token and layer, and the tokens themselves."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from composer_jax.models.config import ModelConfig
from composer_jax.parallel.mesh import BATCH_AXES
from composer_jax.parallel.sharding import axis_size


class Cache(NamedTuple):
    """What attention keeps of every token of B rows of at most C tokens.

    Entries beyond a row's context length are stale; the causal mask never shows them, so a row is reused as it is.
    """

    latents_LBCX: jax.Array
    """[L,B,C,X], X = R+P, or N(K+P+V) with grouped queries (ModelConfig.latent_dim); in the compute dtype or int8."""
    tokens_BC: jax.Array
    """int32; read by the embedding taps."""
    scales_LBCG: jax.Array | None = None
    """float32, what the int8 numbers of each group are multiplied by: MLA's latent and its rotary key, or a head's keys
    and a head's values."""

    @property
    def capacity(self) -> int:
        return self.tokens_BC.shape[1]


def init_cache(config: ModelConfig, batch: int, capacity: int) -> Cache:
    """This device's part: latents are the same on all devices of `tensor`, heads of keys and values are its own."""
    shape, groups = (config.n_layers, batch, capacity), group_widths(config)
    tokens_BC = jnp.zeros((batch, capacity), jnp.int32)
    if config.cache_dtype == "compute":
        return Cache(jnp.zeros((*shape, sum(groups)), config.dtype), tokens_BC)
    return Cache(jnp.zeros((*shape, sum(groups)), jnp.int8), tokens_BC, jnp.zeros((*shape, len(groups))))


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
) -> tuple[Cache, jax.Array]:
    """Writes one layer's new latents in place; returns the cache and that layer's first entries [B,window,X], in the
    dtype of the new ones."""
    at = (layer, jnp.arange(new_BSX.shape[0])[:, None], _write_index(positions_BS, real_BS, cache.capacity))
    if cache.scales_LBCG is None:
        latents = cache.latents_LBCX.at[at].set(new_BSX.astype(cache.latents_LBCX.dtype), mode="drop")
        return cache._replace(latents_LBCX=latents), _layer(latents, layer, window).astype(new_BSX.dtype)
    values, scales = quantize(new_BSX, groups)
    cache = cache._replace(
        latents_LBCX=cache.latents_LBCX.at[at].set(values, mode="drop"),
        scales_LBCG=cache.scales_LBCG.at[at].set(scales, mode="drop"),
    )
    values, scales = (_layer(array, layer, window) for array in (cache.latents_LBCX, cache.scales_LBCG))
    return cache, dequantize(values, scales, groups, new_BSX.dtype)


def quantize(x: jax.Array, groups: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """int8 [...,X] and float32 scales [...,G]: each group's largest magnitude becomes 127, the rest is rounded."""
    parts = jnp.split(x.astype(jnp.float32), np.cumsum(groups)[:-1], axis=-1)
    scales = [jnp.maximum(jnp.abs(part).max(-1, keepdims=True) / 127, 1e-30) for part in parts]
    values = [jnp.round(part / scale).astype(jnp.int8) for part, scale in zip(parts, scales, strict=True)]
    return jnp.concatenate(values, axis=-1), jnp.concatenate(scales, axis=-1)


def dequantize(values: jax.Array, scales: jax.Array, groups: tuple[int, ...], dtype) -> jax.Array:
    parts = jnp.split(values, np.cumsum(groups)[:-1], axis=-1)
    return jnp.concatenate([part * scales[..., i, None] for i, part in enumerate(parts)], axis=-1).astype(dtype)


def _write_index(positions_BS: jax.Array, real_BS: jax.Array, capacity: int) -> jax.Array:
    """Where to write: the position, or out of range (which drops the write) for entries that are not real."""
    return jnp.where(real_BS, positions_BS, capacity)


def _layer(array: jax.Array, layer: jax.Array, window: int) -> jax.Array:
    _, b, _, x = array.shape
    return jax.lax.dynamic_slice(array, (layer, 0, 0, 0), (1, b, window, x))[0]


def _each(function, *caches: Cache) -> Cache:
    """function(array, axis of its rows, the same array of further caches...) of every array there is."""
    fields = zip((1, 0, 1), *caches, strict=True)
    return Cache(*(None if array is None else function(array, axis, *more) for axis, array, *more in fields))


def _first(array: jax.Array, axis: int, window: int) -> jax.Array:
    return jax.lax.slice_in_dim(array, 0, window, axis=axis + 1)
