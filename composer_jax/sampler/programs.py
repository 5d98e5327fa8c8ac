"""The jitted programs of sampling: prefill and decode under shard_map on every device of a mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.models.cache import Cache, cache_spec, new_cache
from composer_jax.models.decoder import Decoder
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import BATCH_AXES
from composer_jax.sampler.decode import (
    CarriedRows,
    DecodeRows,
    Scores,
    carry_rows,
    continue_rows,
    decode,
    prefill,
    score,
    verify,
)
from composer_jax.sampler.mtp_decode import decode_with_mtp
from composer_jax.sampler.token_sampling import RowParams


def cache_program(definition: ModelDef, mesh: Mesh, n_pages: int, page_size: int) -> Callable[[], Cache[jax.Array]]:
    """Jitted `new_cache`."""
    return _jit(new_cache(definition.config, mesh, n_pages, page_size), mesh, cache_spec(definition.config))


def prefill_program(definition: ModelDef, mesh: Mesh) -> Callable[..., tuple[Cache[jax.Array], jax.Array]]:
    """Jitted `prefill` on every device: (params, router_bias, cache, tokens, start, count, tables) -> (cache, done).

    With config.cache_mtp there is one more argument, next. `done`, bool [B], is whether a row had tokens; the host
    waits for it, because the next call takes the cache.
    """

    def fill(decoder, cache, tokens_BS, start_B, count_B, *rest):
        return prefill(decoder, cache, tokens_BS, start_B, count_B, *rest), count_B > 0

    out_specs = cache_spec(definition.config), PartitionSpec(BATCH_AXES)
    return _shard_and_jit(fill, definition, mesh, 4 + definition.config.cache_mtp, out_specs)


def score_program(definition: ModelDef, mesh: Mesh) -> Callable[..., tuple[Cache[jax.Array], Scores]]:
    """Jitted `score` on every device: the arguments of prefill_program, and next -> (cache, Scores)."""
    return _shard_and_jit(score, definition, mesh, 5, (cache_spec(definition.config), PartitionSpec(BATCH_AXES)))


def decode_program(
    definition: ModelDef, mesh: Mesh, steps: int, end_tokens: tuple[int, ...], processed: bool, drafts: str = ""
) -> Callable[..., tuple[Cache[jax.Array], Any]]:
    """Jitted `decode` on every device: (params, router_bias, cache, *DecodeRows, source, *CarriedRows) -> (cache, out).

    `out` is (DecodedTokens, CarriedRows). See continue_rows for `source`.

    Args:
      processed: whether the program takes the arrays of RowParams at the end.
      drafts: as SamplerConfig.drafts: `verify` or `decode_with_mtp` in place of `decode`, with the arrays of drafts and
        their counts after those of DecodeRows. `out` is then DecodedTokens or (DecodedTokens, Drafts).
    """

    def decode_carried(decoder, cache, rows, source_B, *rest, **options):
        *carried, params = rest
        rows = continue_rows(rows, source_B, CarriedRows(*carried))
        cache, tokens, rows = decode(decoder, cache, rows, params, steps=steps, **options)
        return cache, (tokens, carry_rows(rows, len(carried[0])))

    functions: dict[str, Callable] = {
        "": decode_carried,
        "prompt_lookup": lambda *inputs, **options: verify(*inputs, **options)[:2],
        "mtp": functools.partial(decode_with_mtp, steps=steps),
    }
    n_rows = len(DecodeRows._fields)
    n = n_rows + (2 if drafts else 1 + len(CarriedRows._fields))

    def sample(decoder: Decoder, cache: Cache[jax.Array], *inputs: jax.Array) -> tuple[Cache[jax.Array], Any]:
        rows, params = DecodeRows(*inputs[:n_rows]), RowParams(*inputs[n:]) if processed else None
        return functions[drafts](decoder, cache, rows, *inputs[n_rows:n], params, end_tokens=end_tokens)

    tokens, rows = PartitionSpec(None, BATCH_AXES), PartitionSpec(BATCH_AXES)
    out_specs = cache_spec(definition.config), tokens if drafts == "prompt_lookup" else (tokens, rows)
    return _shard_and_jit(sample, definition, mesh, n + len(RowParams._fields) * processed, out_specs)


def _shard_and_jit(function, definition: ModelDef, mesh: Mesh, inputs: int, out_specs):
    """`function` of (decoder, cache, *inputs) as a jitted one of (params, router_bias, cache, *inputs) on every device.

    The cache is donated. inputs: their number; each is sharded by rows over the batch axes.
    """

    def program(params, bias, cache, *inputs):
        return function(definition.bind(params, bias), cache, *inputs)

    mapped = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=(*definition.specs(mesh), cache_spec(definition.config), *[PartitionSpec(BATCH_AXES)] * inputs),
        out_specs=out_specs,
        check_vma=False,
    )
    return _jit(mapped, mesh, out_specs, donate_argnums=2)


def _jit(mapped, mesh: Mesh, out_specs, donate_argnums: tuple[int, ...] | int = ()):
    """Jitted `mapped`; its results have the shardings of `out_specs` as they are written there.

    XLA may name the same placement differently, such as P() and P(None, None). A program that meets its cache under two
    names looks up what it compiled for the second one, and compiles again once JAX has forgotten it.
    """
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs)
    return jax.jit(mapped, donate_argnums=donate_argnums, out_shardings=shardings)
