"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1; K2 uses it unchanged).

    c = RMSNorm(x W_kv_down[:, :R])          one latent per token, shared by all heads
    k = [c W_k_up | rope(x W_kv_down[:, R:])] the rotary part is shared by all heads
    v = c W_v_up
    q = [q_nope | rope(q_rope)] = x W_q       or RMSNorm(x W_q_down) W_q with a query rank

Two forms of the same function: `__call__` expands keys and values (training), `extend` keeps the latent in a cache and
absorbs W_k_up into the query and W_v_up into the output (decoding: R + P floats per token instead of H (K + P + V)).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from composer_jax.errors import UserError
from composer_jax.models.cache import Entries
from composer_jax.models.config import ModelConfig
from composer_jax.models.norm import RMSNorm
from composer_jax.models.parameter import gather_param, matrix
from composer_jax.models.rope import rope_angles, rotate
from composer_jax.ops.attention import Scales, attend
from composer_jax.ops.row_attention import AttentionMask, attend_rows
from composer_jax.ops.vma import match_vma
from composer_jax.parallel import context
from composer_jax.parallel.sharding import psum_tensor


class MultiHeadLatentAttention(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d, h, r = config.d_model, config.n_heads, config.kv_lora_rank
        k, p, v = config.qk_nope_dim, config.qk_rope_dim, config.v_head_dim
        self.config = config
        if config.q_lora_rank is None:
            q_in = d
        else:
            q_in = config.q_lora_rank
            self.q_down = matrix(rngs, (d, q_in), ("embed", None), fan_in=d, config=config)
            self.q_norm = RMSNorm(q_in, eps=config.latent_norm_eps, dtype=config.param_dtype)
        q_axis = "embed" if config.q_lora_rank is None else "rank"
        self.q = matrix(rngs, (q_in, h, k + p), (q_axis, "heads", None), fan_in=q_in, config=config)
        self.kv_down = matrix(rngs, (d, r + p), ("embed", None), fan_in=d, config=config)
        self.kv_norm = RMSNorm(r, eps=config.latent_norm_eps, dtype=config.param_dtype)
        self.k_up = matrix(rngs, (r, h, k), ("rank", "heads", None), fan_in=r, config=config)
        self.v_up = matrix(rngs, (r, h, v), ("rank", "heads", None), fan_in=r, config=config)
        self.out = matrix(rngs, (h, v, d), ("heads", None, "embed"), fan_in=h * v, config=config)

    def angles(self, positions_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = self.config
        return rope_angles(positions_BS, c.qk_rope_dim, c.rope_theta, c.yarn)

    def query_latents(self, x_BSD: jax.Array) -> jax.Array:
        """What queries are made from: the latent of rank q_lora_rank, or x itself."""
        return x_BSD if self.config.q_lora_rank is None else self.q_norm(x_BSD @ gather_param(self.q_down, x_BSD.dtype))

    def queries(
        self, latents: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Position-free and rotary queries of the weight's heads, [B,S,H,K] and [B,S,H,P]."""
        q = jnp.einsum("bsd,dhk->bshk", latents, weight)
        q_nope, q_rope = jnp.split(q, [self.config.qk_nope_dim], axis=-1)
        return q_nope, rotate(q_rope, cos[:, :, None], sin[:, :, None], halves=self.config.rope_halves)

    def latents(self, x_BSD: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """What the cache stores: [B,S,R+P], the normalised latent and the rotated shared key."""
        latent, k_rope = jnp.split(x_BSD @ gather_param(self.kv_down, x_BSD.dtype), [self.config.kv_lora_rank], axis=-1)
        return jnp.concatenate(
            [self.kv_norm(latent), rotate(k_rope, cos, sin, halves=self.config.rope_halves)], axis=-1
        )

    def __call__(
        self, x_BSD: jax.Array, positions_BS: jax.Array, mask: AttentionMask, windowed: jax.Array | None = None
    ) -> jax.Array:
        """Attention within the rows (ops/row_attention.py). Devices that share rows exchange latents, which are 1/35 of
        K2's keys and values, and each makes all keys and values from them (Composer 2, arXiv 2603.24477, section 5)."""
        dtype = x_BSD.dtype
        cos, sin = self.angles(positions_BS)
        latents_BTX = context.gather_row(checkpoint_name(self.latents(x_BSD, cos, sin), "latents"))

        def heads(q, k_up, v_up, out, query_latents, latents_BTX):
            """What some heads contribute to the output, given their weights."""
            q_nope, q_rope = self.queries(query_latents, q, cos, sin)
            c_BTR, k_rope = jnp.split(latents_BTX, [self.config.kv_lora_rank], axis=-1)
            k_nope, v_BTHV = (jnp.einsum("btr,rhk->bthk", c_BTR, up) for up in (k_up, v_up))
            q_BSHX = jnp.concatenate([q_nope, q_rope], axis=-1) * self.config.logit_scale
            shared = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], k_rope.shape[-1]))
            k_BTHX = jnp.concatenate([k_nope, shared], axis=-1)
            y_BSHV = attend_rows(q_BSHX, k_BTHX, v_BTHV, mask, windowed)
            return jnp.einsum("bshv,hvd->bsd", y_BSHV, out)

        weights = [gather_param(w, dtype) for w in (self.q, self.k_up, self.v_up, self.out)]
        given = self.query_latents(x_BSD), latents_BTX
        size, count = self.config.heads_at_once, weights[0].shape[1]
        y_BSD = heads(*weights, *given) if size is None or size >= count else _by_groups(heads, size, weights, given)
        return psum_tensor(y_BSD)

    def extend(
        self, x_BSD: jax.Array, positions_BS: jax.Array, bias_BSC: jax.Array, write: Callable[[jax.Array], Entries]
    ) -> jax.Array:
        """Attention of S new tokens per row against the cache.

        Args:
          write: stores the new latents [B,S,R+P] and returns those of the layer [B,C,R+P].
          bias_BSC: additive mask of cache entries for each new token.
        """
        dtype, r = x_BSD.dtype, self.config.kv_lora_rank
        cos, sin = self.angles(positions_BS)
        q_nope, q_rope = self.queries(self.query_latents(x_BSD), gather_param(self.q, dtype), cos, sin)
        kept_BCX, scales_BCG = write(self.latents(x_BSD, cos, sin))
        scales = None
        if scales_BCG is not None:
            of_latent, of_rope = jnp.split(scales_BCG, 2, axis=-1)
            scales = Scales((r, self.config.qk_rope_dim), (of_latent, of_rope), of_latent)
        q_latent = jnp.einsum("bshk,rhk->bshr", q_nope, gather_param(self.k_up, dtype))
        q_BSHX = jnp.concatenate([q_latent, q_rope], axis=-1) * self.config.logit_scale
        y_latent = attend(q_BSHX, kept_BCX[:, :, None], kept_BCX[:, :, None, :r], bias_BSC, scales=scales)
        y_BSHV = jnp.einsum("bshr,rhv->bshv", y_latent, gather_param(self.v_up, dtype))
        return psum_tensor(jnp.einsum("bshv,hvd->bsd", y_BSHV, gather_param(self.out, dtype)))


def _by_groups(heads: Callable, size: int, weights: list[jax.Array], given: tuple[jax.Array, ...]) -> jax.Array:
    """heads(*weights, *given) for `size` heads at a time, added up in float32.

    In the backward pass each group's keys and values are made again, and its gradient of what is given is added up in
    float32 as well; the mixed values are kept, so that attention itself is not computed again.
    """
    dtype, count = given[0].dtype, weights[0].shape[1]
    if count % size:
        raise UserError(
            f"heads_at_once={size} does not divide the {count} heads of a device; use a divisor of {count}."
        )

    def grouped(weight: jax.Array, axis: int) -> jax.Array:
        cut = weight.reshape(*weight.shape[:axis], count // size, size, *weight.shape[axis + 1 :])
        return jnp.moveaxis(cut, axis, 0)

    stacked = [grouped(w, axis) for w, axis in zip(weights, (1, 1, 1, 0), strict=True)]
    wide = [array.astype(jnp.float32) for array in given]

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("attention"))
    def add(total_BSD, weights):
        y_BSD = heads(*weights, *(array.astype(dtype) for array in wide))
        return total_BSD + y_BSD.astype(jnp.float32), None

    zeros = jnp.zeros((*given[0].shape[:2], weights[3].shape[-1]), jnp.float32)
    zeros, *_ = match_vma(zeros, *stacked, *wide)
    total_BSD, _ = jax.lax.scan(add, zeros, stacked)
    return total_BSD.astype(dtype)
