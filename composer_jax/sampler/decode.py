"""The device side of sampling: prefill and decode over slots, as pure functions with static shapes.

A slot is one row of the cache. Slots are sharded over the batch axes of the mesh, and each device serves its own slots,
so that devices decode independently of each other unless weights are sharded.

Letters beside the shape legend: B all slots of this device, N the slots of one call.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.models.cache import Cache, init_cache, put_rows, take_rows
from composer_jax.models.config import ModelConfig
from composer_jax.models.decoder import Decoder
from composer_jax.ops.shapes import check_shapes
from composer_jax.parallel.sharding import axis_size
from composer_jax.sampler.token_sampling import RowParams, sample_token

DECODE_LOOP = "decode_loop"
"""The named scope of the loop over new tokens, in profiles and in traced programs."""


class SlotState(NamedTuple):
    """State of this device's slots."""

    cache: Cache
    length_B: jax.Array
    """int32: tokens in the context."""
    seed_B: jax.Array
    """uint32: determines, with the position, every random choice in the slot; other slots have no influence."""
    last_BD: jax.Array
    """Compute dtype: normalised state of the last token, from which the next token is sampled."""


class DecodedTokens(NamedTuple):
    """Result of a decode call, [steps,B] each."""

    tokens: jax.Array
    """int32."""
    logprobs: jax.Array
    """float32: log p of each token."""
    emitted: jax.Array
    """bool: whether the slot sampled a token in this step; the other entries are zeros."""


def init_slots(config: ModelConfig, n: int, capacity: int) -> SlotState:
    """`n` empty slots whose contexts can hold `capacity` tokens each."""
    return SlotState(
        init_cache(config, n, capacity),
        jnp.zeros(n, jnp.int32),
        jnp.zeros(n, jnp.uint32),
        jnp.zeros((n, config.d_model), config.dtype),
    )


def prefill(
    decoder: Decoder,
    slots: SlotState,
    index_N: jax.Array,
    tokens_NS: jax.Array,
    count_N: jax.Array,
    start_N: jax.Array,
    seed_N: jax.Array,
    *,
    window: int,
) -> SlotState:
    """Appends tokens to the contexts of some slots.

    Args:
      index_N: int32, the slots.
      tokens_NS: int32, the tokens; each row is padded at its end.
      count_N: int32, tokens of each row that are real. A row with count 0 is padding and changes nothing.
      start_N: int32, length of each context before the call; 0 restarts a slot.
      seed_N: uint32, the slots' seeds from now on.
      window: an upper bound on the length of every context after the call; no more of the cache is read.
    """
    check_shapes(
        index_N=(index_N, jnp.int32),
        tokens_NS=(tokens_NS, jnp.int32),
        count_N=(count_N, jnp.int32),
        start_N=(start_N, jnp.int32),
        seed_N=(seed_N, jnp.uint32),
    )
    n, s = tokens_NS.shape
    real_NS = jnp.arange(s) < count_N[:, None]
    positions_NS = start_N[:, None] + jnp.arange(s)
    states_NSD, rows = decoder.extend(tokens_NS, positions_NS, real_NS, take_rows(slots.cache, index_N, window))
    last_ND = states_NSD[jnp.arange(n), jnp.maximum(count_N - 1, 0)]
    target_N = jnp.where(count_N > 0, index_N, slots.length_B.shape[0])  # out of range, so that padding is dropped

    def put(whole, part):
        return whole.at[target_N].set(part.astype(whole.dtype), mode="drop")

    return SlotState(
        put_rows(slots.cache, target_N, rows),
        put(slots.length_B, start_N + count_N),
        put(slots.seed_B, seed_N),
        put(slots.last_BD, last_ND),
    )


