"""Drawing one token per row from logits: temperature, top-k, top-p and min-p as arrays, so that nothing recompiles.

Letters beside the shape legend: B rows, W entries of the vocabulary, K likeliest tokens.
"""

import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from composer_jax.data.chat.sampling_params import GREEDY_BELOW, MOST_TOP_LOGPROBS
from composer_jax.ops.shapes import check_shapes

Leaf = TypeVar("Leaf")


class RowParams(NamedTuple, Generic[Leaf]):
    """SamplingParams of each row (sampler/policy.py)."""

    temperature_B: Leaf
    """float32."""
    top_p_B: Leaf
    """float32."""
    top_k_B: Leaf
    """int32; 0 keeps all tokens."""
    min_p_B: Leaf
    """float32; 0 keeps all tokens."""
    n_top_B: Leaf
    """int32: how many likeliest tokens are wanted beside the drawn one."""


class TopTokens(NamedTuple):
    """The K likeliest tokens of each row, the likeliest first. K is MOST_TOP_LOGPROBS, or the vocabulary if smaller."""

    ids_BK: jax.Array
    """int32."""
    logprobs_BK: jax.Array
    """float32: log p under softmax(logits)."""


class DrawnTokens(NamedTuple):
    """One token per row."""

    token_B: jax.Array
    """int32."""
    logprob_B: jax.Array
    """float32: log p under the distribution that was drawn from; for greedy rows that of softmax(logits)."""
    raw_logprob_B: jax.Array
    """float32: log p under softmax(logits)."""
    top: TopTokens
    """Zeros where no row wants them; K is 0 without params."""


def sample_token(
    logits_BW: jax.Array, seed_B: jax.Array, position_B: jax.Array, params: RowParams[jax.Array] | None = None
) -> DrawnTokens:
    """Draws one token per row.

    Args:
      logits_BW: float32, of the whole vocabulary.
      seed_B, position_B: uint32 and int32; a row's draw is a function of its seed, position, logits and params.
      params: None draws from softmax(logits), as do parameters that change nothing.
    """
    check_shapes(logits_BW=(logits_BW, jnp.float32), seed_B=(seed_B, jnp.uint32), position_B=(position_B, jnp.int32))
    raw_BW = jax.nn.log_softmax(logits_BW)
    logprobs_BW = raw_BW if params is None else jax.nn.log_softmax(process_logits(logits_BW, params))
    token_B = _invert_cdf(logprobs_BW, seed_B, position_B)
    if params is not None:
        likeliest_B = jnp.argmax(logits_BW, axis=-1).astype(jnp.int32)
        token_B = jnp.where(params.temperature_B < GREEDY_BELOW, likeliest_B, token_B)
    of_token = lambda a_BW: jnp.take_along_axis(a_BW, token_B[:, None], axis=-1)[:, 0]  # noqa: E731
    return DrawnTokens(token_B, of_token(logprobs_BW), of_token(raw_BW), find_top(raw_BW, params))


def find_top(raw_BW: jax.Array, params: RowParams[jax.Array] | None) -> TopTokens:
    """Returns the likeliest tokens of log-probabilities at temperature 1, where any row wants some."""
    rows, vocabulary = raw_BW.shape
    k = 0 if params is None else min(MOST_TOP_LOGPROBS, vocabulary)
    nothing = TopTokens(jnp.zeros((rows, k), jnp.int32), jnp.zeros((rows, k)))
    if params is None:
        return nothing

    def find(raw_BW: jax.Array) -> TopTokens:
        logprobs_BK, ids_BK = jax.lax.top_k(raw_BW, k)
        return TopTokens(ids_BK, logprobs_BK)

    return jax.lax.cond((params.n_top_B > 0).any(), find, lambda _: nothing, raw_BW)


def process_logits(logits_BW: jax.Array, params: RowParams[jax.Array]) -> jax.Array:
    """Divides by the temperature, then sets the logits that top_k, top_p and min_p remove to -inf: float32 [B,W].

    The kept set is that of transformers' TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper: tokens as likely as
    the k-th stay; of those as likely as the last that top_p needs, as many stay as it needs, by ascending id; of those,
    the ones with at least min_p of the likeliest token's probability. Greedy rows are unchanged.
    """
    check_shapes(
        logits_BW=(logits_BW, jnp.float32),
        temperature_B=(params.temperature_B, jnp.float32),
        top_p_B=(params.top_p_B, jnp.float32),
        top_k_B=(params.top_k_B, jnp.int32),
        min_p_B=(params.min_p_B, jnp.float32),
    )
    greedy_B = params.temperature_B < GREEDY_BELOW
    temperature_B = jnp.where(greedy_B, 1, params.temperature_B)
    top_p_B = jnp.where(greedy_B, 1, params.top_p_B)
    top_k_B = jnp.where(greedy_B, 0, params.top_k_B)
    min_p_B = jnp.where(greedy_B, 0, params.min_p_B)
    # A small temperature overflows no logit, because the largest is 0. log_softmax subtracts the largest, too, so its
    # result at temperature 1 is that of the logits themselves, bit for bit.
    scaled_BW = (logits_BW - logits_BW.max(axis=-1, keepdims=True)) / temperature_B[:, None]
    unchanged = lambda scaled_BW, _: scaled_BW  # noqa: E731
    scaled_BW = jax.lax.cond((top_k_B > 0).any(), _keep_top_k, unchanged, scaled_BW, top_k_B)
    scaled_BW = jax.lax.cond((top_p_B < 1).any(), _keep_top_p, unchanged, scaled_BW, top_p_B)
    # The likeliest token has the scaled logit 0, and log(0) keeps all.
    return jnp.where(scaled_BW >= jnp.log(min_p_B)[:, None], scaled_BW, -jnp.inf)


