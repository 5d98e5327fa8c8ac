"""Token embedding, with an optional causal convolution for small models."""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from composer_jax.models.config import ModelConfig
from composer_jax.models.parameter import gather_param, matrix
from composer_jax.ops.lookup import lookup
from composer_jax.ops.shapes import check_shapes
from composer_jax.parallel import context
from composer_jax.parallel.sharding import axis_size, psum_tensor


class Embedding(nnx.Module):
    """x_t = e_t + sum_{j=1..taps} e_{t-j} W_j.

    The taps (0 in K2) give every position its previous tokens. A from-scratch model of a million parameters needs them
    to copy names and constants, which are most of a coding agent's tool calls.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d = config.d_model
        self.config = config
        self.table = matrix(
            rngs, (config.vocab_size, d), ("vocab", "embed"), in_axis=1, full_precision=True, config=config
        )
        if config.embedding_taps:
            self.taps = matrix(rngs, (config.embedding_taps, d, d), (None, "embed", None), in_axis=1, config=config)

    def __call__(self, tokens_BS: jax.Array, positions_BS: jax.Array) -> jax.Array:
        """Embeds whole rows, [B,S,D]; a tap does not reach back beyond the start of its document."""
        e_BSD = self.lookup(tokens_BS)
        earlier = []
        for _ in self.offsets:
            earlier.append(context.shift_right(earlier[-1] if earlier else e_BSD))
        return self.convolve(e_BSD, earlier, positions_BS)

    @property
    def offsets(self) -> range:
        """Distances j of the taps."""
        return range(1, self.config.embedding_taps + 1)

    def lookup(self, tokens: jax.Array) -> jax.Array:
        """Returns the embeddings [..., D] of integer tokens [...].

        Each device of `tensor` looks up the tokens of its vocabulary shard; a psum adds the rest.
        """
        chex.assert_type(tokens, jnp.integer)
        table_WD = gather_param(self.table, self.config.dtype)
        if axis_size("tensor") == 1:
            return lookup(table_WD, tokens)
        local = tokens - jax.lax.axis_index("tensor") * len(table_WD)
        in_shard = (local >= 0) & (local < len(table_WD))
        return psum_tensor(jnp.where(in_shard[..., None], lookup(table_WD, jnp.where(in_shard, local, 0)), 0))

    def convolve(self, e_BSD: jax.Array, earlier: Sequence[jax.Array], positions_BS: jax.Array) -> jax.Array:
        """Returns e_t + sum_j W_j e_{t-j}, [B,S,D].

        Args:
          earlier: e_{t-j} [B,S,D] for j = 1, 2, ...; ignored where t-j lies before the document.
          positions_BS: position of each token in its document.
        """
        dims = check_shapes(e_BSD=(e_BSD, jnp.floating), positions_BS=(positions_BS, jnp.integer))
        for e in earlier:
            check_shapes(dims, earlier_BSD=(e, jnp.floating))
        if not earlier:
            return e_BSD
        taps = gather_param(self.taps, e_BSD.dtype)
        terms = (
            jnp.where((positions_BS >= j)[..., None], e, 0) @ taps[j - 1]
            for j, e in zip(self.offsets, earlier, strict=True)
        )
        return e_BSD + sum(terms)
