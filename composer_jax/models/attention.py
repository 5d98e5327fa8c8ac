"""The contract of an attention kind: its modules, its cache entry per token, its cost and its decode form.

A kind is an nnx.Module class with the members of `Attention`. Ours are listed in attention_kinds.py; a user's is an
import path in the config (`attention="package.module:Class"`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from flax import nnx

from composer_jax.models.config import ModelConfig
from composer_jax.ops.cached_attention import KeyRange, LayerCache
from composer_jax.ops.packed_attention import AttentionMask


class CacheEntry(NamedTuple):
    """What the decode cache stores per token and layer on one device."""

    groups: tuple[int, ...]
    """Widths of the parts of an entry; an int8 cache has one scale per part. Their sum is X."""
    mesh_axis: str | None
    """Mesh axis over which entries are sharded ("tensor" for heads of keys and values); None: replicated."""


class AttentionCost(NamedTuple):
    """Multiplications of matrix products in one layer's forward pass; each counts as two floating-point operations."""

    per_token: int
    """In the projections of one token, the output projection included."""
    per_pair: int
    """For each pair of a query and a key that it attends to: score and weighted value, over all heads."""


class Attention(Protocol):
    """One attention layer. `attend_rows` and `attend_cache` (composer_jax/ops) compute masked softmax attention."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None: ...

    @classmethod
    def check_config(cls, config: ModelConfig) -> None:
        """Raises a UserError if a field of the config is set that this kind does not use."""
        ...

    @classmethod
    def cache_entry(cls, config: ModelConfig) -> CacheEntry:
        """Returns the cache entry of this device inside the per-device program, of the whole network outside."""
        ...

    @classmethod
    def cost(cls, config: ModelConfig) -> AttentionCost:
        """Returns the cost of one layer of the whole network (models/flops.py).

        Plans of single devices (composer_jax/scale) read arithmetic and traffic from the traced program. A kind with a
        kernel of its own registers the kernel's formula (ops/kernel_cost.py).
        """
        ...

    def __call__(
        self, x_BSD: jax.Array, positions_BS: jax.Array, mask: AttentionMask, windowed: jax.Array | None = None, /
    ) -> jax.Array:
        """Training form: attention within whole rows, [B,S,D].

        Args:
          positions_BS: int32, restarting in every segment (rotary positions).
          mask: which keys a query attends to.
          windowed: bool scalar, whether this layer has the sliding window; None where no layer has.
        """
        ...

    def extend(
        self,
        x_BSD: jax.Array,
        positions_BS: jax.Array,
        keys: KeyRange,
        write: Callable[[jax.Array], LayerCache],
        /,
    ) -> jax.Array:
        """Decode form: attention of S new tokens per row against the cache, [B,S,D].

        Args:
          keys: the positions in the cache that each new token attends to.
          write: stores the new entries [B,S,X] and returns the layer's cache, the new ones included.
        """
        ...


@runtime_checkable
class ClippedAttention(Protocol):
    """What QK-clip (train/qk_clip.py) needs of an attention kind beside the members of `Attention`."""

    @classmethod
    def check_qk_clip(cls, config: ModelConfig) -> None:
        """Raises a UserError where no factor of a head's weights scales its attention logits."""
        ...

    @classmethod
    def scale_logits(cls, config: ModelConfig, weights: Any, factors_LH: jax.Array) -> Any:
        """Returns the weights of L layers with which the attention logits of each head are `factors_LH` times theirs.

        Args:
          weights: the layers' subtree of params, a dict of arrays with a leading axis of layers. Weights that are not
            scaled are returned as they are, and a factor of 1 changes no bit.
        """
        ...

    def with_max_logits(
        self, x_BSD: jax.Array, positions_BS: jax.Array, mask: AttentionMask, windowed: jax.Array | None = None, /
    ) -> tuple[jax.Array, jax.Array]:
        """Returns what `__call__` does, and the largest logit of this device's heads and queries, float32 [H]."""
        ...
