"""The decode cache: attention's entries of every token and layer, and the tokens themselves, in pages.

A page holds the entries of T consecutive tokens of one context, in all layers. A table lists the pages of each row's
context, so contexts of any length share one cache, and contexts with a common prefix share its pages.
"""

import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.models.attention_kinds import attention_kind
from composer_jax.models.config import ModelConfig
from composer_jax.ops.cached_attention import LayerCache
from composer_jax.ops.shapes import check_shapes
from composer_jax.parallel.mesh import BATCH_AXES

LANES = 128
"""Lanes of a TPU vector register. An array whose last axis is not a multiple is copied into padded form at the start of
every program; for the cache that copy would take most of the device's memory."""
TILE = 32
"""Consecutive tokens of a page that a TPU packs into one tile of 8-bit numbers; wider numbers have smaller tiles."""

Leaf = TypeVar("Leaf")


class Cache(NamedTuple, Generic[Leaf]):
    """Attention's cache entries in Z pages of T tokens; a pytree of arrays or of their specs.

    Entries beyond a context's length are stale. The causal mask hides them, so a page is reused without clearing.
    """

    entries_LZTX: Leaf
    """[L,Z,T,X] in the compute dtype or int8. X is the width of the attention kind's entry (MLA: R+P; grouped-query:
    N(K+P+V)), padded with zeros to a multiple of LANES where it is larger than LANES. With config.cache_mtp, the first
    MTP module is one more layer, the last."""
    tokens_ZT: Leaf
    """int32, read by the embedding taps."""
    scales_LZTG: Leaf | None = None
    """float32 scales of int8 entries, one per part of an entry (MLA: latent and rotary key; grouped-query: the keys and
    the values of each head). None in the compute dtype."""
    routing_ZTC: Leaf | None = None
    """int16: the C choices of each token, k experts (best first) of each expert layer; C is padded as X is. None
    without config.cache_routing."""

    @property
    def page_size(self: "Cache[jax.Array]") -> int:
        """T."""
        return self.tokens_ZT.shape[1]

    def check(self: "Cache[jax.Array]") -> None:
        """Asserts that the arrays have the shapes and dtypes of one cache."""
        check_shapes(
            entries_LZTX=(self.entries_LZTX, None),
            tokens_ZT=(self.tokens_ZT, jnp.int32),
            scales_LZTG=(self.scales_LZTG, jnp.float32),
            routing_ZTC=(self.routing_ZTC, jnp.int16),
        )


def cache_window(config: ModelConfig) -> int | None:
    """Returns how many tokens of a context decoding reads for a new token, itself included; None: all of them.

    A page holds the entries of all layers, so older pages are needed while any layer attends to the whole context (in
    gpt-oss every other layer does). Where all layers have the sliding window, decoding reads the window, and the tokens
    of the embedding taps. The choices of experts are read for the whole context, and the MTP module has no window.
    """
    if config.sliding_window is None or config.cache_routing or config.cache_mtp:
        return None
    if not all(config.has_window(layer) for layer in range(config.n_layers)):
        return None
    return max(config.sliding_window, config.embedding_taps + 1)


class CachePlaces(NamedTuple):
    """Where the tokens of a call lie in the cache."""

    page_BS: jax.Array
    """int32; for tokens that are not written, pages that do not exist, each another one: no two places are equal."""
    offset_BS: jax.Array
    """int32: place in the page."""


def init_cache(config: ModelConfig, n_pages: int, page_size: int) -> Cache[jax.Array]:
    """Returns an empty cache: this device's shard inside the per-device program, the whole outside."""
    groups = attention_kind(config).cache_entry(config).groups
    shape, width = (config.n_layers + config.cache_mtp, n_pages, page_size), _padded(sum(groups))
    tokens_ZT, routing_ZTC = jnp.zeros((n_pages, page_size), jnp.int32), None
    if config.cache_routing:
        n_choices = config.n_moe_layers * config.experts_per_token
        routing_ZTC = jnp.zeros((n_pages, page_size, _padded(n_choices)), jnp.int16)
    if config.cache_dtype == "compute":
        return Cache(jnp.zeros((*shape, width), config.dtype), tokens_ZT, routing_ZTC=routing_ZTC)
    return Cache(jnp.zeros((*shape, width), jnp.int8), tokens_ZT, jnp.zeros((*shape, len(groups))), routing_ZTC)


