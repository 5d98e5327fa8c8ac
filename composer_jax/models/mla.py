"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1; K2 uses it unchanged).

    c = RMSNorm(x W_kv_down[:, :R])            one latent per token, shared by all heads
    k = [c W_k_up | rope(x W_kv_down[:, R:])]  the rotary part is shared by all heads
    v = c W_v_up
    q = [q_nope | rope(q_rope)] = x W_q        or RMSNorm(x W_q_down) W_q with a query rank

Forms of the same function: `__call__` expands keys and values (training); `extend` keeps the latent in a cache (R + P
floats per token instead of H (K + P + V)). For few new tokens it absorbs W_k_up into the query and W_v_up into the
output (decoding); for many it expands the keys and values of a block of the cache at a time (prefill).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from composer_jax.errors import UserError
from composer_jax.models.attention import AttentionCost, CacheEntry
from composer_jax.models.config import ModelConfig
from composer_jax.models.norm import RMSNorm
from composer_jax.models.parameter import gather_param, matrix
from composer_jax.models.projection import fake_quantize, project
from composer_jax.models.rope import rope_angles, rotate
from composer_jax.ops.cached_attention import KeyRange, LayerCache, attend_cache
from composer_jax.ops.entry_parts import EntryParts
from composer_jax.ops.max_logits import max_logits
from composer_jax.ops.packed_attention import AttentionMask, attend_rows
from composer_jax.ops.vma import match_vma
from composer_jax.parallel import context
from composer_jax.parallel.sharding import psum_tensor


