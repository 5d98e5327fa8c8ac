"""Multi-token prediction module (DeepSeek-V3, arXiv 2412.19437, equations 21 to 23)."""

import jax
import jax.numpy as jnp
from flax import nnx

from composer_jax.models.block import Block
from composer_jax.models.config import ModelConfig
from composer_jax.models.load import Load
from composer_jax.models.norm import RMSNorm
from composer_jax.models.parameter import matrix, use
from composer_jax.ops.row_attention import Sight


class MTPModule(nnx.Module):
    """h'_i = Block(W [RMSNorm(h_i); RMSNorm(embedding of token i+1)]); the shared head then predicts token i+2."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d = config.d_model
        self.hidden_norm = RMSNorm(d, eps=config.norm_eps, dtype=config.param_dtype)
        self.embedding_norm = RMSNorm(d, eps=config.norm_eps, dtype=config.param_dtype)
        self.projection = matrix(rngs, (2 * d, d), (None, "embed"), fan_in=2 * d, config=config)
        self.block = Block(config, moe=True, rngs=rngs)
        self.final_norm = RMSNorm(d, eps=config.norm_eps, dtype=config.param_dtype)

    def __call__(
        self,
        hidden_BSD: jax.Array,
        next_embedding_BSD: jax.Array,
        positions_BS: jax.Array,
        sight: Sight,
        token_mask_BS: jax.Array,
    ) -> tuple[jax.Array, Load]:
        """Hidden states for the shared head, [B,S,D], and the load of the module's layer."""
        joined = jnp.concatenate([self.hidden_norm(hidden_BSD), self.embedding_norm(next_embedding_BSD)], axis=-1)
        x_BSD = joined @ use(self.projection, hidden_BSD.dtype)
        x_BSD, load = self.block(x_BSD, positions_BS, sight, None, token_mask_BS)
        return self.final_norm(x_BSD), load
