"""One transformer layer, pre-normalised: attention, then a dense or a mixture-of-experts feed-forward."""

from collections.abc import Callable

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from composer_jax.models.cache import Entries
from composer_jax.models.config import ModelConfig
from composer_jax.models.feed_forward import FeedForward
from composer_jax.models.gqa import GroupedQueryAttention
from composer_jax.models.mla import MultiHeadLatentAttention
from composer_jax.models.moe import MixtureOfExperts
from composer_jax.models.norm import RMSNorm
from composer_jax.ops.row_attention import AttentionMask


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). Returns x and its RouterStats (None in a dense
    layer)."""

    def __init__(self, config: ModelConfig, *, moe: bool, rngs: nnx.Rngs):
        self.moe = moe
        self.attention_norm = RMSNorm(config.d_model, eps=config.norm_eps, dtype=config.param_dtype)
        kind = GroupedQueryAttention if config.kv_lora_rank is None else MultiHeadLatentAttention
        self.attention = kind(config, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config.d_model, eps=config.norm_eps, dtype=config.param_dtype)
        self.feed_forward = (
            MixtureOfExperts(config, rngs=rngs) if moe else FeedForward(config, config.dense_ff_dim, rngs=rngs)
        )

    def __call__(
        self,
        x_BSD: jax.Array,
        positions_BS: jax.Array,
        mask: AttentionMask,
        windowed: jax.Array | None,
        token_mask_BS: jax.Array,
    ):
        with jax.named_scope("attention"):
            x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), positions_BS, mask, windowed)
        return self._feed_forward(x_BSD, token_mask_BS)

    def extend(
        self,
        x_BSD: jax.Array,
        positions_BS: jax.Array,
        bias_BSC: jax.Array,
        token_mask_BS: jax.Array,
        write: Callable[[jax.Array], Entries],
    ):
        """The same layer for new tokens against a cache; see the attention's `extend`."""
        with jax.named_scope("attention"):
            x_BSD = x_BSD + self.attention.extend(self.attention_norm(x_BSD), positions_BS, bias_BSC, write)
        return self._feed_forward(x_BSD, token_mask_BS)

    def _feed_forward(self, x_BSD: jax.Array, token_mask_BS: jax.Array):
        with jax.named_scope("feed_forward"):
            normed = self.feed_forward_norm(x_BSD)
            y, stats = self.feed_forward(normed, token_mask_BS) if self.moe else (self.feed_forward(normed), None)
            return x_BSD + checkpoint_name(y, "feed_forward"), stats
