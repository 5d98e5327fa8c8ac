"""An attention kind from outside the package: multi-query attention (Shazeer 2019, arXiv 1911.02150), no positions.

One head of keys and values serves all queries. test_attention_kinds.py names this class by import path.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from composer_jax.errors import UserError
from composer_jax.models.attention import AttentionCost, CacheEntry
from composer_jax.models.parameter import gather_param, matrix
from composer_jax.ops.cached_attention import attend_cache
from composer_jax.ops.packed_attention import attend_rows


class MultiQueryAttention(nnx.Module):
    def __init__(self, config, *, rngs: nnx.Rngs):
        d, h, x, v = config.d_model, config.n_heads, config.qk_rope_dim, config.v_head_dim
        self.config = config
        self.q = matrix(rngs, (d, h, x), ("embed", "heads", None), config=config)
        self.kv = matrix(rngs, (d, x + v), ("embed", None), config=config)
        self.out = matrix(rngs, (h, v, d), ("heads", None, "embed"), in_axis=(0, 1), config=config)

    @classmethod
    def check_config(cls, config):
        if config.qk_nope_dim:
            raise UserError(f"qk_nope_dim={config.qk_nope_dim} has no place in multi-query attention; use 0.")

    @classmethod
    def cache_entry(cls, config):
        return CacheEntry((config.qk_rope_dim, config.v_head_dim), None)

    @classmethod
    def cost(cls, config):
        d, h, x, v = config.d_model, config.n_heads, config.qk_rope_dim, config.v_head_dim
        return AttentionCost(d * h * x + d * (x + v) + h * v * d, h * (x + v))

    def __call__(self, x_BSD, positions_BS, mask, windowed=None):
        k, v = jnp.split(self._entries(x_BSD)[:, :, None], [self.config.qk_rope_dim], axis=-1)
        return self._output(attend_rows(self._queries(x_BSD), k, v, mask, windowed))

    def extend(self, x_BSD, positions_BS, keys, write):
        return self._output(attend_cache(self._queries(x_BSD), write(self._entries(x_BSD)), self._split, keys))

    def _split(self, values_BTX, scales_BTG):
        assert scales_BTG is None
        k, v = jnp.split(values_BTX[:, :, None], [self.config.qk_rope_dim], axis=-1)
        return k, v, None

    def _entries(self, x_BSD: jax.Array) -> jax.Array:
        return x_BSD @ gather_param(self.kv, x_BSD.dtype)

    def _queries(self, x_BSD: jax.Array) -> jax.Array:
        q_BSHX = jnp.einsum("bsd,dhx->bshx", x_BSD, gather_param(self.q, x_BSD.dtype))
        return q_BSHX * self.config.logit_scale

    def _output(self, y_BSHV: jax.Array) -> jax.Array:
        return jnp.einsum("bshv,hvd->bsd", y_BSHV, gather_param(self.out, y_BSHV.dtype))