def _padded(width: int) -> int:
    return width if width < LANES else -(-width // LANES) * LANES


def cache_spec(config: ModelConfig) -> Cache[PartitionSpec]:
    """Returns the PartitionSpecs of a cache: each device of the batch axes has pages of its own.

    Entries that are sharded over `tensor` are concatenated device by device, which is not the order of a single
    device's entry; only the per-device program reads them.
    """
    entries = PartitionSpec(None, BATCH_AXES, None, attention_kind(config).cache_entry(config).mesh_axis)
    pages = PartitionSpec(BATCH_AXES)
    scales = None if config.cache_dtype == "compute" else entries
    return Cache(entries, pages, scales, pages if config.cache_routing else None)


def new_cache(config: ModelConfig, mesh: Mesh, n_pages: int, page_size: int) -> Callable[[], Cache[jax.Array]]:
    """Returns the function that makes the shards of an empty cache on every device; n_pages are those of one."""
    make = lambda: init_cache(config, n_pages, page_size)  # noqa: E731
    return jax.shard_map(make, mesh=mesh, in_specs=(), out_specs=cache_spec(config), check_vma=False)


def abstract_cache(config: ModelConfig, mesh: Mesh, n_pages: int, page_size: int) -> Cache[jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and shardings of what `new_cache` makes."""
    return jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
        jax.eval_shape(new_cache(config, mesh, n_pages, page_size)),
        cache_spec(config),
    )


def find_places(
    cache: Cache[jax.Array], tables_BJ: jax.Array, positions_BS: jax.Array, real_BS: jax.Array
) -> CachePlaces:
    """Returns where tokens at these positions of their contexts lie; with real_BS false they are not written.

    tables_BJ: int32, the pages of each row's context.
    """
    check_shapes(tables_BJ=(tables_BJ, jnp.integer), positions_BS=(positions_BS, jnp.integer), real_BS=(real_BS, bool))
    number_BS, offset_BS = jnp.divmod(positions_BS, cache.page_size)
    page_BS = jnp.take_along_axis(tables_BJ, number_BS, axis=1, mode="clip")
    beyond_BS = len(cache.tokens_ZT) + jnp.arange(real_BS.size, dtype=page_BS.dtype).reshape(real_BS.shape)
    return CachePlaces(jnp.where(real_BS, page_BS, beyond_BS), offset_BS)


def write_tokens(cache: Cache[jax.Array], tokens_BS: jax.Array, places: CachePlaces) -> Cache[jax.Array]:
    """Writes tokens at their places."""
    check_shapes(tokens_BS=(tokens_BS, jnp.integer), page_BS=(places.page_BS, jnp.integer))
    at = cache.tokens_ZT.at[places.page_BS, places.offset_BS]
    return cache._replace(tokens_ZT=at.set(tokens_BS, mode="drop", unique_indices=True))


def read_tokens(cache: Cache[jax.Array], tables_BJ: jax.Array, positions_BS: jax.Array) -> jax.Array:
    """Returns the tokens [B,S] at these positions of their contexts."""
    places = find_places(cache, tables_BJ, positions_BS, jnp.ones(positions_BS.shape, bool))
    return cache.tokens_ZT[places.page_BS, places.offset_BS]


def write_routing(cache: Cache[jax.Array], experts_LBSk: jax.Array, places: CachePlaces) -> Cache[jax.Array]:
    """Writes the experts that tokens chose in each expert layer."""
    check_shapes(experts_LBSk=(experts_LBSk, jnp.int32), page_BS=(places.page_BS, jnp.integer))
    assert cache.routing_ZTC is not None, "this cache has no room for routing"
    _, b, s, _ = experts_LBSk.shape
    new_BSX = jnp.moveaxis(experts_LBSk, 0, 2).reshape(b, s, -1)
    routing_LZTC = _put(cache.routing_ZTC[None], jnp.int32(0), new_BSX, places)
    return cache._replace(routing_ZTC=routing_LZTC[0])


def write_layer(
    cache: Cache[jax.Array],
    layer: jax.Array,
    new_BSX: jax.Array,
    places: CachePlaces,
    tables_BJ: jax.Array,
    groups: tuple[int, ...],
) -> tuple[Cache[jax.Array], LayerCache]:
    """Writes one layer's new entries in place; returns the cache and that layer of it.

    Args:
      layer: integer scalar.
      groups: widths of the parts of an entry (models/attention.py: CacheEntry).
    """
    check_shapes(layer=(layer, jnp.integer), new_BSX=(new_BSX, jnp.floating), page_BS=(places.page_BS, jnp.integer))
    put = lambda array, new: _put(array, layer, new, places)  # noqa: E731
    if cache.scales_LZTG is None:
        cache = cache._replace(entries_LZTX=put(cache.entries_LZTX, new_BSX))
    else:
        values, scales = quantize(new_BSX, groups)
        cache = cache._replace(entries_LZTX=put(cache.entries_LZTX, values), scales_LZTG=put(cache.scales_LZTG, scales))
    return cache, LayerCache(cache.entries_LZTX, cache.scales_LZTG, layer, tables_BJ, new_BSX.shape[-1])


def _put(array_LZTX: jax.Array, layer: jax.Array, new_BSX: jax.Array, places: CachePlaces) -> jax.Array:
    """Writes new tokens of one layer, padded to its width. Those of a page that does not exist are dropped."""
    padding = array_LZTX.shape[-1] - new_BSX.shape[-1]
    new_BSX = jnp.pad(new_BSX, ((0, 0), (0, 0), (0, padding))).astype(array_LZTX.dtype)
    tiles = _put_in_tiles if new_BSX.shape[1] == 1 else _scatter
    return jax.lax.platform_dependent(
        array_LZTX, layer, new_BSX, places, tpu=tiles, cpu=_scatter_bits, default=_scatter
    )


def _scatter(array_LZTX: jax.Array, layer: jax.Array, new_BSX: jax.Array, places: CachePlaces) -> jax.Array:
    at = array_LZTX.at[layer, places.page_BS, places.offset_BS]
    return at.set(new_BSX, mode="drop", unique_indices=True)


def _scatter_bits(array_LZTX: jax.Array, layer: jax.Array, new_BSX: jax.Array, places: CachePlaces) -> jax.Array:
    """The form of CPUs, where XLA's scatter of 16-bit floats converts the whole array to float32 and back."""
    if array_LZTX.dtype.itemsize != 2:
        return _scatter(array_LZTX, layer, new_BSX, places)
    bits = lambda array: jax.lax.bitcast_convert_type(array, jnp.uint16)  # noqa: E731
    return jax.lax.bitcast_convert_type(_scatter(bits(array_LZTX), layer, bits(new_BSX), places), array_LZTX.dtype)


def _put_in_tiles(array_LZTX: jax.Array, layer: jax.Array, new_B1X: jax.Array, places: CachePlaces) -> jax.Array:
    """The form for one token of each row on TPUs, row by row.

    Each write replaces the whole TILE that holds the token: a scatter of 8-bit numbers, or a write smaller than a TPU
    tile, makes the TPU rearrange the whole array twice for every layer and token.
    """
    new_BX, page_B, offset_B = (a[:, 0] for a in (new_B1X, *places))
    n_layers, n_pages, page_size, width = array_LZTX.shape
    size = math.gcd(page_size, TILE)

    def put(row, tiles):
        page = jnp.minimum(page_B[row], n_pages - 1)
        tile, place = jnp.divmod(offset_B[row], size)
        at = (layer, page, tile, 0, 0)
        here = ((jnp.arange(size) == place) & (page_B[row] < n_pages))[:, None]
        new = jnp.where(here, new_BX[row], jax.lax.dynamic_slice(tiles, at, (1, 1, 1, size, width)))
        return jax.lax.dynamic_update_slice(tiles, new, at)

    tiles = array_LZTX.reshape(n_layers, n_pages, page_size // size, size, width)
    return jax.lax.fori_loop(0, len(new_BX), put, tiles).reshape(array_LZTX.shape)


def quantize(x: jax.Array, groups: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns int8 [...,X] and float32 scales [...,G], one scale per group of the last axis.

    The largest magnitude of a group becomes 127; the rest is rounded.
    """
    parts = jnp.split(x.astype(jnp.float32), np.cumsum(groups)[:-1].tolist(), axis=-1)
    scales = [jnp.maximum(jnp.abs(part).max(-1, keepdims=True) / 127, 1e-30) for part in parts]
    values = [jnp.round(part / scale).astype(jnp.int8) for part, scale in zip(parts, scales, strict=True)]
    return jnp.concatenate(values, axis=-1), jnp.concatenate(scales, axis=-1)
