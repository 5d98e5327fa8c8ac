"""The device side of sampling: prefill and decode over pages of a cache, as pure functions with static shapes.

A row of a call is any context, given by its pages. Beside the pages, the devices keep where the rows of the last decode
call ended (CarriedRows), so that the next call can start before the host has read the tokens of this one. Pages are
sharded over the batch axes of the mesh, and each device serves contexts in its own pages, so that devices decode
independently of each other unless weights are sharded.
"""

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from composer_jax.data.chat.sampling_params import MOST_TOP_LOGPROBS
from composer_jax.models.cache import Cache
from composer_jax.models.decoder import Decoder, all_gather_vocab, head_logits
from composer_jax.ops.chunks import map_chunks
from composer_jax.ops.shapes import check_shapes
from composer_jax.parallel.sharding import axis_size
from composer_jax.sampler.token_sampling import RowParams, sample_token

Leaf = TypeVar("Leaf")

SCORED_AT_ONCE = 256
"""Tokens whose logits over the vocabulary exist at once in `score`."""

DECODE_LOOP = "decode_loop"
"""The named scope of the loop over new tokens, in profiles and in traced programs."""


class DecodeRows(NamedTuple, Generic[Leaf]):
    """The contexts that a decode call continues: arrays, or their shapes."""

    token_B: Leaf
    """int32: the last token of each context, whose entries are not in the cache yet."""
    position_B: Leaf
    """int32: its position."""
    budget_B: Leaf
    """int32: most tokens to sample in this call; 0 for padding."""
    seed_B: Leaf
    """uint32: determines, with the position, every random choice in the row; other rows have no influence."""
    tables_BJ: Leaf
    """int32: the pages of each context, with room for what is sampled."""

    def check(self: "DecodeRows[jax.Array]") -> None:
        """Asserts shapes and dtypes."""
        check_shapes(
            token_B=(self.token_B, jnp.int32),
            position_B=(self.position_B, jnp.int32),
            budget_B=(self.budget_B, jnp.int32),
            seed_B=(self.seed_B, jnp.uint32),
            tables_BJ=(self.tables_BJ, jnp.int32),
        )


class CarriedRows(NamedTuple, Generic[Leaf]):
    """Where the rows of a decode call ended, for the call after it. R are the rows per device of the largest call."""

    token_R: Leaf
    """int32: the last token of each context."""
    position_R: Leaf
    """int32: its position."""
    budget_R: Leaf
    """int32: most tokens that may still be sampled; 0 after an end token, and in rows that the call did not have."""


class DecodedTokens(NamedTuple):
    """Result of a decode call, [steps,B] each; likeliest tokens [steps,B,K], see token_sampling.TopTokens."""

    tokens: jax.Array
    """int32."""
    logprobs: jax.Array
    """float32: log p of each token under the distribution that it was drawn from (DrawnTokens)."""
    raw_logprobs: jax.Array
    """float32: log p of each token at temperature 1."""
    top_ids: jax.Array
    """int32."""
    top_logprobs: jax.Array
    """float32."""
    emitted: jax.Array
    """bool: whether the row sampled a token in this step; the other entries mean nothing."""


def prefill(
    decoder: Decoder,
    cache: Cache[jax.Array],
    tokens_BS: jax.Array,
    start_B: jax.Array,
    count_B: jax.Array,
    tables_BJ: jax.Array,
    next_BS: jax.Array | None = None,
) -> Cache[jax.Array]:
    """Computes the cache entries of some tokens of each context.

    Args:
      tokens_BS: int32, the tokens; each row is padded at its end.
      start_B: int32, position of each row's first token; the entries of all positions before are in the pages.
      count_B: int32, tokens of each row that are real. A row with count 0 is padding and changes nothing.
      tables_BJ: int32, the pages of each context.
      next_BS: int32, the token after each, from which the MTP module computes its entries; needed with
        config.cache_mtp only.
    """
    return _compute(decoder, cache, tokens_BS, start_B, count_B, tables_BJ, next_BS)[1]


