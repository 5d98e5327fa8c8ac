"""The decode cache: what attention keeps per token and layer, and the tokens themselves."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from composer_jax.models.config import ModelConfig
from composer_jax.parallel.mesh import BATCH_AXES
from composer_jax.parallel.sharding import axis_size


class Cache(NamedTuple):
    """latents_LBCX [L,B,C,X] in the compute dtype, X = R+P, or N(K+P+V) with grouped queries (ModelConfig.latent_dim);
    tokens_BC [B,C] int32 (read by the embedding taps).

    Entries beyond a row's context length are stale; the causal mask never shows them, so a row is reused as it is.
    """

    latents_LBCX: jax.Array
    tokens_BC: jax.Array

    @property
    def capacity(self) -> int:
        return self.tokens_BC.shape[1]


def init_cache(config: ModelConfig, batch: int, capacity: int) -> Cache:
    """This device's part: latents are the same on all devices of `tensor`, heads of keys and values are its own."""
    width = config.latent_dim // (1 if config.kv_lora_rank is not None else axis_size("tensor"))
    return Cache(
        jnp.zeros((config.n_layers, batch, capacity, width), config.dtype), jnp.zeros((batch, capacity), jnp.int32)
    )


def cache_spec(config: ModelConfig) -> Cache:
    """How a cache lies on the mesh. With grouped queries the last axis is in an order that only devices know."""
    heads = None if config.kv_lora_rank is not None else "tensor"
    return Cache(PartitionSpec(None, BATCH_AXES, None, heads), PartitionSpec(BATCH_AXES))


def write_index(positions_BS: jax.Array, real_BS: jax.Array, capacity: int) -> jax.Array:
    """Where to write: the position, or out of range (which drops the write) for entries that are not real."""
    return jnp.where(real_BS, positions_BS, capacity)


def write_tokens(cache: Cache, tokens_BS: jax.Array, positions_BS: jax.Array, real_BS: jax.Array) -> Cache:
    rows = jnp.arange(tokens_BS.shape[0])[:, None]
    index = write_index(positions_BS, real_BS, cache.capacity)
    return cache._replace(tokens_BC=cache.tokens_BC.at[rows, index].set(tokens_BS, mode="drop"))


def write_layer(
    latents_LBCX: jax.Array,
    layer: jax.Array,
    new_BSX: jax.Array,
    positions_BS: jax.Array,
    real_BS: jax.Array,
    window: int,
) -> tuple[jax.Array, jax.Array]:
    """Writes one layer's new latents in place; returns the whole cache and that layer's first entries [B,window,X]."""
    rows = jnp.arange(new_BSX.shape[0])[:, None]
    index = write_index(positions_BS, real_BS, latents_LBCX.shape[2])
    latents = latents_LBCX.at[layer, rows, index].set(new_BSX.astype(latents_LBCX.dtype), mode="drop")
    _, b, _, x = latents.shape
    return latents, jax.lax.dynamic_slice(latents, (layer, 0, 0, 0), (1, b, window, x))[0]
