"""Drawing one token per row from logits: temperature, top-k and top-p as arrays, so that nothing recompiles.

Letters beside the shape legend: B rows, W entries of the vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.shapes import check_shapes
from composer_jax.sampler.policy import GREEDY_BELOW


class RowParams(NamedTuple):
    """SamplingParams of each row (sampler/policy.py)."""

    temperature_B: jax.Array
    """float32."""
    top_p_B: jax.Array
    """float32."""
    top_k_B: jax.Array
    """int32; 0 keeps all tokens."""


def sample_token(
    logits_BW: jax.Array, seed_B: jax.Array, position_B: jax.Array, params: RowParams | None = None
) -> tuple[jax.Array, jax.Array]:
    """Draws one token per row: (tokens int32[B], log p float32[B]).

    Args:
      logits_BW: float32, of the whole vocabulary.
      seed_B, position_B: uint32 and int32; a row's draw is a function of its seed, position, logits and params.
      params: None draws from softmax(logits), as do parameters that change nothing.

    Returns:
      log p is that of the distribution that was drawn from. For greedy rows, it is that of softmax(logits).
    """
    check_shapes(logits_BW=(logits_BW, jnp.float32), seed_B=(seed_B, jnp.uint32), position_B=(position_B, jnp.int32))
    logprobs_BW = jax.nn.log_softmax(logits_BW if params is None else process_logits(logits_BW, params))
    token_B = _invert_cdf(logprobs_BW, seed_B, position_B)
    if params is not None:
        likeliest_B = jnp.argmax(logits_BW, axis=-1).astype(jnp.int32)
        token_B = jnp.where(params.temperature_B < GREEDY_BELOW, likeliest_B, token_B)
    return token_B, jnp.take_along_axis(logprobs_BW, token_B[:, None], axis=-1)[:, 0]


def process_logits(logits_BW: jax.Array, params: RowParams) -> jax.Array:
    """Divides by the temperature, then sets the logits that top_k and top_p remove to -inf: float32 [B,W].

    The kept set is that of transformers' TopKLogitsWarper and TopPLogitsWarper: tokens as likely as the k-th stay; of
    those as likely as the last that top_p needs, as many stay as it needs, by ascending id. Greedy rows are unchanged.
    """
    check_shapes(
        logits_BW=(logits_BW, jnp.float32),
        temperature_B=(params.temperature_B, jnp.float32),
        top_p_B=(params.top_p_B, jnp.float32),
        top_k_B=(params.top_k_B, jnp.int32),
    )
    greedy_B = params.temperature_B < GREEDY_BELOW
    temperature_B = jnp.where(greedy_B, 1, params.temperature_B)
    top_p_B = jnp.where(greedy_B, 1, params.top_p_B)
    top_k_B = jnp.where(greedy_B, 0, params.top_k_B)
    # A small temperature overflows no logit, because the largest is 0. log_softmax subtracts the largest, too, so its
    # result at temperature 1 is that of the logits themselves, bit for bit.
    scaled_BW = (logits_BW - logits_BW.max(axis=-1, keepdims=True)) / temperature_B[:, None]
    unchanged = lambda scaled_BW, _: scaled_BW  # noqa: E731
    scaled_BW = jax.lax.cond((top_k_B > 0).any(), _keep_top_k, unchanged, scaled_BW, top_k_B)
    return jax.lax.cond((top_p_B < 1).any(), _keep_top_p, unchanged, scaled_BW, top_p_B)


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
    """Inverts the cumulative distribution with one uniform number per row: token ids int32[B].

    Gumbel noise takes one number per vocabulary entry, which on a CPU would cost more than the layer stack.
    """
    cumulative_BW = jnp.cumsum(jnp.exp(logprobs_BW), axis=-1)
    uniform_B = jax.vmap(lambda seed, position: jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position)))(
        seed_B, position_B
    )
    # Scaling by the last entry absorbs the rounding of the sum, so the result is always a token.
    token_B = (cumulative_BW <= uniform_B[:, None] * cumulative_BW[:, -1:]).sum(-1).astype(jnp.int32)
    return jnp.minimum(token_B, logprobs_BW.shape[-1] - 1)