def _compute(
    decoder: Decoder,
    cache: Cache[jax.Array],
    tokens_BS: jax.Array,
    start_B: jax.Array,
    count_B: jax.Array,
    tables_BJ: jax.Array,
    next_BS: jax.Array | None,
) -> tuple[jax.Array, Cache[jax.Array]]:
    """Returns the states [B,S,D] of some tokens of each context, and the cache with their entries."""
    check_shapes(
        tokens_BS=(tokens_BS, jnp.int32),
        start_B=(start_B, jnp.int32),
        count_B=(count_B, jnp.int32),
        tables_BJ=(tables_BJ, jnp.int32),
        next_BS=(next_BS, jnp.int32),
    )
    offsets = jnp.arange(tokens_BS.shape[1])
    places = start_B[:, None] + offsets, offsets < count_B[:, None]
    states_BSD, cache = decoder.extend(tokens_BS, *places, cache, tables_BJ)
    if decoder.config.cache_mtp:
        assert next_BS is not None, "the MTP module needs the tokens after those that are computed"
        *_, cache = decoder.extend_mtp(states_BSD, next_BS, *places, cache, tables_BJ)
    return states_BSD, cache


class Scores(NamedTuple):
    """What the network says about tokens [B,S] of contexts."""

    logprobs_BS: jax.Array
    """float32: log p of each token at temperature 1."""
    top_ids_BSK: jax.Array
    """int32: the likeliest tokens in its place (token_sampling.TopTokens)."""
    top_logprobs_BSK: jax.Array
    """float32."""


def score(
    decoder: Decoder,
    cache: Cache[jax.Array],
    tokens_BS: jax.Array,
    start_B: jax.Array,
    count_B: jax.Array,
    tables_BJ: jax.Array,
    next_BS: jax.Array,
) -> tuple[Cache[jax.Array], Scores]:
    """`prefill` that also scores the token after each of those it computes.

    next_BS: int32, the token after each.
    """
    states_BSD, cache = _compute(decoder, cache, tokens_BS, start_B, count_B, tables_BJ, next_BS)

    def score_states(weight_DW: jax.Array, states_TD: jax.Array, next_T: jax.Array) -> tuple[jax.Array, ...]:
        raw_TW = jax.nn.log_softmax(all_gather_vocab(head_logits(states_TD, weight_DW)))
        top_TK, ids_TK = jax.lax.top_k(raw_TW, min(MOST_TOP_LOGPROBS, raw_TW.shape[-1]))
        return jnp.take_along_axis(raw_TW, next_T[:, None], axis=-1)[:, 0], ids_TK, top_TK

    flat = states_BSD.reshape(-1, states_BSD.shape[-1]), next_BS.reshape(-1)
    scores = map_chunks(score_states, SCORED_AT_ONCE, decoder.head_weight(), *flat)
    return cache, Scores(*(a.reshape(*tokens_BS.shape, *a.shape[1:]) for a in scores))


def decode(
    decoder: Decoder,
    cache: Cache[jax.Array],
    rows: DecodeRows[jax.Array],
    params: RowParams[jax.Array] | None = None,
    *,
    steps: int,
    end_tokens: tuple[int, ...],
) -> tuple[Cache[jax.Array], DecodedTokens, DecodeRows[jax.Array]]:
    """Samples up to `steps` tokens in every row with a budget, stopping after any of `end_tokens`.

    The entries of all sampled tokens but the last of each row are then in the cache. The third result is the rows as
    they are after these tokens.

    params: sampling parameters of each row; None samples from the network's own distribution.
    """
    rows.check()
    n = len(rows.budget_B)
    out = no_tokens(steps, n, 0 if params is None else min(MOST_TOP_LOGPROBS, decoder.config.vocab_size))

    def unfinished(carry):
        step, _, rows, _ = carry
        return (step < steps) & any_device((rows.budget_B > 0).any())

    def sample_one(carry):
        step, cache, rows, out = carry
        active_B = rows.budget_B > 0
        states_BSD, cache = decoder.extend(
            rows.token_B[:, None], rows.position_B[:, None], active_B[:, None], cache, rows.tables_BJ
        )
        drawn = sample_token(decoder.logits(states_BSD[:, 0]), rows.seed_B, rows.position_B + 1, params)
        new = *drawn[:-1], *drawn.top, active_B
        out = DecodedTokens(*(all_.at[step].set(of_step) for all_, of_step in zip(out, new, strict=True)))
        ended_B = jnp.zeros(n, bool)
        for end in end_tokens:
            ended_B |= drawn.token_B == end
        rows = rows._replace(
            token_B=drawn.token_B,
            position_B=rows.position_B + active_B,
            budget_B=jnp.where(ended_B, 0, rows.budget_B - active_B),
        )
        return step + 1, cache, rows, out

    with jax.named_scope(DECODE_LOOP):
        _, cache, rows, out = jax.lax.while_loop(unfinished, sample_one, (jnp.int32(0), cache, rows, out))
    return cache, out, rows


