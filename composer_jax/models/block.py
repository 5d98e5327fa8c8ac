"""One transformer layer, pre-normalised: attention, then a dense or a mixture-of-experts feed-forward."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from composer_jax.models.attention import ClippedAttention
from composer_jax.models.attention_kinds import attention_kind
from composer_jax.models.config import ModelConfig
from composer_jax.models.feed_forward import FeedForward
from composer_jax.models.moe import MixtureOfExperts
from composer_jax.models.norm import RMSNorm
from composer_jax.models.router_replay import RouterReplay
from composer_jax.models.router_stats import RouterStats
from composer_jax.ops.cached_attention import KeyRange, LayerCache
from composer_jax.ops.packed_attention import AttentionMask
from composer_jax.ops.shapes import check_shapes


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)).

    A dense layer has no RouterStats and no chosen experts; both are None then.
    """

    def __init__(self, config: ModelConfig, *, moe: bool, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, eps=config.norm_eps, dtype=config.param_dtype)
        self.attention = attention_kind(config)(config, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config.d_model, eps=config.norm_eps, dtype=config.param_dtype)
        self.feed_forward: MixtureOfExperts | FeedForward = (
            MixtureOfExperts(config, rngs=rngs) if moe else FeedForward(config, config.dense_ff_dim, rngs=rngs)
        )

    def __call__(
        self,
        x_BSD: jax.Array,
        positions_BS: jax.Array,
        mask: AttentionMask,
        windowed: jax.Array | None,
        token_mask_BS: jax.Array,
        replay: RouterReplay | None = None,
        *,
        measures_logits: bool = False,
    ) -> tuple[jax.Array, RouterStats | None, jax.Array | None]:
        """Training form, for whole rows: the new x, RouterStats, and the largest logit of each head if measured.

        See models/attention.py: Attention and ClippedAttention for the arguments, and MixtureOfExperts for `replay`.
        """
        check_shapes(
            x_BSD=(x_BSD, jnp.floating),
            positions_BS=(positions_BS, jnp.integer),
            token_mask_BS=(token_mask_BS, bool),
            windowed=(windowed, bool),
        )
        experts = None
        if isinstance(self.feed_forward, MixtureOfExperts) and self.feed_forward.config.early_expert_gather:
            with jax.named_scope("feed_forward"):
                experts = self.feed_forward.gather_experts(x_BSD.dtype)
        with jax.named_scope("attention"):
            normed_BSD, max_H = self.attention_norm(x_BSD), None
            if measures_logits:
                assert isinstance(self.attention, ClippedAttention)
                y_BSD, max_H = self.attention.with_max_logits(normed_BSD, positions_BS, mask, windowed)
            else:
                y_BSD = self.attention(normed_BSD, positions_BS, mask, windowed)
            if experts is not None:
                # Without it XLA's scheduler is free to start the gathers after attention (docs/scale.md).
                y_BSD, experts = jax.lax.optimization_barrier((y_BSD, experts))
            x_BSD = x_BSD + checkpoint_name(y_BSD, "out_proj")
        with jax.named_scope("feed_forward"):
            normed_BSD = self.feed_forward_norm(x_BSD)
            if isinstance(self.feed_forward, MixtureOfExperts):
                y_BSD, stats = self.feed_forward(normed_BSD, token_mask_BS, replay, experts)
            else:
                y_BSD, stats = self.feed_forward(normed_BSD), None
            return x_BSD + checkpoint_name(y_BSD, "feed_forward"), stats, max_H

    def extend(
        self,
        x_BSD: jax.Array,
        positions_BS: jax.Array,
        keys: KeyRange,
        token_mask_BS: jax.Array,
        write: Callable[[jax.Array], LayerCache],
    ) -> tuple[jax.Array, jax.Array | None]:
        """Decode form, for new tokens against a cache: the new x and the chosen experts, int32 [B,S,k].

        See models/attention.py: Attention for the arguments.
        """
        check_shapes(
            x_BSD=(x_BSD, jnp.floating),
            positions_BS=(positions_BS, jnp.integer),
            token_mask_BS=(token_mask_BS, bool),
        )
        with jax.named_scope("attention"):
            x_BSD = x_BSD + self.attention.extend(self.attention_norm(x_BSD), positions_BS, keys, write)
        with jax.named_scope("feed_forward"):
            normed_BSD = self.feed_forward_norm(x_BSD)
            if isinstance(self.feed_forward, MixtureOfExperts):
                y_BSD, experts_BSk = self.feed_forward.extend(normed_BSD, token_mask_BS)
            else:
                y_BSD, experts_BSk = self.feed_forward(normed_BSD), None
            return x_BSD + y_BSD, experts_BSk