class MultiHeadLatentAttention(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d, h, r = config.d_model, config.n_heads, _latent_rank(config)
        k, p, v = config.qk_nope_dim, config.qk_rope_dim, config.v_head_dim
        self.config, self.rank = config, r
        q_in, q_axis = d, "embed"
        if config.q_lora_rank is not None:
            q_in, q_axis = config.q_lora_rank, "rank"
            self.q_down = matrix(rngs, (d, q_in), ("embed", None), config=config)
            self.q_norm = RMSNorm(q_in, eps=config.latent_norm_eps, dtype=config.param_dtype)
        self.q = matrix(rngs, (q_in, h, k + p), (q_axis, "heads", None), config=config)
        self.kv_down = matrix(rngs, (d, r + p), ("embed", None), config=config)
        self.kv_norm = RMSNorm(r, eps=config.latent_norm_eps, dtype=config.param_dtype)
        self.k_up = matrix(rngs, (r, h, k), ("rank", "heads", None), config=config)
        self.v_up = matrix(rngs, (r, h, v), ("rank", "heads", None), config=config)
        self.out = matrix(rngs, (h, v, d), ("heads", None, "embed"), in_axis=(0, 1), config=config)

    @classmethod
    def check_config(cls, config: ModelConfig) -> None:
        _latent_rank(config)
        for field in ("n_kv_heads", "qk_norm", "qkv_bias", "out_bias", "attention_sinks"):
            if getattr(config, field):
                raise UserError(
                    f"{field}={getattr(config, field)} is a field of grouped-query attention; leave it out, or set "
                    "kv_lora_rank=None for grouped-query attention."
                )

    @classmethod
    def cache_entry(cls, config: ModelConfig) -> CacheEntry:
        """The normalised latent and the rotated shared key: R+P numbers, the same on all devices of `tensor`."""
        return CacheEntry((_latent_rank(config), config.qk_rope_dim), None)

    @classmethod
    def cost(cls, config: ModelConfig) -> AttentionCost:
        c, r, x = config, _latent_rank(config), config.qk_nope_dim + config.qk_rope_dim
        query = c.d_model * c.n_heads * x
        if c.q_lora_rank is not None:
            query = c.q_lora_rank * (c.d_model + c.n_heads * x)
        expansion = r * c.n_heads * (c.qk_nope_dim + c.v_head_dim)
        projections = query + c.d_model * (r + c.qk_rope_dim) + expansion + c.n_heads * c.v_head_dim * c.d_model
        return AttentionCost(projections, c.n_heads * (x + c.v_head_dim))

    @classmethod
    def check_qk_clip(cls, config: ModelConfig) -> None:
        pass  # both parts of the queries have weights of their own for every head

    @classmethod
    def scale_logits(cls, config: ModelConfig, weights: Any, factors_LH: jax.Array) -> Any:
        """See ClippedAttention.scale_logits: Kimi K2's rule (arXiv 2507.20534, section 2.1).

        The position-free queries and keys take the root of the factor each. The rotary queries take all of it, because
        the rotary key is shared by all heads and stays as it is.
        """
        root_LH1, factors_LH1 = jnp.sqrt(factors_LH)[..., None], factors_LH[..., None]
        q, k_up, k, p = weights["q"], weights["k_up"], config.qk_nope_dim, config.qk_rope_dim
        of_queries_LHX = jnp.concatenate([jnp.repeat(root_LH1, k, -1), jnp.repeat(factors_LH1, p, -1)], axis=-1)
        return weights | {
            "q": (q * of_queries_LHX[:, None]).astype(q.dtype),
            "k_up": (k_up * root_LH1[:, None]).astype(k_up.dtype),
        }

    def angles(self, positions_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = self.config
        return rope_angles(positions_BS, c.qk_rope_dim, c.rope_theta, c.rope_scaling)

    def query_latents(self, x_BSD: jax.Array) -> jax.Array:
        """Returns the input of the query projection: the latent of rank q_lora_rank, or x itself."""
        if self.config.q_lora_rank is None:
            return x_BSD
        return self.q_norm(project(x_BSD, gather_param(self.q_down, x_BSD.dtype), self.config.precision))

    def queries(
        self, latents: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the position-free and the rotary queries of the weight's heads, [B,S,H,K] and [B,S,H,P]."""
        q = project(latents, weight, self.config.precision, sharded="out")
        q_nope, q_rope = jnp.split(q, [self.config.qk_nope_dim], axis=-1)
        return q_nope, rotate(q_rope, cos[:, :, None], sin[:, :, None], halves=self.config.rope_halves)

    def latents(self, x_BSD: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Returns the cache entries [B,S,R+P]: the normalised latent and the rotated shared key."""
        down = project(x_BSD, gather_param(self.kv_down, x_BSD.dtype), self.config.precision)
        latent, k_rope = jnp.split(down, [self.rank], axis=-1)
        return jnp.concatenate(
            [self.kv_norm(latent), rotate(k_rope, cos, sin, halves=self.config.rope_halves)], axis=-1
        )

    def __call__(
        self, x_BSD: jax.Array, positions_BS: jax.Array, mask: AttentionMask, windowed: jax.Array | None = None
    ) -> jax.Array:
        """Training form. Devices that share rows exchange latents, which are 1/35 of K2's keys and values, and each
        device expands them to all keys and values (Composer 2, arXiv 2603.24477, section 5)."""
        return self._attend(x_BSD, positions_BS, mask, windowed, measures_logits=False)[0]

    def with_max_logits(
        self, x_BSD: jax.Array, positions_BS: jax.Array, mask: AttentionMask, windowed: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """See ClippedAttention.with_max_logits."""
        y_BSD, max_H = self._attend(x_BSD, positions_BS, mask, windowed, measures_logits=True)
        assert max_H is not None
        return y_BSD, max_H

    def _attend(
        self,
        x_BSD: jax.Array,
        positions_BS: jax.Array,
        mask: AttentionMask,
        windowed: jax.Array | None,
        *,
        measures_logits: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the output, and the largest logit of each head if `measures_logits`."""
        dtype, precision = x_BSD.dtype, self.config.precision
        cos, sin = self.angles(positions_BS)
        latents_BTX = context.gather_row(checkpoint_name(self.latents(x_BSD, cos, sin), "latents"))

        def heads(q, k_up, v_up, out, query_latents, latents_BTX):
            """Returns the contribution of the heads with these weights to the output, [B,S,D], and their max logits."""
            q_nope, q_rope = self.queries(query_latents, q, cos, sin)
            c_BTR, k_rope = jnp.split(latents_BTX, [self.rank], axis=-1)
            k_nope, v_BTHV = (project(c_BTR, up, precision, sharded="out") for up in (k_up, v_up))
            q_BSHX = jnp.concatenate([q_nope, q_rope], axis=-1) * self.config.logit_scale
            shared = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], k_rope.shape[-1]))
            k_BTHX = jnp.concatenate([k_nope, shared], axis=-1)
            y_BSHV = attend_rows(q_BSHX, k_BTHX, v_BTHV, mask, windowed)
            max_H = max_logits(q_BSHX, k_BTHX, mask, windowed) if measures_logits else None
            return project(y_BSHV, out, precision, contracted=2, sharded="in"), max_H

        weights = [gather_param(w, dtype) for w in (self.q, self.k_up, self.v_up, self.out)]
        latents = self.query_latents(x_BSD), latents_BTX
        y_BSD, max_H = _sum_heads(heads, self.config.heads_at_once, weights, latents)
        return psum_tensor(y_BSD), max_H

    def extend(
        self, x_BSD: jax.Array, positions_BS: jax.Array, keys: KeyRange, write: Callable[[jax.Array], LayerCache]
    ) -> jax.Array:
        """Decode form: against the cache, in which `write` stores the new latents [B,S,R+P].

        Few tokens per row are computed with absorbed projections, many against keys and values that are expanded from
        the latents, one block of pages after the other (`expands`).

        With a precision, the cache holds the rounded latents that the training form multiplies with the rounded W_k_up
        and W_v_up. So all forms round the same numbers, although they multiply them in another order.
        """
        dtype, r, precision = x_BSD.dtype, self.rank, self.config.precision
        cos, sin = self.angles(positions_BS)
        q_nope, q_rope = self.queries(self.query_latents(x_BSD), gather_param(self.q, dtype), cos, sin)
        entries_BSX = self.latents(x_BSD, cos, sin)
        if precision != "none":
            rounded = fake_quantize(entries_BSX[..., :r], -1, precision)
            entries_BSX = jnp.concatenate([rounded, entries_BSX[..., r:]], axis=-1)
        cache = write(entries_BSX)
        k_up, v_up = (fake_quantize(gather_param(up, dtype), 0, precision) for up in (self.k_up, self.v_up))
        attend = self._attend_expanded if self.expands(x_BSD.shape[1]) else self._attend_absorbed
        y_BSHV = attend(q_nope, q_rope, k_up, v_up, cache, keys)
        return psum_tensor(project(y_BSHV, gather_param(self.out, dtype), precision, contracted=2, sharded="in"))

    def expands(self, n_tokens: int) -> bool:
        """Returns whether `extend` expands keys and values for n_tokens new tokens per row.

        Multiplications per head and key of a long context, for S tokens:
            absorbed   2 S (R + P)                      whole entries are keys and values
            expanded   S (K + P + V) + R (K + V)        the second term expands the key and the value once
        With K2's widths (512, 64, 128, 128) the expanded form has fewer from 158 tokens on, and 3.6 times fewer in the
        limit.
        """
        c, r = self.config, self.rank
        absorbed, expanded = 2 * (r + c.qk_rope_dim), c.qk_nope_dim + c.qk_rope_dim + c.v_head_dim
        return n_tokens * (absorbed - expanded) > r * (c.qk_nope_dim + c.v_head_dim)

    def _attend_absorbed(
        self,
        q_nope: jax.Array,
        q_rope: jax.Array,
        k_up: jax.Array,
        v_up: jax.Array,
        cache: LayerCache,
        keys: KeyRange,
    ) -> jax.Array:
        """Returns the weighted values [B,S,H,V], with W_k_up in the queries and W_v_up after the sum."""
        r, c = self.rank, self.config
        q_latent = jnp.einsum("bshk,rhk->bshr", q_nope, k_up)
        q_BSHX = jnp.concatenate([q_latent, q_rope], axis=-1) * c.logit_scale

        parts = EntryParts(1, (r, c.qk_rope_dim), r, value_in_key=True)
        has_window = c.sliding_window is not None
        y_latent = attend_cache(q_BSHX, cache, parts, keys, form=c.attention_form, has_window=has_window)
        return jnp.einsum("bshr,rhv->bshv", y_latent, v_up)

    def _attend_expanded(
        self,
        q_nope: jax.Array,
        q_rope: jax.Array,
        k_up: jax.Array,
        v_up: jax.Array,
        cache: LayerCache,
        keys: KeyRange,
    ) -> jax.Array:
        """Returns what `_attend_absorbed` does, from the keys and values that the latents of a block expand to."""
        c, dtype = self.config, q_nope.dtype
        q_BSHX = jnp.concatenate([q_nope, q_rope], axis=-1) * c.logit_scale

        def expand(values_BTX: jax.Array, scales_BTG: jax.Array | None):
            parts = jnp.split(values_BTX, [self.rank], axis=-1)
            if scales_BTG is not None:
                parts = [part * scale for part, scale in zip(parts, jnp.split(scales_BTG, 2, axis=-1), strict=True)]
            c_BTR, k_rope = (part.astype(dtype) for part in parts)
            k_nope, v_BTHV = (jnp.einsum("btr,rhk->bthk", c_BTR, up) for up in (k_up, v_up))
            shared = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], k_rope.shape[-1]))
            return jnp.concatenate([k_nope, shared], axis=-1), v_BTHV, None

        width = q_BSHX.shape[2] * (q_BSHX.shape[3] + v_up.shape[2])
        has_window = c.sliding_window is not None
        return attend_cache(q_BSHX, cache, expand, keys, has_window=has_window, expanded_width=width)


