"""Multi-token prediction module (DeepSeek-V3, arXiv 2412.19437, equations 21 to 23)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from composer_jax.models.block import Block
from composer_jax.models.config import ModelConfig
from composer_jax.models.norm import RMSNorm
from composer_jax.models.parameter import gather_param, matrix
from composer_jax.models.projection import project
from composer_jax.models.router_stats import RouterStats
from composer_jax.ops.cached_attention import KeyRange, LayerCache
from composer_jax.ops.packed_attention import AttentionMask
from composer_jax.ops.quantized_matmul import Precision
from composer_jax.ops.shapes import check_shapes


class MTPModule(nnx.Module):
    """Module k of a chain: h^k_i = Block(W [RMSNorm(embedding of token i+k); RMSNorm(h^(k-1)_i)]).

    The shared head predicts token i+k+1 from RMSNorm(h^k_i). The order of the two parts of W is that of the published
    weights (`eh_proj`); the paper has them in the other order.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d = config.d_model
        self.precision: Precision = config.precision
        self.embedding_norm = RMSNorm(d, eps=config.norm_eps, dtype=config.param_dtype)
        self.hidden_norm = RMSNorm(d, eps=config.norm_eps, dtype=config.param_dtype)
        self.projection = matrix(rngs, (2 * d, d), (None, "embed"), config=config)
        self.block = Block(config, moe=config.n_experts > 0, rngs=rngs)
        self.final_norm = RMSNorm(d, eps=config.norm_eps, dtype=config.param_dtype)

    def __call__(
        self,
        hidden_BSD: jax.Array,
        embedding_BSD: jax.Array,
        positions_BS: jax.Array,
        mask: AttentionMask,
        token_mask_BS: jax.Array,
        *,
        measures_logits: bool = False,
    ) -> tuple[jax.Array, jax.Array, RouterStats | None, jax.Array | None]:
        """Returns states [B,S,D] for the next module, the same normalised for the head, and what Block returns."""
        check_shapes(hidden_BSD=(hidden_BSD, jnp.floating), embedding_BSD=(embedding_BSD, jnp.floating))
        x_BSD = self._project(hidden_BSD, embedding_BSD)
        x_BSD, stats, max_H = self.block(
            x_BSD, positions_BS, mask, None, token_mask_BS, measures_logits=measures_logits
        )
        return x_BSD, self.final_norm(x_BSD), stats, max_H

    def extend(
        self,
        hidden_BSD: jax.Array,
        embedding_BSD: jax.Array,
        positions_BS: jax.Array,
        keys: KeyRange,
        token_mask_BS: jax.Array,
        write: Callable[[jax.Array], LayerCache],
    ) -> tuple[jax.Array, jax.Array]:
        """Decode form, for new tokens against a cache: states [B,S,D] as they are, and normalised for the head.

        See models/attention.py: Attention for the arguments.
        """
        check_shapes(hidden_BSD=(hidden_BSD, jnp.floating), embedding_BSD=(embedding_BSD, jnp.floating))
        x_BSD = self._project(hidden_BSD, embedding_BSD)
        x_BSD, _ = self.block.extend(x_BSD, positions_BS, keys, token_mask_BS, write)
        return x_BSD, self.final_norm(x_BSD)

    def _project(self, hidden_BSD: jax.Array, embedding_BSD: jax.Array) -> jax.Array:
        joined = jnp.concatenate([self.embedding_norm(embedding_BSD), self.hidden_norm(hidden_BSD)], axis=-1)
        return project(joined, gather_param(self.projection, hidden_BSD.dtype), self.precision)
