"""The Decoder: embedding, layers, final norm, head, MTP modules.

Layers of one kind are one stack of weights: `dense_layers` and `moe_layers`. The trunk scans over runs of consecutive
layers of one kind. The usual network has two runs (the first layers dense, the others with experts), a network without
experts one, and a network with experts in every other layer as many as layers.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from composer_jax.models.attention_kinds import attention_kind
from composer_jax.models.block import Block
from composer_jax.models.cache import Cache, find_places, read_tokens, write_layer, write_routing, write_tokens
from composer_jax.models.config import ModelConfig
from composer_jax.models.embedding import Embedding
from composer_jax.models.mtp import MTPModule
from composer_jax.models.norm import RMSNorm
from composer_jax.models.parameter import gather_param, matrix
from composer_jax.models.router_replay import RouterReplay
from composer_jax.models.router_stats import RouterStats
from composer_jax.ops.cached_attention import KeyRange
from composer_jax.ops.matmul import matmul_to_float32
from composer_jax.ops.packed_attention import AttentionMask
from composer_jax.ops.shapes import check_shapes
from composer_jax.parallel import context
from composer_jax.parallel.sharding import axis_size

Module = TypeVar("Module", bound=nnx.Module)
Tree = TypeVar("Tree")


class Hidden(NamedTuple):
    """Output of the trunk (all layers, without head and MTP modules)."""

    last_BSD: jax.Array
    """Normalised states for the head, in the compute dtype."""
    router_stats: RouterStats | None
    """Statistics of every expert layer, with a leading axis of layers; None in a network without experts."""
    max_logits: dict[str, jax.Array] | None = None
    """By stack of layers, the largest attention logit of every head over this device's tokens, float32 [L,H]; None
    unless measured. H counts the heads of all devices of `tensor`."""


class MTPHidden(NamedTuple):
    """Output of the MTP modules, with a leading axis of modules."""

    states_MBSD: jax.Array
    """Normalised states for the head. The logits of module k (from 1) at position i predict token i+k+1."""
    router_stats: RouterStats | None
    """Statistics of every module; None without experts."""
    max_logits_MH: jax.Array | None = None
    """As in Hidden."""


class LayerInputs(NamedTuple):
    """What one layer of a scan has for itself."""

    block: Block
    windowed: jax.Array
    """bool scalar: whether the layer has the sliding window."""
    ids_BSk: jax.Array | None
    """The replayed experts of an expert layer; None for a dense layer, or where the routers choose."""


class Decoder(nnx.Module):
    """The network. Arrays are those of one device inside the per-device program, whole ones outside."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, measures_logits: bool = False):
        """measures_logits: whether the training form returns the largest attention logits (ModelDef)."""
        self.config, self.measures_logits = config, measures_logits
        self.embedding = Embedding(config, rngs=rngs)
        block = lambda moe: lambda rngs: Block(config, moe=moe, rngs=rngs)  # noqa: E731
        n_moe_layers = config.n_moe_layers
        n_dense_layers = config.n_layers - n_moe_layers
        self.dense_layers = stack(n_dense_layers, block(False), rngs) if n_dense_layers else None
        self.moe_layers = stack(n_moe_layers, block(True), rngs) if n_moe_layers else None
        self.final_norm = RMSNorm(config.d_model, eps=config.norm_eps, dtype=config.param_dtype)
        if not config.tie_embeddings:
            self.head = matrix(
                rngs,
                (config.d_model, config.vocab_size),
                ("embed", "vocab"),
                full_precision=True,
                config=config,
            )
        if config.n_mtp_modules:
            self.mtp = stack(config.n_mtp_modules, lambda rngs: MTPModule(config, rngs=rngs), rngs)

    def __call__(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array,
        segments_BS: jax.Array,
        replay: RouterReplay | None = None,
    ) -> Hidden:
        """Training form, for whole rows.

        Args:
          tokens_BS: token ids.
          positions_BS: positions, restarting at 0 in every segment.
          segments_BS: segment ids, rising along a row; 0 is padding. No segment attends to another.
          replay: its ids are [B,S,L,k] for the L expert layers; None lets the routers choose.
        """
        _check_rows(tokens_BS, positions_BS, segments_BS)
        self._check_replay(replay, tokens_BS)
        token_mask_BS, mask = segments_BS > 0, self._attention_mask(segments_BS)

        @self._remat
        def layer(x_BSD: jax.Array, inputs: LayerInputs):
            layer_replay = None if replay is None or inputs.ids_BSk is None else replay._replace(ids=inputs.ids_BSk)
            x_BSD, *stats = inputs.block(
                x_BSD,
                positions_BS,
                mask,
                inputs.windowed,
                token_mask_BS,
                layer_replay,
                measures_logits=self.measures_logits,
            )
            return x_BSD, stats

        x_BSD, stats = self.embedding(tokens_BS, positions_BS), {}
        for name, inputs in self._layer_runs(replay):
            x_BSD, of_run = jax.lax.scan(layer, x_BSD, inputs, unroll=self.config.scan_unroll)
            stats.setdefault(name, []).append(of_run)
        stats = {name: _join_runs(of_runs) for name, of_runs in stats.items()}
        router_stats, _ = stats.get("moe_layers", (None, None))
        max_logits = {name: gather_heads(max_LH) for name, (_, max_LH) in stats.items() if max_LH is not None}
        return Hidden(self.final_norm(x_BSD), router_stats, max_logits or None)

    def extend(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array,
        real_BS: jax.Array,
        cache: Cache[jax.Array],
        tables_BJ: jax.Array,
    ) -> tuple[jax.Array, Cache[jax.Array]]:
        """Decode form: S new tokens per row after those in the cache.

        Args:
          positions_BS: positions in the context. The new entries are written to its pages at these positions.
          real_BS: false for padding, which writes nothing.
          tables_BJ: int32, the pages of each row's context; no real position may lie beyond them.

        Returns:
          Normalised states [B,S,D] and the cache with the new entries.
        """
        check_shapes(
            tokens_BS=(tokens_BS, jnp.integer), positions_BS=(positions_BS, jnp.integer), real_BS=(real_BS, bool)
        )
        cache.check()
        places = find_places(cache, tables_BJ, positions_BS, real_BS)
        cache = write_tokens(cache, tokens_BS, places)
        groups = attention_kind(self.config).cache_entry(self.config).groups
        full, near = self._key_ranges(positions_BS, real_BS)

        def layer(carry: tuple[jax.Array, Cache, jax.Array], inputs: LayerInputs):
            x_BSD, cache, index = carry

            def write(new_BSX: jax.Array):
                nonlocal cache
                cache, entries = write_layer(cache, index, new_BSX, places, tables_BJ, groups)
                return entries

            keys = jax.tree.map(lambda near, full: jnp.where(inputs.windowed, near, full), near, full)
            x_BSD, experts_BSk = inputs.block.extend(x_BSD, positions_BS, keys, real_BS, write)
            return (x_BSD, cache, index + 1), experts_BSk if self.config.cache_routing else None

        x_BSD, experts = self._embed_after(tokens_BS, positions_BS, cache, tables_BJ), []
        carry = x_BSD, cache, jnp.int32(0)
        for _, inputs in self._layer_runs():
            # The cache is part of the carry and updated in place; as a scanned input and output it would be copied.
            carry, experts_LBSk = jax.lax.scan(layer, carry, inputs, unroll=self.config.scan_unroll)
            if experts_LBSk is not None:
                experts.append(experts_LBSk)
        x_BSD, cache, _ = carry
        if experts:
            cache = write_routing(cache, _join_runs(experts), places)
        return self.final_norm(x_BSD), cache

    def extend_mtp(
        self,
        states_BSD: jax.Array,
        next_BS: jax.Array,
        positions_BS: jax.Array,
        real_BS: jax.Array,
        cache: Cache[jax.Array],
        tables_BJ: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Cache[jax.Array]]:
        """Decode form of the first MTP module, for positions whose next token is known; needs config.cache_mtp.

        Its logits at position i are a guess at token i+2. Applied again to its own states at i+1, it guesses token i+3,
        as vLLM does with the published weights, which have one module.

        Args:
          states_BSD: those that `extend` returned for these positions, or that this function did for the ones before.
          next_BS: int32, the token after each position. The tokens up to each position are in the cache.
          positions_BS, real_BS, tables_BJ: as in `extend`.

        Returns:
          The module's states [B,S,D], the same normalised for the head, and the cache with the module's entries.
        """
        check_shapes(states_BSD=(states_BSD, jnp.floating), next_BS=(next_BS, jnp.integer), real_BS=(real_BS, bool))
        assert self.config.cache_mtp, "this cache has no room for the MTP module"
        places = find_places(cache, tables_BJ, positions_BS, real_BS)
        groups = attention_kind(self.config).cache_entry(self.config).groups
        embedding_BSD = self._embed_after(next_BS, positions_BS + 1, cache, tables_BJ)

        def write(new_BSX: jax.Array):
            nonlocal cache
            cache, entries = write_layer(cache, jnp.int32(self.config.n_layers), new_BSX, places, tables_BJ, groups)
            return entries

        first = jax.tree.map(lambda a: a[0], self.mtp)
        keys, _ = self._key_ranges(positions_BS, real_BS)
        states_BSD, normed_BSD = first.extend(states_BSD, embedding_BSD, positions_BS, keys, real_BS, write)
        return states_BSD, normed_BSD, cache

    def mtp_hidden(
        self, hidden: Hidden, tokens_BS: jax.Array, positions_BS: jax.Array, segments_BS: jax.Array
    ) -> MTPHidden:
        """Returns the MTP modules' states for the head.

        Module k continues from the states of module k-1, the first from the trunk's normalised states, as in vLLM with
        the published weights. No gradient reaches the trunk.
        """
        _check_rows(tokens_BS, positions_BS, segments_BS)
        token_mask_BS = segments_BS > 0
        mask = dataclasses.replace(self._attention_mask(segments_BS), window=None)

        @self._remat
        def layer(carry: tuple[jax.Array, jax.Array], module: MTPModule):
            states_BSD, ahead_BSD = carry
            ahead_BSD = context.shift_left(ahead_BSD)
            states_BSD, *outputs = module(
                states_BSD, ahead_BSD, positions_BS, mask, token_mask_BS, measures_logits=self.measures_logits
            )
            return (states_BSD, ahead_BSD), outputs

        # Shifted after the embedding: taps of token i+1 reach back to token i even where i is the first of a row.
        start = jax.lax.stop_gradient((hidden.last_BSD, self.embedding(tokens_BS, positions_BS)))
        _, (states_MBSD, stats, max_MH) = jax.lax.scan(layer, start, self.mtp, unroll=self.config.scan_unroll)
        return MTPHidden(states_MBSD, stats, None if max_MH is None else gather_heads(max_MH))

    def head_weight(self) -> jax.Array:
        """Returns the head [D,W] in the compute dtype, W being this device's vocabulary shard.

        Fetch it once for many positions: each call gathers it.
        """
        dtype = self.config.dtype
        return (
            gather_param(self.embedding.table, dtype).T
            if self.config.tie_embeddings
            else gather_param(self.head, dtype)
        )

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns float32 logits [..., vocab_size] over the whole vocabulary, for normalised states [...,D]."""
        return all_gather_vocab(head_logits(hidden, self.head_weight()))

    def _check_replay(self, replay: RouterReplay | None, tokens_BS: jax.Array) -> None:
        """Asserts that replayed experts are [B,S,L,k] for this network."""
        if replay is None:
            return
        config = self.config
        assert config.n_experts, "a network without experts has nothing to replay"
        sizes = chex.Dimensions(L=config.n_moe_layers, k=config.experts_per_token)
        check_shapes(sizes, tokens_BS=(tokens_BS, jnp.integer), ids_BSLk=(replay.ids, jnp.integer))

    def _attention_mask(self, segments_BS: jax.Array) -> AttentionMask:
        """Returns the mask of this device's queries against whole rows."""
        return AttentionMask(
            context.local_positions(segments_BS.shape[1]),
            segments_BS,
            context.gather_row(segments_BS),
            is_whole_row=axis_size(context.AXIS) == 1,
            window=self.config.sliding_window,
            form=self.config.attention_form,
        )

    def _embed_after(
        self, tokens_BS: jax.Array, positions_BS: jax.Array, cache: Cache[jax.Array], tables_BJ: jax.Array
    ) -> jax.Array:
        """Embeds tokens [B,S] at these positions of contexts; the taps read the tokens before them from the cache."""
        earlier = [
            self.embedding.lookup(read_tokens(cache, tables_BJ, jnp.maximum(positions_BS - j, 0)))
            for j in self.embedding.offsets
        ]
        return self.embedding.convolve(self.embedding.lookup(tokens_BS), earlier, positions_BS)

    def _key_ranges(self, positions_BS: jax.Array, real_BS: jax.Array) -> tuple[KeyRange, KeyRange]:
        """Returns what new tokens attend to in layers without and with a sliding window."""
        last_BS = jnp.where(real_BS, positions_BS, -1)
        full, window = KeyRange(jnp.zeros_like(last_BS), last_BS), self.config.sliding_window
        return full, full if window is None else full._replace(first_BS=jnp.maximum(last_BS - window + 1, 0))

    def _layer_runs(self, replay: RouterReplay | None = None) -> Iterator[tuple[str, LayerInputs]]:
        """Yields (stack, inputs with a leading axis of layers) of each run of consecutive layers of one kind."""
        ids_LBSk = None if replay is None else jnp.moveaxis(replay.ids, 2, 0)
        stacks = {"dense_layers": (self.dense_layers, None), "moe_layers": (self.moe_layers, ids_LBSk)}
        name_of = lambda layer: "dense_layers" if self.config.is_dense(layer) else "moe_layers"  # noqa: E731
        runs = [(name, list(layers)) for name, layers in itertools.groupby(range(self.config.n_layers), name_of)]
        parts = {
            name: _split_runs(stacked, [len(layers) for of, layers in runs if of == name])
            for name, stacked in stacks.items()
        }
        for name, layers in runs:
            blocks, ids = next(parts[name])
            yield name, LayerInputs(blocks, jnp.array([self.config.has_window(layer) for layer in layers]), ids)

    def _remat(self, layer: Callable) -> Callable:
        """Returns a layer whose backward pass recomputes all but its input and config.remat_saves, if config.remat."""
        if not self.config.remat:
            return layer
        return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*self.config.remat_saves))