def _sum_heads(
    heads: Callable[..., tuple[jax.Array, jax.Array | None]],
    size: int | None,
    weights: Sequence[jax.Array],
    latents: Sequence[jax.Array],
) -> tuple[jax.Array, jax.Array | None]:
    """Returns heads(*weights, *latents), computed for `size` heads at a time (None: all) and summed in float32.

    The second output of `heads`, [H] or None, is concatenated instead.

    The backward pass recomputes each group's keys and values and sums its gradients of the latents in float32; the
    weighted values are kept, so that attention itself is not recomputed.
    """
    dtype, count = latents[0].dtype, weights[0].shape[1]
    if size is None or size >= count:
        return heads(*weights, *latents)
    if count % size:
        raise UserError(
            f"heads_at_once={size} does not divide the {count} heads of a device; use a divisor of {count}."
        )

    def grouped(weight: jax.Array, axis: int) -> jax.Array:
        cut = weight.reshape(*weight.shape[:axis], count // size, size, *weight.shape[axis + 1 :])
        return jnp.moveaxis(cut, axis, 0)

    stacked = [grouped(w, axis) for w, axis in zip(weights, (1, 1, 1, 0), strict=True)]
    wide = [array.astype(jnp.float32) for array in latents]

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("attention"))
    def add(total_BSD, weights):
        y_BSD, max_H = heads(*weights, *(array.astype(dtype) for array in wide))
        return total_BSD + y_BSD.astype(jnp.float32), max_H

    zeros = jnp.zeros((*latents[0].shape[:2], weights[3].shape[-1]), jnp.float32)
    zeros, *_ = match_vma(zeros, *stacked, *wide)
    total_BSD, max_GH = jax.lax.scan(add, zeros, stacked)
    return total_BSD.astype(dtype), None if max_GH is None else max_GH.reshape(-1)


def _latent_rank(config: ModelConfig) -> int:
    if config.kv_lora_rank is None:
        raise UserError("kv_lora_rank=None: latent attention needs the width of its latent; set it to 1 or more.")
    return config.kv_lora_rank
