"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) as in Qwen3, GLM-4.5 and gpt-oss.

    q = norm(x W_q + b_q)    k = norm(x W_k + b_k)    v = x W_v + b_v
    y = attention(rope(q), rope(k), v) W_o + b_o

Each of the N heads of keys and values serves H/N heads of queries. The norm is over each head's width (`qk_norm`). The
first P numbers of a head are rotated, the other K are not. The cache stores rotated keys and values.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from composer_jax.errors import UserError
from composer_jax.models.attention import AttentionCost, CacheEntry
from composer_jax.models.config import ModelConfig
from composer_jax.models.norm import RMSNorm
from composer_jax.models.parameter import gather_param, matrix, parameter
from composer_jax.models.projection import project
from composer_jax.models.rope import rope_angles, rotate
from composer_jax.ops.cached_attention import KeyRange, LayerCache, attend_cache
from composer_jax.ops.entry_parts import EntryParts
from composer_jax.ops.max_logits import max_logits
from composer_jax.ops.packed_attention import AttentionMask, attend_rows
from composer_jax.parallel import context
from composer_jax.parallel.sharding import axis_size, psum_tensor


class GroupedQueryAttention(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d, h, n = config.d_model, config.n_heads, _kv_heads(config)
        x, v = config.qk_nope_dim + config.qk_rope_dim, config.v_head_dim
        self.config = config
        self.q = matrix(rngs, (d, h, x), ("embed", "heads", None), config=config)
        self.k = matrix(rngs, (d, n, x), ("embed", "heads", None), config=config)
        self.v = matrix(rngs, (d, n, v), ("embed", "heads", None), config=config)
        self.out = matrix(rngs, (h, v, d), ("heads", None, "embed"), in_axis=(0, 1), config=config)
        zeros = lambda *shape: jnp.zeros(shape, config.param_dtype)  # noqa: E731
        if config.qkv_bias:
            self.q_bias = parameter(zeros(h, x), "heads", None)
            self.k_bias = parameter(zeros(n, x), "heads", None)
            self.v_bias = parameter(zeros(n, v), "heads", None)
        if config.out_bias:
            self.out_bias = parameter(zeros(d), "embed")
        if config.qk_norm:
            self.q_norm = RMSNorm(x, eps=config.norm_eps, dtype=config.param_dtype)
            self.k_norm = RMSNorm(x, eps=config.norm_eps, dtype=config.param_dtype)
        if config.attention_sinks:
            self.sinks = parameter(zeros(h), "heads")

    @classmethod
    def check_config(cls, config: ModelConfig) -> None:
        _kv_heads(config)
        for field in ("kv_lora_rank", "q_lora_rank", "heads_at_once"):
            if getattr(config, field) is not None:
                raise UserError(
                    f"{field}={getattr(config, field)} is a field of latent attention; leave it out with grouped-query "
                    "attention (kv_lora_rank=None)."
                )

    @classmethod
    def cache_entry(cls, config: ModelConfig) -> CacheEntry:
        """Keys and values of this device's heads: N(K+P+V) numbers, one scale per head."""
        heads = _kv_heads(config) // axis_size("tensor")
        groups = (config.qk_nope_dim + config.qk_rope_dim,) * heads + (config.v_head_dim,) * heads
        return CacheEntry(groups, "tensor")

    @classmethod
    def cost(cls, config: ModelConfig) -> AttentionCost:
        x, v = config.qk_nope_dim + config.qk_rope_dim, config.v_head_dim
        projections = config.d_model * (config.n_heads * x + _kv_heads(config) * (x + v))
        return AttentionCost(projections + config.n_heads * v * config.d_model, config.n_heads * (x + v))

    @classmethod
    def check_qk_clip(cls, config: ModelConfig) -> None:
        if config.qk_norm:
            raise UserError(
                "optimizer.qk_clip cannot scale the logits of single heads with model.qk_norm=True, whose norm undoes "
                "it and bounds the logits itself; leave optimizer.qk_clip out."
            )

    @classmethod
    def scale_logits(cls, config: ModelConfig, weights: Any, factors_LH: jax.Array) -> Any:
        """See ClippedAttention.scale_logits.

        Where heads share keys the queries take the whole factor, so that no head changes the logits of another: Kimi
        K2's rule for a shared part (arXiv 2507.20534, section 2.1: the shared rotary key stays as it is). Where every
        head has keys of its own, queries and keys take its root, as in the same section.
        """
        has_own_keys = _kv_heads(config) == config.n_heads
        factors_LH = jnp.sqrt(factors_LH) if has_own_keys else factors_LH
        names = ("q", "q_bias", "k", "k_bias") if has_own_keys else ("q", "q_bias")
        scaled = {name: weights[name] for name in names if name in weights}
        for name, weight in scaled.items():
            factors = factors_LH[..., None] if name.endswith("bias") else factors_LH[:, None, :, None]
            scaled[name] = (weight * factors).astype(weight.dtype)
        return weights | scaled

    def __call__(
        self, x_BSD: jax.Array, positions_BS: jax.Array, mask: AttentionMask, windowed: jax.Array | None = None
    ) -> jax.Array:
        """Training form. Devices that share rows exchange keys and values."""
        q_BSHX, k_BTNX, v_BTNV = self._whole_row(x_BSD, positions_BS)
        return self._output(attend_rows(q_BSHX, k_BTNX, v_BTNV, mask, windowed, self._sinks()))

    def with_max_logits(
        self, x_BSD: jax.Array, positions_BS: jax.Array, mask: AttentionMask, windowed: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """See ClippedAttention.with_max_logits. Attention sinks are not logits of queries and keys."""
        q_BSHX, k_BTNX, v_BTNV = self._whole_row(x_BSD, positions_BS)
        y_BSD = self._output(attend_rows(q_BSHX, k_BTNX, v_BTNV, mask, windowed, self._sinks()))
        return y_BSD, max_logits(q_BSHX, k_BTNX, mask, windowed)

    def extend(
        self, x_BSD: jax.Array, positions_BS: jax.Array, keys: KeyRange, write: Callable[[jax.Array], LayerCache]
    ) -> jax.Array:
        """Decode form. `write` stores the new keys and values, flattened to [B,S,N(K+P+V)]."""
        angles = self._angles(positions_BS)
        k, v = self._keys_and_values(x_BSD, angles)
        flat = jnp.concatenate([k.reshape(*k.shape[:2], -1), v.reshape(*v.shape[:2], -1)], axis=-1)
        parts = EntryParts(k.shape[2], (k.shape[3],), v.shape[3])
        q_BSHX, cache = self._queries(x_BSD, angles), write(flat)
        form, has_window = self.config.attention_form, self.config.sliding_window is not None
        y_BSHV = attend_cache(q_BSHX, cache, parts, keys, self._sinks(), form=form, has_window=has_window)
        return self._output(y_BSHV)

    def _whole_row(self, x_BSD: jax.Array, positions_BS: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the queries of this device's positions, and keys and values of the whole row."""
        angles = self._angles(positions_BS)
        k_BTNX, v_BTNV = map(context.gather_row, self._keys_and_values(x_BSD, angles))
        return self._queries(x_BSD, angles), k_BTNX, v_BTNV

    def _angles(self, positions_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns cos and sin for every head, [B,S,1,P/2]."""
        c = self.config
        cos, sin = rope_angles(positions_BS, c.qk_rope_dim, c.rope_theta, c.rope_scaling)
        return cos[:, :, None], sin[:, :, None]

    def _rotated(self, x_BSHX: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
        rope, rest = jnp.split(x_BSHX, [self.config.qk_rope_dim], axis=-1)
        return jnp.concatenate([rotate(rope, *angles, halves=self.config.rope_halves), rest], axis=-1)

    def _project(self, x_BSD: jax.Array, weight: nnx.Param[jax.Array], bias: str) -> jax.Array:
        y_BSHX = project(x_BSD, gather_param(weight, x_BSD.dtype), self.config.precision, sharded="out")
        return y_BSHX + gather_param(getattr(self, bias), x_BSD.dtype) if self.config.qkv_bias else y_BSHX

    def _keys_and_values(self, x_BSD: jax.Array, angles: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        k, v = self._project(x_BSD, self.k, "k_bias"), self._project(x_BSD, self.v, "v_bias")
        return self._rotated(self.k_norm(k) if self.config.qk_norm else k, angles), v

    def _queries(self, x_BSD: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
        q = self._project(x_BSD, self.q, "q_bias")
        return self._rotated(self.q_norm(q) if self.config.qk_norm else q, angles) * self.config.logit_scale

    def _sinks(self) -> jax.Array | None:
        return gather_param(self.sinks, jnp.float32) if self.config.attention_sinks else None

    def _output(self, y_BSHV: jax.Array) -> jax.Array:
        out_HVD = gather_param(self.out, y_BSHV.dtype)
        y_BSD = psum_tensor(project(y_BSHV, out_HVD, self.config.precision, contracted=2, sharded="in"))
        return y_BSD + gather_param(self.out_bias, y_BSHV.dtype) if self.config.out_bias else y_BSD


def _kv_heads(config: ModelConfig) -> int:
    n = config.n_kv_heads
    if n is None or n < 1 or config.n_heads % n:
        raise UserError(
            f"n_kv_heads={n} must divide n_heads={config.n_heads} with grouped-query attention; use a divisor, or set "
            "kv_lora_rank for latent attention."
        )
    return n
