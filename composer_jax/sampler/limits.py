"""Sizes of a scheduler, from the sampler's config and the devices."""

from composer_jax.errors import UserError
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.sequence import Limits


def make_limits(config: SamplerConfig, shards: int) -> Limits:
    """Returns the sizes of a scheduler over `shards` devices.

    Raises:
      UserError: slots that do not divide over the devices, or a cache that is smaller than one context.
    """
    if config.slots % shards:
        raise UserError(
            f"{config.slots} sampler slots do not divide over {shards} devices; use a multiple of {shards}."
        )
    rows = config.slots // shards
    page = min(config.page_size, config.capacity)
    cache_tokens = (config.cache_tokens or config.slots * config.capacity) // shards
    if cache_tokens < config.capacity:
        raise UserError(
            f"sampler.cache_tokens={config.cache_tokens} gives each of {shards} devices {cache_tokens} tokens, less "
            f"than one context of sampler.capacity={config.capacity}; use {shards * config.capacity} or more, or 0."
        )
    n_pages = max(-(-cache_tokens // page), rows * -(-config.capacity // page) if not config.cache_tokens else 0)
    return Limits(page, n_pages, shards, rows, tuple(config.prefill_shapes), config.decode_steps)
