"""Router replay: a forward pass uses the experts that another computation chose for the same tokens.

The sampler and the learner round differently, so their routers choose differently for some tokens, and the
probabilities of those tokens differ by far more than rounding (R3, arXiv 2510.11370). The learner therefore takes the
sampler's choices. Its own router still scores them, so gates are live and gradients flow through the scores.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.shapes import check_shapes


class RouterReplay(NamedTuple):
    """The experts to use again, and which of them are plausible enough."""

    ids: jax.Array
    """Integer [...,k]: the experts of each token, of the whole network [B,S,L,k], of a layer [B,S,k] or flat [T,k]. A
    number of no expert, such as NO_ROUTE, leaves the choice to the router, and so does an expert that the token has
    already, because the choices of a token differ (parallel/dispatch/contract.py)."""
    plausibility: float
    """A replayed expert is dropped if its score is below this times the lowest score of the router's own choice, and
    the best expert of that choice takes its place (Composer 2, arXiv 2603.24477; the factor is not published). 0 drops
    none."""


class ReplayStats(NamedTuple):
    """Counts of (token, choice) pairs, float32 scalars; arrays of several layers have a leading axis L."""

    replayed: jax.Array
    """Choices that came with the tokens."""
    foreign: jax.Array
    """Those of them that the router would not have made."""
    filtered: jax.Array
    """Those of them that were dropped, as implausible or as repeated."""


class ReplayedChoice(NamedTuple):
    """The experts of each token under replay, and what became of the replayed ones."""

    ids_Tk: jax.Array
    """int32: the experts to use."""
    replayed_Tk: jax.Array
    """bool: whether an expert came with the token."""
    foreign_Tk: jax.Array
    """bool: whether it did, and the router would not have chosen it."""
    filtered_Tk: jax.Array
    """bool: whether it did, and was dropped."""

    def count(self, token_mask_T: jax.Array) -> ReplayStats:
        """Returns the counts of the real tokens; token_mask_T is false for padding."""
        masks = self.replayed_Tk, self.foreign_Tk, self.filtered_Tk
        return ReplayStats(*((mask & token_mask_T[:, None]).sum(dtype=jnp.float32) for mask in masks))


def replay_experts(own_Tk: jax.Array, scores_TE: jax.Array, replay: RouterReplay) -> ReplayedChoice:
    """Returns the replayed experts that are kept, with the router's best other choices in the free places.

    Args:
      own_Tk: int32, the router's own choice, best first.
      scores_TE: float32, the router's scores without the selection bias.
      replay: its ids are [T,k].
    """
    ids_Tk = replay.ids.astype(jnp.int32)
    check_shapes(own_Tk=(own_Tk, jnp.int32), scores_TE=(scores_TE, jnp.float32), ids_Tk=(ids_Tk, jnp.int32))
    scores_TE = jax.lax.stop_gradient(scores_TE)
    score = lambda ids: jnp.take_along_axis(scores_TE, ids, axis=-1)  # noqa: E731
    replayed_Tk = (ids_Tk >= 0) & (ids_Tk < scores_TE.shape[-1])
    least_T1 = replay.plausibility * score(own_Tk).min(-1, keepdims=True)
    repeated_Tk = jnp.tril(ids_Tk[:, :, None] == ids_Tk[:, None, :], -1).any(-1)
    kept_Tk = replayed_Tk & ~repeated_Tk & (score(jnp.where(replayed_Tk, ids_Tk, 0)) >= least_T1)
    is_own_Tkk = ids_Tk[:, :, None] == own_Tk[:, None, :]  # [T, replayed, own]
    unused_Tk = ~(kept_Tk[:, :, None] & is_own_Tkk).any(1)
    # The i-th free place takes the i-th unused expert of the router's choice; there are at least as many as places.
    place_Tk, rank_Tk = jnp.cumsum(~kept_Tk, -1), jnp.cumsum(unused_Tk, -1)
    fills_Tkk = unused_Tk[:, None, :] & (place_Tk[:, :, None] == rank_Tk[:, None, :])
    filling_Tk = jnp.where(fills_Tkk, own_Tk[:, None, :], 0).sum(-1)
    foreign_Tk = replayed_Tk & ~is_own_Tkk.any(-1)
    return ReplayedChoice(jnp.where(kept_Tk, ids_Tk, filling_Tk), replayed_Tk, foreign_Tk, replayed_Tk & ~kept_Tk)