# The least likely kept logit of each row is found by bisection, which is much cheaper than sorting a vocabulary.


def _keep_top_k(logits_BW: jax.Array, top_k_B: jax.Array) -> jax.Array:
    vocabulary = logits_BW.shape[-1]
    key_BW = _ordered_bits(logits_BW)
    count_B = jnp.where((top_k_B > 0) & (top_k_B < vocabulary), top_k_B, vocabulary)
    kth_B = _largest_key(lambda key_B: (key_BW >= key_B[:, None]).sum(-1) >= count_B, len(logits_BW))
    return jnp.where(key_BW >= kth_B[:, None], logits_BW, -jnp.inf)


def _keep_top_p(logits_BW: jax.Array, top_p_B: jax.Array) -> jax.Array:
    key_BW, p_BW = _ordered_bits(logits_BW), jax.nn.softmax(logits_BW)
    mass_from = lambda key_B: jnp.where(key_BW >= key_B[:, None], p_BW, 0).sum(-1)  # noqa: E731
    last_B = _largest_key(lambda key_B: mass_from(key_B) >= top_p_B, len(logits_BW))
    last_B = jnp.minimum(last_B, key_BW.max(-1))  # the likeliest token stays, however small top_p is
    tie_BW = key_BW == last_B[:, None]
    above_BW = key_BW > last_B[:, None]
    missing_B = top_p_B - jnp.where(above_BW, p_BW, 0).sum(-1)
    needed_B = jnp.maximum(jnp.ceil(missing_B / jnp.where(tie_BW, p_BW, 0).max(-1)), 1)
    rank_BW = jnp.cumsum(tie_BW, axis=-1)  # 1 for the lowest id of the tie
    kept_BW = above_BW | (tie_BW & (rank_BW <= needed_B[:, None])) | (top_p_B >= 1)[:, None]
    return jnp.where(kept_BW, logits_BW, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 keys in the order of float32 numbers."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # 0.0 for -0.0
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_key(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest uint32 key of each row for which `holds` (uint32[B] -> bool[B]) is true, or 0.

    holds: true up to some key of its row and false above.
    """

    def try_bit(i: jax.Array, key_B: jax.Array) -> jax.Array:
        candidate_B = key_B | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(holds(candidate_B), candidate_B, key_B)

    return jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(rows, jnp.uint32))


def _invert_cdf(logprobs_BW: jax.Array, seed_B: jax.Array, position_B: jax.Array) -> jax.Array:
    """Inverts the cumulative distribution, first over blocks of tokens and then inside the block: token ids int32[B].

    Two uniform numbers per row do it. Gumbel noise takes one per vocabulary entry, which on a CPU would cost more than
    the layer stack. One number for the whole vocabulary has too few bits: a cumulative sum near 1 moves in steps of
    6e-8, so most tokens of a tail of 0.1 % among 100,000 could never be drawn.
    """
    rows, vocabulary = logprobs_BW.shape
    size = math.isqrt(vocabulary - 1) + 1
    blocks = -(-vocabulary // size)
    p_BKI = jnp.pad(jnp.exp(logprobs_BW), ((0, 0), (0, blocks * size - vocabulary))).reshape(rows, blocks, size)
    uniform_B2 = jax.vmap(
        lambda seed, position: jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position), (2,))
    )(seed_B, position_B)
    block_B = _first_above(p_BKI.sum(-1), uniform_B2[:, 0])
    of_block_BI = jnp.take_along_axis(p_BKI, block_B[:, None, None], axis=1)[:, 0]
    return block_B * size + _first_above(of_block_BI, uniform_B2[:, 1])


def _first_above(weights_BI: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """Returns the first index whose cumulative weight exceeds that fraction of the sum: int32[B].

    The index has a positive weight: scaling by the last entry absorbs the rounding of the sum, and the fraction is
    below 1.
    """
    cumulative_BI = jnp.cumsum(weights_BI, axis=-1)
    index_B = (cumulative_BI <= uniform_B[:, None] * cumulative_BI[:, -1:]).sum(-1).astype(jnp.int32)
    # uniform * sum may round up to the sum itself; then it is the last index with a weight.
    last_B = weights_BI.shape[-1] - 1 - jnp.argmax(weights_BI[:, ::-1] > 0, axis=-1).astype(jnp.int32)
    return jnp.minimum(index_B, last_B)
