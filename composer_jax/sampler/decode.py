"""The device side of sampling: prefill and decode over slots, as pure functions with static shapes.

A slot is one row of the cache. Slots are spread over the batch axes of the mesh; each device serves its own slots, so
without sharded weights the devices decode independently of each other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.models.cache import Cache, init_cache, put_rows, take_rows
from composer_jax.models.config import ModelConfig
from composer_jax.models.decoder import Decoder
from composer_jax.parallel.sharding import axis_size

DECODE_LOOP = "decode_loop"
"""The named scope of the loop over new tokens, in profiles and in traced programs."""


class SlotState(NamedTuple):
    """State of this device's slots."""

    cache: Cache
    length_B: jax.Array
    """int32: tokens in the context."""
    seed_B: jax.Array
    """uint32: with the position it determines every random choice, whatever the batch around it does."""
    last_BD: jax.Array
    """Normalised state of the last token: what the next token is sampled from."""


class DecodedTokens(NamedTuple):
    """Result of a decode call, [N,B] each; `emitted` marks the entries that are real."""

    tokens: jax.Array
    logprobs: jax.Array
    emitted: jax.Array


def init_slots(config: ModelConfig, n: int, capacity: int) -> SlotState:
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
    """Appends count_N tokens to each of the slots index_N; rows with count 0 are padding and change nothing.

    Args:
      start_N: context length before the call; 0 restarts a slot.
      window: no context is longer than this after the call.
    """
    n, s = tokens_NS.shape
    real_NS = jnp.arange(s) < count_N[:, None]
    positions_NS = start_N[:, None] + jnp.arange(s)
    states_NSD, rows = decoder.extend(tokens_NS, positions_NS, real_NS, take_rows(slots.cache, index_N, window))
    last_ND = states_NSD[jnp.arange(n), jnp.maximum(count_N - 1, 0)]
    target = jnp.where(count_N > 0, index_N, slots.length_B.shape[0])  # padding rows are dropped

    def put(whole, part):
        return whole.at[target].set(part.astype(whole.dtype), mode="drop")

    cache = put_rows(slots.cache, target, rows)
    return SlotState(
        cache, put(slots.length_B, start_N + count_N), put(slots.seed_B, seed_N), put(slots.last_BD, last_ND)
    )


def decode_rows(
    decoder: Decoder,
    slots: SlotState,
    index_N: jax.Array,
    budget_N: jax.Array,
    *,
    steps: int,
    end_token: int,
    window: int,
) -> tuple[SlotState, DecodedTokens]:
    """`decode` for the slots index_N only: cheaper than all of them when few conversations are left.

    Args:
      index_N: distinct slots; entries with budget 0 are padding and may repeat.
    """
    cache = take_rows(slots.cache, index_N, window)
    few = SlotState(cache, *(jnp.take(a, index_N, axis=0) for a in (slots.length_B, slots.seed_B, slots.last_BD)))
    few, out = decode(decoder, few, budget_N, steps=steps, end_token=end_token, window=window)
    target = jnp.where(budget_N > 0, index_N, slots.length_B.shape[0])  # padding rows are dropped
    cache = put_rows(slots.cache, target, few.cache)
    length = slots.length_B.at[target].set(few.length_B, mode="drop")
    last = slots.last_BD.at[target].set(few.last_BD, mode="drop")
    return SlotState(cache, length, slots.seed_B, last), out


def decode(
    decoder: Decoder, slots: SlotState, budget_B: jax.Array, *, steps: int, end_token: int, window: int
) -> tuple[SlotState, DecodedTokens]:
    """Samples up to `steps` tokens in every slot whose budget is positive, stopping after end_token.

    Args:
      budget_B: int32, most tokens to sample in each slot in this call; 0 leaves the slot alone.
      window: no context is longer than this after the call.
    """
    n = budget_B.shape[0]
    out = DecodedTokens(
        jnp.zeros((steps, n), jnp.int32), jnp.zeros((steps, n), jnp.float32), jnp.zeros((steps, n), bool)
    )

    def going(carry):
        step, _, budget, _ = carry
        return (step < steps) & any_device((budget > 0).any())

    def body(carry):
        step, slots, budget, out = carry
        active = budget > 0
        token, logprob = sample_token(decoder.logits(slots.last_BD), slots.seed_B, slots.length_B)
        states, cache = decoder.extend(token[:, None], slots.length_B[:, None], active[:, None], slots.cache, window)
        slots = SlotState(
            cache,
            slots.length_B + active,
            slots.seed_B,
            jnp.where(active[:, None], states[:, 0], slots.last_BD),
        )
        out = DecodedTokens(
            out.tokens.at[step].set(token),
            out.logprobs.at[step].set(logprob),
            out.emitted.at[step].set(active),
        )
        return step + 1, slots, jnp.where(token == end_token, 0, budget - active), out

    with jax.named_scope(DECODE_LOOP):
        _, slots, _, out = jax.lax.while_loop(going, body, (jnp.int32(0), slots, budget_B, out))
    return slots, out


def any_device(flag: jax.Array) -> jax.Array:
    """Devices that share sharded weights must run the same number of steps; independent ones need not."""
    for axis in ("data", "expert"):
        if axis_size(axis) > 1:
            flag = jax.lax.pmax(flag.astype(jnp.int32), axis) > 0
    return flag


def sample_token(logits_BW: jax.Array, seed_B: jax.Array, position_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws from softmax(logits) by inverting its cumulative distribution with one uniform number per row.

    One number per row instead of one per vocabulary entry: on a CPU, Gumbel noise would cost more than the layer stack.
    """
    logprobs = jax.nn.log_softmax(logits_BW)
    cumulative = jnp.cumsum(jnp.exp(logprobs), axis=-1)
    uniform = jax.vmap(lambda seed, position: jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position)))(
        seed_B, position_B
    )
    # Scaling by the last entry absorbs the rounding of the sum, so the result is always a token.
    token = (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(-1).astype(jnp.int32)
    token = jnp.minimum(token, logits_BW.shape[-1] - 1)
    return token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
