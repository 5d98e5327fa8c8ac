"""RouterStats: how evenly one layer distributes tokens over its experts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.models.router import Routing, expert_counts
from composer_jax.models.router_replay import ReplayStats
from composer_jax.ops.shapes import check_shapes
from composer_jax.parallel import context
from composer_jax.parallel.sharding import axis_size


class RouterStats(NamedTuple):
    """Statistics of this device's tokens, to be summed over devices. Arrays of several layers have a leading axis L."""

    counts_E: jax.Array
    """float32: real tokens that chose each expert; padding does not count."""
    sequence_balance: jax.Array
    """float32 scalar: DeepSeek-V3's sequence-wise balance of each row times its real tokens, summed over rows."""
    dropped: jax.Array
    """float32 scalar: (token, choice) pairs beyond the capacity of the dispatch buffer (parallel/dispatch)."""
    entropy: jax.Array
    """float32 scalar: entropy of each real token's normalised scores in nats, times its choices, summed over tokens.
    Divided by the sum of counts_E it is the mean entropy of the router; log E if no expert is preferred. It has no
    gradient."""
    replay: ReplayStats | None = None
    """Counts of replayed choices; None where the routers chose freely."""


def measure_routing(routing: Routing, token_mask_BS: jax.Array, dropped: jax.Array) -> RouterStats:
    """Returns the statistics of one layer; token_mask_BS is false for padding, `dropped` a float32 scalar.

    sequence_balance = sum over rows of T sum_i f_i P_i,
    f_i = E / (k T) #{t: i chosen},  P_i = 1/T sum_t s_ti / sum_j s_tj
    (arXiv 2412.19437, equations 17 to 20; a row is the paper's sequence and T counts its real tokens). The inner sum is
    1 under even load. The gradient flows through P and lowers the scores of experts that are chosen often.
    """
    check_shapes(
        ids_Tk=(routing.ids_Tk, jnp.int32),
        scores_TE=(routing.scores_TE, jnp.float32),
        token_mask_BS=(token_mask_BS, bool),
        dropped=(dropped, jnp.float32),
    )
    b, s = token_mask_BS.shape
    n = routing.scores_TE.shape[-1]
    rows = lambda x_T: x_T.reshape(b, s, -1)  # noqa: E731
    shares_TE = routing.scores_TE / (routing.scores_TE.sum(-1, keepdims=True) + 1e-20)
    shares_BE = (rows(shares_TE) * token_mask_BS[..., None]).sum(1)
    chosen_BE = jax.vmap(expert_counts, in_axes=(0, 0, None))(rows(routing.ids_Tk), token_mask_BS, n)
    here_B1 = token_mask_BS.sum(1, keepdims=True, dtype=jnp.float32)
    # Devices of `context` share rows: frequencies and scores are those of whole rows, and each device adds the terms of
    # its own tokens.
    whole = chosen_BE, shares_BE, here_B1
    if axis_size(context.AXIS) > 1:
        whole = jax.lax.psum(whole, context.AXIS)
    all_chosen_BE, all_shares_BE, tokens_B1 = whole
    tokens_B1 = jnp.maximum(tokens_B1, 1)
    frequency_BE = all_chosen_BE * n / (routing.ids_Tk.shape[-1] * tokens_B1)
    balance_B1 = (frequency_BE * all_shares_BE / tokens_B1).sum(-1, keepdims=True)
    replay = None if routing.replayed is None else routing.replayed.count(token_mask_BS.reshape(-1))
    entropy_T = -jax.scipy.special.xlogy(shares_TE, shares_TE).sum(-1)
    entropy = routing.ids_Tk.shape[-1] * (entropy_T * token_mask_BS.reshape(-1)).sum()
    balance = (here_B1 * balance_B1).sum()
    return RouterStats(chosen_BE.sum(0), balance, dropped, jax.lax.stop_gradient(entropy), replay)
