"""How evenly tokens fall on experts: what one layer measures while it routes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.models.router import Routing, expert_counts
from composer_jax.parallel import context
from composer_jax.parallel.sharding import axis_size


class RouterStats(NamedTuple):
    """Of one layer, or with a leading axis of several; of this device's tokens, to be added up over devices."""

    counts_E: jax.Array
    """float32: real tokens that chose each expert."""
    sequence_balance: jax.Array
    """float32 []: the sequence-wise balance of DeepSeek-V3, times the real tokens of each row."""
    dropped: jax.Array
    """float32 []: choices that found no room (parallel/dispatch)."""


def measure_routing(routing: Routing, token_mask_BS: jax.Array, dropped: jax.Array) -> RouterStats:
    """The load of one layer.

    sequence = sum over rows of T sum_i f_i P_i,  f_i = E / (k T) #{t: i chosen},  P_i = 1/T sum_t s_ti / sum_j s_tj
    (arXiv 2412.19437, equations 17 to 20; T counts the real tokens of a row, which is what is called a sequence there).
    The inner sum is 1 where load is even. Its gradient goes through P: of experts chosen often, the scores go down.
    """
    b, s = token_mask_BS.shape
    n = routing.scores_TE.shape[-1]
    rows = lambda x_T: x_T.reshape(b, s, -1)  # noqa: E731
    shares_TE = routing.scores_TE / (routing.scores_TE.sum(-1, keepdims=True) + 1e-20)
    shares_BE = (rows(shares_TE) * token_mask_BS[..., None]).sum(1)
    chosen_BE = jax.vmap(expert_counts, in_axes=(0, 0, None))(rows(routing.ids_Tk), token_mask_BS, n)
    here_B1 = token_mask_BS.sum(1, keepdims=True, dtype=jnp.float32)
    # A row may be spread over several devices; each adds the part of the sum that its own tokens stand for.
    whole = chosen_BE, shares_BE, here_B1
    if axis_size(context.AXIS) > 1:
        whole = jax.lax.psum(whole, context.AXIS)
    all_chosen_BE, all_shares_BE, tokens_B1 = whole
    tokens_B1 = jnp.maximum(tokens_B1, 1)
    frequency_BE = all_chosen_BE * n / (routing.ids_Tk.shape[-1] * tokens_B1)
    balance_B1 = (frequency_BE * all_shares_BE / tokens_B1).sum(-1, keepdims=True)
    return RouterStats(chosen_BE.sum(0), (here_B1 * balance_B1).sum(), dropped)