def continue_rows(
    rows: DecodeRows[jax.Array], source_B: jax.Array, carried: CarriedRows[jax.Array]
) -> DecodeRows[jax.Array]:
    """Returns the rows with token, position and budget of the call before in those that it had.

    source_B: int32, the row of that call on this device that has the same context; -1: `rows` has its values.
    """
    check_shapes(source_B=(source_B, jnp.int32), **{name: (a, jnp.int32) for name, a in carried._asdict().items()})
    choose = lambda new_B, old_R: jnp.where(source_B < 0, new_B, old_R[jnp.maximum(source_B, 0)])  # noqa: E731
    return rows._replace(
        token_B=choose(rows.token_B, carried.token_R),
        position_B=choose(rows.position_B, carried.position_R),
        budget_B=choose(rows.budget_B, carried.budget_R),
    )


def carry_rows(rows: DecodeRows[jax.Array], n: int) -> CarriedRows[jax.Array]:
    """Returns what the next call needs of rows, padded to `n`."""
    pad = lambda a_B: jnp.pad(a_B, (0, n - len(a_B)))  # noqa: E731
    return CarriedRows(pad(rows.token_B), pad(rows.position_B), pad(rows.budget_B))


def no_tokens(steps: int, n_rows: int, k: int) -> DecodedTokens:
    """Returns the result of a call that sampled nothing yet, with room for `k` likeliest tokens."""
    zeros = lambda dtype, *shape: jnp.zeros((steps, n_rows, *shape), dtype)  # noqa: E731
    return DecodedTokens(
        zeros(jnp.int32),
        zeros(jnp.float32),
        zeros(jnp.float32),
        zeros(jnp.int32, k),
        zeros(jnp.float32, k),
        zeros(bool),
    )


def verify(
    decoder: Decoder,
    cache: Cache[jax.Array],
    rows: DecodeRows[jax.Array],
    drafts_BK: jax.Array,
    count_B: jax.Array,
    params: RowParams[jax.Array] | None = None,
    *,
    end_tokens: tuple[int, ...],
) -> tuple[Cache[jax.Array], DecodedTokens, jax.Array]:
    """Samples tokens in every row with a budget, as `decode` would, as long as they equal the drafts.

    Each row gets the tokens up to the first that differs from its draft, that one included, or one more than its draft:
    DecodedTokens [K+1,B]. The states [B,K+1,D] from which they were drawn are returned, too.

    Args:
      drafts_BK: int32, guesses at the next tokens.
      count_B: int32, how many of them there are in each row.
      params: as in `decode`.
    """
    rows.check()
    check_shapes(drafts_BK=(drafts_BK, jnp.int32), count_B=(count_B, jnp.int32))
    n, s = len(drafts_BK), drafts_BK.shape[1] + 1
    active_B = rows.budget_B > 0
    tokens_BS = jnp.concatenate([rows.token_B[:, None], drafts_BK], axis=1)
    positions_BS = rows.position_B[:, None] + jnp.arange(s)
    real_BS = active_B[:, None] & (jnp.arange(s) <= count_B[:, None])
    states_BSD, cache = decoder.extend(tokens_BS, positions_BS, real_BS, cache, rows.tables_BJ)
    drawn = sample_token(
        decoder.logits(states_BSD).reshape(n * s, -1),
        jnp.repeat(rows.seed_B, s),
        positions_BS.reshape(-1) + 1,
        None if params is None else RowParams(*(jnp.repeat(a, s) for a in params)),
    )
    drawn_BS = drawn.token_B.reshape(n, s)
    goes_on_BK = (drawn_BS[:, :-1] == drafts_BK) & (jnp.arange(s - 1) < count_B[:, None])
    for end in end_tokens:
        goes_on_BK &= drawn_BS[:, :-1] != end
    goes_on_BS = jnp.concatenate([active_B[:, None], goes_on_BK], axis=1)
    emitted_BS = jnp.cumprod(goes_on_BS, axis=1).astype(bool) & (jnp.arange(s) < rows.budget_B[:, None])
    by_step = lambda a: jnp.moveaxis(a.reshape(n, s, *a.shape[1:]), 0, 1)  # noqa: E731
    decoded = DecodedTokens(*map(by_step, (*drawn[:-1], *drawn.top, emitted_BS.reshape(-1))))
    return cache, decoded, states_BSD


def any_device(flag: jax.Array) -> jax.Array:
    """Whether `flag` (bool []) is true on any of the devices that share sharded weights.

    Those devices must run the same number of steps, because each step gathers weights. Other devices need not.
    """
    for axis in ("data", "expert"):
        if axis_size(axis) > 1:
            flag = jax.lax.pmax(flag.astype(jnp.int32), axis) > 0
    return flag
