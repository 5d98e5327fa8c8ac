"""Sizes of a scheduler, from the sampler's config, the devices and the network."""

from composer_jax.errors import UserError
from composer_jax.models.cache import cache_window
from composer_jax.models.config import ModelConfig
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.sequence import Limits

MOST_SCORED = 64
"""Tokens of a row that Runner.score can score."""


def make_limits(config: SamplerConfig, shards: int, model: ModelConfig) -> Limits:
    """Returns the sizes of a scheduler over `shards` devices.

    Raises:
      UserError: slots that do not divide over the devices, or a cache that is smaller than one context.
    """
    if config.slots % shards:
        raise UserError(
            f"{config.slots} sampler slots do not divide over {shards} devices; use a multiple of {shards}."
        )
    rows = config.slots // shards
    page = min(config.page_size, config.max_model_len)
    cache_tokens = (config.cache_tokens or config.slots * config.max_model_len) // shards
    n_pages = max(-(-cache_tokens // page), rows * -(-config.max_model_len // page) if not config.cache_tokens else 0)
    window = cache_window(model)
    window = None if window is None else max(window, page + 1)
    spare_pages = -(-min(MOST_SCORED, config.max_model_len) // page)
    shapes = tuple(config.prefill_shapes)
    limits = Limits(page, n_pages, shards, rows, shapes, config.decode_steps, window, spare_pages)
    needed = min(config.max_model_len, limits.most_pages(config.max_model_len) * page)
    if cache_tokens < needed:
        raise UserError(
            f"sampler.cache_tokens={config.cache_tokens} gives each of {shards} devices {cache_tokens} tokens, less "
            f"than the {needed} that one context of sampler.max_model_len={config.max_model_len} takes; "
            f"use {shards * needed} or more, or 0."
        )
    return limits