def head_logits(hidden: jax.Array, weight_DW: jax.Array) -> jax.Array:
    """Returns float32 logits [...,W] of normalised states [...,D]."""
    return matmul_to_float32(hidden, weight_DW)


def gather_heads(values_LH: jax.Array) -> jax.Array:
    """Returns a float32 value of every head of every device of `tensor`, in their order; no gradient flows through."""
    chex.assert_type(values_LH, jnp.float32)
    n, values_LH = axis_size("tensor"), jax.lax.stop_gradient(values_LH)
    if n == 1:
        return values_LH
    is_here_n1 = jnp.arange(n)[:, None] == jax.lax.axis_index("tensor")
    values_LnH = jnp.where(is_here_n1, values_LH[:, None], -jnp.inf)
    # The maximum is the same on all devices and typed so, which the result of an all_gather is not.
    return jax.lax.pmax(values_LnH.reshape(len(values_LH), -1), "tensor")


def all_gather_vocab(logits: jax.Array) -> jax.Array:
    """Gathers the logits [...,W] of every vocabulary shard to [..., vocab_size]."""
    if axis_size("tensor") == 1:
        return logits
    return jax.lax.all_gather(logits, "tensor", axis=logits.ndim - 1, tiled=True)


def stack(n: int, make: Callable[[nnx.Rngs], Module], rngs: nnx.Rngs) -> Module:
    """Returns n modules as one whose arrays have a leading axis of length n."""
    return nnx.split_rngs(splits=n)(nnx.vmap(make, in_axes=0, out_axes=0))(rngs)


def _split_runs(stacked: Tree, lengths: list[int]) -> Iterator[Tree]:
    """Yields consecutive parts of arrays with a leading axis of layers; the arrays as they are where it is one part."""
    if len(lengths) == 1:
        yield stacked
        return
    leaves, structure = jax.tree.flatten(stacked)
    # The transpose of lax.split is one concatenation. That of slices would add up zero-padded gradients of the stack.
    for parts in zip(*(jax.lax.split(leaf, lengths) for leaf in leaves), strict=True):
        yield jax.tree.unflatten(structure, parts)


def _join_runs(parts: list[Tree]) -> Tree:
    """Concatenates arrays with a leading axis of layers; the inverse of _split_runs."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)


def _check_rows(tokens_BS: jax.Array, positions_BS: jax.Array, segments_BS: jax.Array) -> None:
    check_shapes(
        tokens_BS=(tokens_BS, jnp.integer),
        positions_BS=(positions_BS, jnp.integer),
        segments_BS=(segments_BS, jnp.integer),
    )
