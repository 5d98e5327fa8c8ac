"""The device side of speculative decoding with the network's MTP module: it drafts and verifies in one program.

The draft of a token is drawn by the same random number as the token itself, from the module's guess at its
distribution. So a draft is right as often as the two distributions allow, and never changes what is sampled.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.data.chat.sampling_params import MOST_TOP_LOGPROBS
from composer_jax.models.cache import Cache, find_places, write_tokens
from composer_jax.models.decoder import Decoder
from composer_jax.ops.shapes import check_shapes
from composer_jax.sampler.decode import (
    DECODE_LOOP,
    DecodedTokens,
    DecodeRows,
    any_device,
    no_tokens,
    verify,
)
from composer_jax.sampler.token_sampling import RowParams, sample_token


class Drafts(NamedTuple):
    """Guesses at the next tokens of each row, and how earlier ones fared in this call."""

    tokens_BK: jax.Array
    """int32."""
    count_B: jax.Array
    """int32: how many of them there are; 0 in a row that nothing was drafted for."""
    drafted_BK: jax.Array
    """int32: drafts that were verified, by their place."""
    accepted_BK: jax.Array
    """int32: those of them that were right, with all before them."""


class _Carry(NamedTuple):
    cache: Cache[jax.Array]
    rows: DecodeRows[jax.Array]
    drafts: Drafts
    emitted_B: jax.Array  # tokens that this call sampled
    out: DecodedTokens


def decode_with_mtp(
    decoder: Decoder,
    cache: Cache[jax.Array],
    rows: DecodeRows[jax.Array],
    drafts_BK: jax.Array,
    count_B: jax.Array,
    params: RowParams[jax.Array] | None = None,
    *,
    steps: int,
    end_tokens: tuple[int, ...],
) -> tuple[Cache[jax.Array], tuple[DecodedTokens, Drafts]]:
    """Samples up to `steps` tokens in every row with a budget, as `decode` would.

    Each pass through the network verifies the drafts of every row, and the module then drafts K more tokens.

    Args:
      drafts_BK, count_B: int32, the drafts that the call before returned, and how many there are; none is allowed.
      params: as in `decode`.
    """
    rows.check()
    check_shapes(drafts_BK=(drafts_BK, jnp.int32), count_B=(count_B, jnp.int32))
    n = len(rows.budget_B)
    rows = rows._replace(budget_B=jnp.minimum(rows.budget_B, steps))
    out = no_tokens(steps, n, 0 if params is None else min(MOST_TOP_LOGPROBS, decoder.config.vocab_size))
    zeros_BK = jnp.zeros_like(drafts_BK)
    start = _Carry(cache, rows, Drafts(drafts_BK, count_B, zeros_BK, zeros_BK), jnp.zeros(n, jnp.int32), out)

    def unfinished(carry: _Carry) -> jax.Array:
        return any_device((carry.rows.budget_B > 0).any())

    def sample_some(carry: _Carry) -> _Carry:
        rows, drafts = carry.rows, carry.drafts
        # A draft that is verified has an entry in the cache: the pages end with the budget.
        count_B = jnp.clip(drafts.count_B, 0, rows.budget_B - 1)
        cache, new, states_BSD = verify(
            decoder, carry.cache, rows, drafts.tokens_BK, count_B, params, end_tokens=end_tokens
        )
        n_new_B = new.emitted.sum(axis=0).astype(jnp.int32)
        cache, drafted_BK = draft_with_mtp(
            decoder, cache, rows, states_BSD, new.tokens.T, n_new_B, params, drafts.tokens_BK.shape[1]
        )
        active_B, place_K = rows.budget_B > 0, jnp.arange(drafts.tokens_BK.shape[1])
        verified_BK = active_B[:, None] & (place_K < count_B[:, None])
        right_BK = jnp.cumprod(verified_BK & (drafts.tokens_BK == new.tokens.T[:, :-1]), axis=1)
        drafts = Drafts(
            jnp.where(active_B[:, None], drafted_BK, drafts.tokens_BK),
            jnp.where(active_B, drafted_BK.shape[1], drafts.count_B),
            drafts.drafted_BK + verified_BK,
            drafts.accepted_BK + right_BK,
        )
        out = _append(carry.out, new, carry.emitted_B)
        return _Carry(cache, _advance(rows, new, n_new_B, end_tokens), drafts, carry.emitted_B + n_new_B, out)

    with jax.named_scope(DECODE_LOOP):
        end = jax.lax.while_loop(unfinished, sample_some, start)
    return end.cache, (end.out, end.drafts)


def draft_with_mtp(
    decoder: Decoder,
    cache: Cache[jax.Array],
    rows: DecodeRows[jax.Array],
    states_BSD: jax.Array,
    next_BS: jax.Array,
    n_new_B: jax.Array,
    params: RowParams[jax.Array] | None,
    n_drafts: int,
) -> tuple[Cache[jax.Array], jax.Array]:
    """Computes the module's entries of the tokens that a pass kept, then drafts: returns the cache and int32 [B,K].

    Args:
      rows: as they were before the pass.
      states_BSD: the network's states of the pass, S positions from rows.position_B on.
      next_BS: int32, the token that was drawn after each position.
      n_new_B: int32, how many of those were kept; 0 in rows that are done, whose drafts mean nothing.
    """
    positions_BS = rows.position_B[:, None] + jnp.arange(next_BS.shape[1])
    kept_BS = jnp.arange(next_BS.shape[1]) < n_new_B[:, None]
    states_BSD, normed_BSD, cache = decoder.extend_mtp(
        states_BSD, next_BS, positions_BS, kept_BS, cache, rows.tables_BJ
    )
    last_B = jnp.maximum(n_new_B - 1, 0)
    at_last = lambda a: jnp.take_along_axis(a, last_B.reshape(-1, *[1] * (a.ndim - 1)), axis=1)  # noqa: E731
    position_B, limit_B = rows.position_B + last_B, rows.position_B + rows.budget_B

    def draw(normed_BSD: jax.Array, position_B: jax.Array) -> jax.Array:
        return sample_token(decoder.logits(normed_BSD[:, 0]), rows.seed_B, position_B + 2, params).token_B

    first_B = draw(at_last(normed_BSD), position_B)

    def draft_next(carry, _):
        cache, states_BSD, token_B, draft_B, position_B = carry
        position_B = position_B + 1  # that of token_B, which `draft_B` follows
        positions_BS, real_BS = position_B[:, None], ((n_new_B > 0) & (position_B < limit_B))[:, None]
        if decoder.config.embedding_taps:
            places = find_places(cache, rows.tables_BJ, positions_BS, real_BS)
            cache = write_tokens(cache, token_B[:, None], places)
        states_BSD, normed_BSD, cache = decoder.extend_mtp(
            states_BSD, draft_B[:, None], positions_BS, real_BS, cache, rows.tables_BJ
        )
        after_B = draw(normed_BSD, position_B)
        return (cache, states_BSD, draft_B, after_B, position_B), after_B

    start = cache, at_last(states_BSD), at_last(next_BS)[:, 0], first_B, position_B
    (cache, *_), later_KB = jax.lax.scan(draft_next, start, length=n_drafts - 1)
    return cache, jnp.concatenate([first_B[:, None], later_KB.T], axis=1)


def _append(out: DecodedTokens, new: DecodedTokens, emitted_B: jax.Array) -> DecodedTokens:
    """Puts the tokens of a pass [S,B] after those that each row has [steps,B]."""
    steps, n = out.emitted.shape
    place_SB = jnp.where(new.emitted, emitted_B + jnp.arange(len(new.emitted))[:, None], steps)
    row_B = jnp.arange(n)
    return DecodedTokens(*(a.at[place_SB, row_B].set(b, mode="drop") for a, b in zip(out, new, strict=True)))


def _advance(
    rows: DecodeRows[jax.Array], new: DecodedTokens, n_new_B: jax.Array, end_tokens: tuple[int, ...]
) -> DecodeRows[jax.Array]:
    last_B = jnp.take_along_axis(new.tokens, jnp.maximum(n_new_B - 1, 0)[None], axis=0)[0]
    ended_B = jnp.zeros(len(last_B), bool)
    for end in end_tokens:
        ended_B |= last_B == end
    return rows._replace(
        token_B=jnp.where(n_new_B > 0, last_B, rows.token_B),
        position_B=rows.position_B + n_new_B,
        budget_B=jnp.where(ended_B, 0, rows.budget_B - n_new_B),
    )
