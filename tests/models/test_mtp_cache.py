"""The cached form of the first MTP module equals its training form."""

import dataclasses

import jax
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.models.cache import init_cache
from composer_jax.models.model_def import ModelDef
from tests.models.small import GROUPED_QUERY, LLAMA, forward, random_weights, relative_error, rows, small

PAGE, PAGES = 4, 14
TABLES = np.random.default_rng(5).permutation(PAGES)[:12].reshape(2, 6).astype(np.int32)
LENGTHS = (19, 23)
CONTEXTS = [np.random.default_rng(i).integers(0, 64, n).tolist() for i, n in enumerate(LENGTHS)]
CONFIGS = {
    "latent": small(cache_mtp=True),
    "grouped_query": small(n_mtp_modules=1, cache_mtp=True, **GROUPED_QUERY),
    "no_experts": small(**LLAMA | {"n_mtp_modules": 1, "cache_mtp": True}),
}
PIECES = [[1, 6, 0, 5, 6], [7, 0, 8, 3, 4]]
"""Tokens of both contexts in each call: all but the last, after which no token is known."""


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_cached_form_is_the_training_form(config):
    weights = random_weights(config)
    batch = rows([[context] for context in CONTEXTS], 24)
    expected = np.asarray(forward(dataclasses.replace(config, cache_mtp=False))(*weights, batch)["mtp_logits"])[0]

    @jax.jit
    def run(cache, tokens, following, start, count):
        decoder, offsets = ModelDef(config).bind(*weights), np.arange(tokens.shape[1])
        places = start[:, None] + offsets, offsets < count[:, None]
        states, cache = decoder.extend(tokens, *places, cache, TABLES)
        _, normed, cache = decoder.extend_mtp(states, following, *places, cache, TABLES)
        return decoder.logits(normed), cache

    cache, start = init_cache(config, PAGES, PAGE), np.zeros(2, np.int32)
    for sizes in zip(*PIECES, strict=True):
        tokens, following = np.full((2, 2, 8), 63, np.int32)
        for b, size in enumerate(sizes):
            tokens[b, :size] = CONTEXTS[b][start[b] : start[b] + size]
            following[b, :size] = CONTEXTS[b][start[b] + 1 : start[b] + size + 1]
        logits, cache = run(cache, tokens, following, start, np.array(sizes, np.int32))
        for b, size in enumerate(sizes):
            if size:
                assert relative_error(logits[b, :size], expected[b, start[b] : start[b] + size]) < 1e-5
            start[b] += size


def test_a_network_without_modules_has_no_entries_of_theirs():
    with pytest.raises(UserError, match="cache_mtp=True needs an MTP module"):
        small(n_mtp_modules=0, cache_mtp=True)
