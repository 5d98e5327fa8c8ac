"""The jitted programs of sampling: prefill and decode under shard_map on every device of a mesh."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.models.cache import Cache, cache_spec, init_cache
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import BATCH_AXES
from composer_jax.sampler.decode import DecodedTokens, DecodeRows, Scores, decode, prefill, score, verify
from composer_jax.sampler.mtp_decode import Drafts, decode_with_mtp
from composer_jax.sampler.token_sampling import RowParams


def cache_program(definition: ModelDef, mesh: Mesh, n_pages: int, page_size: int) -> Callable[[], Cache[jax.Array]]:
    """Jitted `init_cache` on every device."""
    spec = cache_spec(definition.config)
    new_cache = lambda: init_cache(definition.config, n_pages, page_size)  # noqa: E731
    return _jit(jax.shard_map(new_cache, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False), mesh, spec)


def prefill_program(definition: ModelDef, mesh: Mesh) -> Callable[..., Cache[jax.Array]]:
    """Jitted `prefill` on every device: (params, router_bias, cache, tokens, start, count, tables) -> cache.

    With config.cache_mtp there is one more argument, next.
    """

    def program(params, bias, cache, *inputs):
        return prefill(definition.bind(params, bias), cache, *inputs)

    return _shard_and_jit(program, definition, mesh, 4 + definition.config.cache_mtp, cache_spec(definition.config))


def score_program(definition: ModelDef, mesh: Mesh) -> Callable[..., tuple[Cache[jax.Array], Scores]]:
    """Jitted `score` on every device: the arguments of prefill_program, and next -> (cache, Scores)."""

    def program(params, bias, cache, *inputs):
        return score(definition.bind(params, bias), cache, *inputs)

    return _shard_and_jit(program, definition, mesh, 5, (cache_spec(definition.config), PartitionSpec(BATCH_AXES)))


def routing_program(mesh: Mesh) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    """Jitted read of routing: (Cache.routing_ZTC, tables int32 [shards,J]) -> int16 [shards,JT,C].

    Each row of `tables` has pages of its shard.
    """

    def program(routing_ZTC, tables_BJ):
        return routing_ZTC[tables_BJ].reshape(len(tables_BJ), -1, routing_ZTC.shape[-1])

    pages = PartitionSpec(BATCH_AXES)
    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=(pages, pages), out_specs=pages, check_vma=False))


def decode_program(
    definition: ModelDef, mesh: Mesh, steps: int, end_tokens: tuple[int, ...], processed: bool
) -> Callable[..., tuple[Cache[jax.Array], DecodedTokens]]:
    """Jitted `decode` on every device: (params, router_bias, cache, *DecodeRows) -> (cache, DecodedTokens).

    processed: whether the program takes the arrays of RowParams after those of DecodeRows.
    """
    n = len(DecodeRows._fields)

    def program(weights, bias, cache, *inputs):
        params = RowParams(*inputs[n:]) if processed else None
        decoder = definition.bind(weights, bias)
        return decode(decoder, cache, DecodeRows(*inputs[:n]), params, steps=steps, end_tokens=end_tokens)

    out_specs = cache_spec(definition.config), PartitionSpec(None, BATCH_AXES)
    return _shard_and_jit(program, definition, mesh, n + len(RowParams._fields) * processed, out_specs)


def verify_program(
    definition: ModelDef, mesh: Mesh, end_tokens: tuple[int, ...], processed: bool
) -> Callable[..., tuple[Cache[jax.Array], DecodedTokens]]:
    """Jitted `verify` on every device: (params, router_bias, cache, *DecodeRows, drafts, count) -> as decode_program.

    processed: whether the program takes the arrays of RowParams after those.
    """
    n = len(DecodeRows._fields)

    def program(weights, bias, cache, *inputs):
        params = RowParams(*inputs[n + 2 :]) if processed else None
        decoder = definition.bind(weights, bias)
        return verify(decoder, cache, DecodeRows(*inputs[:n]), inputs[n], inputs[n + 1], params, end_tokens=end_tokens)

    out_specs = cache_spec(definition.config), PartitionSpec(None, BATCH_AXES)
    return _shard_and_jit(program, definition, mesh, n + 2 + len(RowParams._fields) * processed, out_specs)


def mtp_program(
    definition: ModelDef, mesh: Mesh, steps: int, end_tokens: tuple[int, ...], processed: bool
) -> Callable[..., tuple[Cache[jax.Array], tuple[DecodedTokens, Drafts]]]:
    """Jitted `decode_with_mtp` on every device: the arguments of verify_program -> (cache, (DecodedTokens, Drafts))."""
    n = len(DecodeRows._fields)

    def program(weights, bias, cache, *inputs):
        params = RowParams(*inputs[n + 2 :]) if processed else None
        decoder, rows = definition.bind(weights, bias), DecodeRows(*inputs[:n])
        drafts = inputs[n], inputs[n + 1]
        return decode_with_mtp(decoder, cache, rows, *drafts, params, steps=steps, end_tokens=end_tokens)

    out_specs = cache_spec(definition.config), (PartitionSpec(None, BATCH_AXES), PartitionSpec(BATCH_AXES))
    return _shard_and_jit(program, definition, mesh, n + 2 + len(RowParams._fields) * processed, out_specs)


def _shard_and_jit(program, definition: ModelDef, mesh: Mesh, inputs: int, out_specs):
    """`program` under shard_map and jit; the cache, its third argument, is donated.

    inputs: number of arguments after the cache, each sharded by rows over the batch axes.
    """
    mapped = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=(
            *definition.specs(mesh),
            cache_spec(definition.config),
            *[PartitionSpec(BATCH_AXES)] * inputs,
        ),
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
