"""The Decoder: embedding, a stack of dense layers, a stack of expert layers, final norm, head, MTP module."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from composer_jax.models.block import Block
from composer_jax.models.cache import Cache, write_layer, write_tokens
from composer_jax.models.config import ModelConfig
from composer_jax.models.embedding import Embedding
from composer_jax.models.mtp import MTPModule
from composer_jax.models.norm import RMSNorm
from composer_jax.models.parameter import matrix, use
from composer_jax.ops.attention import additive_mask


class Hidden(NamedTuple):
    """Output of the trunk."""

    last_BSD: jax.Array
    """Normalised states for the head."""
    trunk_BSD: jax.Array
    """States before the final norm, what an MTP module continues from."""
    counts_LE: jax.Array
    """Real tokens per expert and MoE layer, float32."""


class Decoder(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config, rngs=rngs)
        self.dense_layers = (
            stack(config, config.n_dense_layers, moe=False, rngs=rngs) if config.n_dense_layers else None
        )
        self.moe_layers = stack(config, config.n_moe_layers, moe=True, rngs=rngs)
        self.final_norm = RMSNorm(config.d_model, eps=config.norm_eps, dtype=config.param_dtype)
        if not config.tie_embeddings:
            self.head = matrix(
                rngs,
                (config.d_model, config.vocab_size),
                ("embed", None),
                fan_in=config.d_model,
                config=config,
            )
        if config.n_mtp_modules:
            self.mtp = MTPModule(config, rngs=rngs)

    def __call__(self, tokens_BS: jax.Array, positions_BS: jax.Array, segments_BS: jax.Array) -> Hidden:
        """Whole rows. Positions restart in every segment; segment 0 is padding; no segment sees another."""
        real_BS = segments_BS > 0
        masks = self._masks(lambda window: causal_mask(segments_BS, window))
        x_BSD = self.embedding(tokens_BS, positions_BS)

        def layer(x_BSD, block, windowed):
            return block(x_BSD, positions_BS, masks.of(windowed), real_BS)

        x_BSD, (_, counts_LE) = self._layers(layer, x_BSD)
        return Hidden(self.final_norm(x_BSD), x_BSD, counts_LE)

    def extend(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array,
        real_BS: jax.Array,
        cache: Cache,
        window: int | None = None,
    ) -> tuple[jax.Array, Cache]:
        """S new tokens per row after what the cache holds; returns normalised states [B,S,D] and the cache.

        Positions are those in the context (row b writes its latents there); entries with real_BS false write nothing.
        Attention reads the first `window` entries of the cache (default: all); the caller sees to it that no real
        position lies beyond.
        """
        window = cache.capacity if window is None else window
        cache = write_tokens(cache, tokens_BS, positions_BS, real_BS)
        entries, last = jnp.arange(window), positions_BS[..., None]
        masks = self._masks(
            lambda tokens: (entries <= last) & (entries > last - tokens) if tokens is not None else entries <= last
        )
        earlier = [
            self.embedding.lookup(jnp.take_along_axis(cache.tokens_BC, jnp.maximum(positions_BS - j, 0), axis=1))
            for j in self.embedding.offsets
        ]
        x_BSD = self.embedding.convolve(self.embedding.lookup(tokens_BS), earlier, positions_BS)

        def layer(carry, block, windowed):
            x_BSD, latents, index = carry

            def write(new_BSX):
                nonlocal latents
                latents, layer_cache = write_layer(latents, index, new_BSX, positions_BS, real_BS, window)
                return layer_cache

            x_BSD, _ = block.extend(x_BSD, positions_BS, masks.of(windowed), real_BS, write)
            return (x_BSD, latents, index + 1), None

        # The cache travels in the carry and is updated in place; as a scanned input and output it would be copied.
        carry, _ = self._layers(layer, (x_BSD, cache.latents_LBCX, jnp.int32(0)), remat=False)
        x_BSD, latents, _ = carry
        return self.final_norm(x_BSD), cache._replace(latents_LBCX=latents)

    def mtp_hidden(
        self, hidden: Hidden, tokens_BS: jax.Array, positions_BS: jax.Array, segments_BS: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """States whose logits at i predict token i+2, and the expert counts [E] of the module. The trunk is not
        moved."""
        # Shifted after embedding: taps of token i+1 reach back to token i, also where i is the first of a row.
        following = jnp.pad(self.embedding(tokens_BS, positions_BS), ((0, 0), (0, 1), (0, 0)))[:, 1:]
        return self.mtp(
            jax.lax.stop_gradient(hidden.trunk_BSD),
            jax.lax.stop_gradient(following),
            positions_BS,
            additive_mask(causal_mask(segments_BS)),
            segments_BS > 0,
        )

    def logits(self, hidden_BSD: jax.Array) -> jax.Array:
        """Float32 logits [..., vocab]."""
        if self.config.tie_embeddings:
            return self.embedding.logits(hidden_BSD)
        return jnp.einsum(
            "...d,dw->...w", hidden_BSD, use(self.head, hidden_BSD.dtype), preferred_element_type=jnp.float32
        )

    def _masks(self, mask: Callable[[int | None], jax.Array]) -> "Masks":
        """mask: which keys a query sees, given the length of the window or None."""
        window = self.config.sliding_window
        return Masks(additive_mask(mask(None)), None if window is None else additive_mask(mask(window)))

    def _layers(self, layer, carry, *, remat: bool | None = None):
        """Scans `layer(carry, block, whether it has the window)` over both stacks: the carry, what each stack gave."""
        config, given, first = self.config, [], 0
        for blocks, n in ((self.dense_layers, config.n_dense_layers), (self.moe_layers, config.n_moe_layers)):
            out = None
            if blocks is not None:
                windowed = jnp.array([config.has_window(first + i) for i in range(n)])
                carry, out = self._scan(layer, blocks, windowed, carry, config.remat if remat is None else remat)
            given.append(out)
            first += n
        return carry, given

    def _scan(self, layer, blocks: Block, windowed_L: jax.Array, carry, remat: bool):
        graph, stacked = nnx.split(blocks)

        def body(carry, inputs):
            state, windowed = inputs
            return layer(carry, nnx.merge(graph, state), windowed)

        if remat:
            body = jax.checkpoint(body)
        return jax.lax.scan(body, carry, (stacked, windowed_L), unroll=self.config.scan_unroll)


class Masks(NamedTuple):
    """Additive masks of the layers that see everything and, where there are any, of those with a window."""

    full: jax.Array
    window: jax.Array | None

    def of(self, windowed: jax.Array) -> jax.Array:
        return self.full if self.window is None else jnp.where(windowed, self.window, self.full)


def stack(config: ModelConfig, n: int, *, moe: bool, rngs: nnx.Rngs) -> Block:
    """n layers as one Block whose arrays have a leading layer axis."""

    @nnx.split_rngs(splits=n)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return Block(config, moe=moe, rngs=rngs)

    return make(rngs)


def causal_mask(segments_BS: jax.Array, window: int | None = None) -> jax.Array:
    """[B,S,S]: query s sees key t <= s of its own segment, and only the last `window` of them, itself included."""
    s = segments_BS.shape[1]
    same = segments_BS[:, :, None] == segments_BS[:, None, :]
    back = jnp.arange(s)[:, None] - jnp.arange(s)[None, :]
    return same & ((back >= 0) if window is None else (back >= 0) & (back < window))
