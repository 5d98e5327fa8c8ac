"""Our side of the comparison: a Decoder's logits and logprobs for whole rows, by both forms of its attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.models.cache import init_cache
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef
from composer_jax.models.predictions import Predictions

TOLERANCE = 2e-4
"""Largest difference of a logit or of a logprob, float32 on both sides."""

PAGE = 8
"""Tokens of a cache page."""


def forward(config: ModelConfig, params, router_bias, tokens) -> tuple[np.ndarray, np.ndarray]:
    """Logits [B,S,W] and the logprobs [B,S-1] of tokens[:, 1:], as training computes them."""
    logits, logprobs = _forward(config)(params, router_bias, jnp.asarray(tokens, jnp.int32))
    return np.asarray(logits), np.asarray(logprobs)


def decode(config: ModelConfig, params, router_bias, tokens, *, step: int) -> np.ndarray:
    """Logits [B,S,W] as sampling computes them, from the cache: `step` tokens per call (S is a multiple of it)."""
    pages_per_row = -(-tokens.shape[1] // PAGE) + 1
    cache = init_cache(config, len(tokens) * pages_per_row, PAGE)
    parts = []
    for start in range(0, tokens.shape[1], step):
        chunk = jnp.asarray(tokens[:, start : start + step], jnp.int32)
        logits, cache = _extend(config)(params, router_bias, chunk, start, cache)
        parts.append(np.asarray(logits))
    return np.concatenate(parts, axis=1)


@functools.cache
def _forward(config: ModelConfig):
    @jax.jit
    def run(params, router_bias, tokens):
        decoder = ModelDef(config).bind(params, router_bias)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        logits = decoder.logits(decoder(tokens, positions, jnp.ones_like(tokens)).last_BSD)
        return logits, Predictions(logits[:, :-1]).logprob(tokens[:, 1:])

    return run


@functools.cache
def _extend(config: ModelConfig):
    @jax.jit
    def run(params, router_bias, tokens, start, cache):
        decoder = ModelDef(config).bind(params, router_bias)
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
        tables = jnp.arange(len(cache.tokens_ZT)).reshape(len(tokens), -1)
        states, cache = decoder.extend(tokens, positions, jnp.ones_like(tokens, bool), cache, tables)
        return decoder.logits(states), cache

    return run
