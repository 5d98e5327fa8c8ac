"""The Decoder: embedding, a stack of dense layers, a stack of expert layers, final norm, head, MTP modules."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from composer_jax.models.block import Block
from composer_jax.models.cache import Cache, group_widths, write_layer, write_tokens
from composer_jax.models.config import ModelConfig
from composer_jax.models.embedding import Embedding
from composer_jax.models.mtp import MTPModule
from composer_jax.models.norm import RMSNorm
from composer_jax.models.parameter import gather_param, matrix
from composer_jax.models.router_stats import RouterStats
from composer_jax.ops.attention import additive_mask
from composer_jax.ops.row_attention import AttentionMask
from composer_jax.parallel import context
from composer_jax.parallel.sharding import axis_size

Module = TypeVar("Module", bound=nnx.Module)


class Hidden(NamedTuple):
    """Output of the trunk."""

    last_BSD: jax.Array
    """Normalised states for the head."""
    router_stats: RouterStats
    """Of every MoE layer, with a leading axis of layers."""


class Decoder(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config, rngs=rngs)
        block = lambda moe: lambda rngs: Block(config, moe=moe, rngs=rngs)  # noqa: E731
        self.dense_layers = stack(config.n_dense_layers, block(False), rngs) if config.n_dense_layers else None
        self.moe_layers = stack(config.n_moe_layers, block(True), rngs)
        self.final_norm = RMSNorm(config.d_model, eps=config.norm_eps, dtype=config.param_dtype)
        if not config.tie_embeddings:
            self.head = matrix(
                rngs,
                (config.d_model, config.vocab_size),
                ("embed", "vocab"),
                fan_in=config.d_model,
                config=config,
            )
        if config.n_mtp_modules:
            self.mtp = stack(config.n_mtp_modules, lambda rngs: MTPModule(config, rngs=rngs), rngs)

    def __call__(self, tokens_BS: jax.Array, positions_BS: jax.Array, segments_BS: jax.Array) -> Hidden:
        """Whole rows. Positions restart in every segment; segment 0 is padding; no segment sees another."""
        real_BS, mask = segments_BS > 0, self._attention_mask(segments_BS)
        x_BSD = self.embedding(tokens_BS, positions_BS)

        def layer(x_BSD, block, windowed):
            return block(x_BSD, positions_BS, mask, windowed, real_BS)

        x_BSD, (_, stats) = self._layers(layer, x_BSD)
        return Hidden(self.final_norm(x_BSD), stats)

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
        groups = group_widths(self.config)
        entries, last = jnp.arange(window), positions_BS[..., None]
        seen = entries <= last
        full = additive_mask(seen)
        near = (
            None
            if self.config.sliding_window is None
            else additive_mask(seen & (entries > last - self.config.sliding_window))
        )
        earlier = [
            self.embedding.lookup(jnp.take_along_axis(cache.tokens_BC, jnp.maximum(positions_BS - j, 0), axis=1))
            for j in self.embedding.offsets
        ]
        x_BSD = self.embedding.convolve(self.embedding.lookup(tokens_BS), earlier, positions_BS)

        def layer(carry, block, windowed):
            x_BSD, cache, index = carry

            def write(new_BSX):
                nonlocal cache
                cache, entries = write_layer(cache, index, new_BSX, positions_BS, real_BS, window, groups)
                return entries

            bias = full if near is None else jnp.where(windowed, near, full)
            x_BSD, _ = block.extend(x_BSD, positions_BS, bias, real_BS, write)
            return (x_BSD, cache, index + 1), None

        # The cache travels in the carry and is updated in place; as a scanned input and output it would be copied.
        (x_BSD, cache, _), _ = self._layers(layer, (x_BSD, cache, jnp.int32(0)), remat=False)
        return self.final_norm(x_BSD), cache

    def mtp_hidden(
        self, hidden: Hidden, tokens_BS: jax.Array, positions_BS: jax.Array, segments_BS: jax.Array
    ) -> tuple[jax.Array, RouterStats]:
        """What the MTP modules say, [M,B,S,D] for the head, and their loads. The trunk is not moved.

        The logits of module k (from 1) at position i predict token i+k+1. It continues from the states of module k-1;
        the first from the trunk's normalised ones, which is what vLLM gives to the published weights.
        """
        real_BS, mask = segments_BS > 0, dataclasses.replace(self._attention_mask(segments_BS), window=None)

        def layer(carry, module, _):
            states_BSD, ahead_BSD = carry
            ahead_BSD = context.shift_left(ahead_BSD)
            states_BSD, said_BSD, stats = module(states_BSD, ahead_BSD, positions_BS, mask, real_BS)
            return (states_BSD, ahead_BSD), (said_BSD, stats)

        # Moved on after embedding: taps of token i+1 reach back to token i, also where i is the first of a row.
        start = jax.lax.stop_gradient((hidden.last_BSD, self.embedding(tokens_BS, positions_BS)))
        everywhere = jnp.zeros(self.config.n_mtp_modules, bool)
        return self._scan(layer, self.mtp, everywhere, start, self.config.remat)[1]

    def head_weight(self) -> jax.Array:
        """[D,W] in the compute dtype; W is this device's part of the vocabulary. Fetch it once for many positions."""
        dtype = self.config.dtype
        return (
            gather_param(self.embedding.table, dtype).T
            if self.config.tie_embeddings
            else gather_param(self.head, dtype)
        )

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits [..., vocab] of all words."""
        return all_gather_vocab(head_logits(hidden, self.head_weight()))

    def _attention_mask(self, segments_BS: jax.Array) -> AttentionMask:
        """What the tokens of this device see of their rows."""
        return AttentionMask(
            context.local_positions(segments_BS.shape[1]),
            segments_BS,
            context.gather_row(segments_BS),
            is_whole_row=axis_size(context.AXIS) == 1,
            window=self.config.sliding_window,
        )

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
            body = jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names(*self.config.remat_saves))
        return jax.lax.scan(body, carry, (stacked, windowed_L), unroll=self.config.scan_unroll)


def head_logits(hidden: jax.Array, weight_DW: jax.Array) -> jax.Array:
    """Float32 logits [...,W] of normalised states [...,D]."""
    return jnp.einsum("...d,dw->...w", hidden, weight_DW, preferred_element_type=jnp.float32)


def all_gather_vocab(logits: jax.Array) -> jax.Array:
    """[...,W] of this device's words -> [..., vocab] of all of them."""
    if axis_size("tensor") == 1:
        return logits
    return jax.lax.all_gather(logits, "tensor", axis=logits.ndim - 1, tiled=True)


def stack(n: int, make: Callable[[nnx.Rngs], Module], rngs: nnx.Rngs) -> Module:
    """n modules as one whose arrays have a leading axis."""
    return nnx.split_rngs(splits=n)(nnx.vmap(make, in_axes=0, out_axes=0))(rngs)