def decode_rows(
    decoder: Decoder,
    slots: SlotState,
    index_N: jax.Array,
    budget_N: jax.Array,
    params: RowParams | None = None,
    *,
    steps: int,
    end_tokens: tuple[int, ...],
    window: int,
) -> tuple[SlotState, DecodedTokens]:
    """`decode` of some slots only, which is cheaper than all of them when few conversations are running.

    Args:
      index_N: int32, distinct slots; entries with budget 0 are padding and may repeat.
      budget_N, params: as in `decode`.
    """
    check_shapes(index_N=(index_N, jnp.int32), budget_N=(budget_N, jnp.int32))
    cache = take_rows(slots.cache, index_N, window)
    selected = SlotState(cache, *(jnp.take(a, index_N, axis=0) for a in (slots.length_B, slots.seed_B, slots.last_BD)))
    selected, out = decode(decoder, selected, budget_N, params, steps=steps, end_tokens=end_tokens, window=window)
    target_N = jnp.where(budget_N > 0, index_N, slots.length_B.shape[0])  # out of range, so that padding is dropped
    cache = put_rows(slots.cache, target_N, selected.cache)
    length_B = slots.length_B.at[target_N].set(selected.length_B, mode="drop")
    last_BD = slots.last_BD.at[target_N].set(selected.last_BD, mode="drop")
    return SlotState(cache, length_B, slots.seed_B, last_BD), out


def decode(
    decoder: Decoder,
    slots: SlotState,
    budget_B: jax.Array,
    params: RowParams | None = None,
    *,
    steps: int,
    end_tokens: tuple[int, ...],
    window: int,
) -> tuple[SlotState, DecodedTokens]:
    """Samples up to `steps` tokens in every slot with a budget, stopping after any of `end_tokens`.

    Args:
      budget_B: int32, most tokens to sample in each slot in this call; 0 leaves the slot alone.
      params: temperature, top_p and top_k of each slot; None samples from the network's own distribution.
      window: an upper bound on the length of every context after the call; no more of the cache is read.
    """
    check_shapes(
        budget_B=(budget_B, jnp.int32),
        length_B=(slots.length_B, jnp.int32),
        seed_B=(slots.seed_B, jnp.uint32),
        last_BD=(slots.last_BD, decoder.config.dtype),
    )
    n = budget_B.shape[0]
    out = DecodedTokens(
        jnp.zeros((steps, n), jnp.int32), jnp.zeros((steps, n), jnp.float32), jnp.zeros((steps, n), bool)
    )

    def unfinished(carry):
        step, _, budget_B, _ = carry
        return (step < steps) & any_device((budget_B > 0).any())

    def sample_one(carry):
        step, slots, budget_B, out = carry
        active_B = budget_B > 0
        token_B, logprob_B = sample_token(decoder.logits(slots.last_BD), slots.seed_B, slots.length_B, params)
        states_BSD, cache = decoder.extend(
            token_B[:, None], slots.length_B[:, None], active_B[:, None], slots.cache, window
        )
        slots = SlotState(
            cache,
            slots.length_B + active_B,
            slots.seed_B,
            jnp.where(active_B[:, None], states_BSD[:, 0], slots.last_BD),
        )
        out = DecodedTokens(
            out.tokens.at[step].set(token_B),
            out.logprobs.at[step].set(logprob_B),
            out.emitted.at[step].set(active_B),
        )
        ended_B = jnp.zeros(n, bool)
        for end in end_tokens:
            ended_B |= token_B == end
        return step + 1, slots, jnp.where(ended_B, 0, budget_B - active_B), out

    with jax.named_scope(DECODE_LOOP):
        _, slots, _, out = jax.lax.while_loop(unfinished, sample_one, (jnp.int32(0), slots, budget_B, out))
    return slots, out


def any_device(flag: jax.Array) -> jax.Array:
    """Whether `flag` (bool []) is true on any of the devices that share sharded weights.

    Those devices must run the same number of steps, because each step gathers weights. Other devices need not.
    """
    for axis in ("data", "expert"):
        if axis_size(axis) > 1:
            flag = jax.lax.pmax(flag.astype(jnp.int32), axis) > 0
    return flag
