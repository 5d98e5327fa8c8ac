"""The jitted programs of sampling: prefill and decode under shard_map on every device of a mesh."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh, PartitionSpec

from composer_jax.models.cache import cache_spec
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import BATCH_AXES
from composer_jax.sampler.decode import DecodedTokens, SlotState, decode, decode_rows, init_slots, prefill
from composer_jax.sampler.token_sampling import RowParams


def slot_specs(definition: ModelDef) -> SlotState:
    """PartitionSpecs of the state of all slots."""
    rows = PartitionSpec(BATCH_AXES)
    specs = jax.tree.map(lambda _: rows, jax.eval_shape(lambda: init_slots(definition.config, 1, 1)))
    return specs._replace(cache=cache_spec(definition.config))


def prefill_program(definition: ModelDef, mesh: Mesh, window: int) -> Callable[..., SlotState]:
    """Jitted `prefill` on every device: (params, router_bias, slots, index, tokens, count, start, seed) -> slots."""

    def program(params, bias, slots, *inputs):
        return prefill(definition.bind(params, bias), slots, *inputs, window=window)

    return _shard_and_jit(program, definition, mesh, 5, slot_specs(definition))


def decode_program(
    definition: ModelDef, mesh: Mesh, window: int, steps: int, end_tokens: tuple[int, ...], processed: bool
) -> Callable[..., tuple[SlotState, DecodedTokens]]:
    """Jitted `decode` on every device: (params, router_bias, slots, budget) -> (slots, DecodedTokens).

    processed: whether the program takes the three arrays of RowParams after the budget.
    """

    def program(weights, bias, slots, budget, *rows):
        decoder = definition.bind(weights, bias)
        params = RowParams(*rows) if processed else None
        return decode(decoder, slots, budget, params, steps=steps, end_tokens=end_tokens, window=window)

    return _shard_and_jit(
        program, definition, mesh, 1 + 3 * processed, (slot_specs(definition), PartitionSpec(None, BATCH_AXES))
    )


def decode_rows_program(
    definition: ModelDef, mesh: Mesh, window: int, steps: int, end_tokens: tuple[int, ...], processed: bool
) -> Callable[..., tuple[SlotState, DecodedTokens]]:
    """Jitted `decode_rows` on every device: (params, router_bias, slots, index, budget) -> (slots, DecodedTokens).

    processed: whether the program takes the three arrays of RowParams after the budget.
    """

    def program(weights, bias, slots, index, budget, *rows):
        decoder = definition.bind(weights, bias)
        params = RowParams(*rows) if processed else None
        return decode_rows(decoder, slots, index, budget, params, steps=steps, end_tokens=end_tokens, window=window)

    return _shard_and_jit(
        program, definition, mesh, 2 + 3 * processed, (slot_specs(definition), PartitionSpec(None, BATCH_AXES))
    )


def _shard_and_jit(program, definition: ModelDef, mesh: Mesh, inputs: int, out_specs):
    """`program` under shard_map and jit; the slots, its third argument, are donated.

    inputs: number of arguments after the slots, each sharded by rows over the batch axes.
    """
    mapped = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=(*definition.specs(mesh), slot_specs(definition), *[PartitionSpec(BATCH_AXES)] * inputs),
        out_specs=out_specs,
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=2)
