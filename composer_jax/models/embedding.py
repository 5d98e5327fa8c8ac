"""Token embedding, with an optional causal convolution for small models."""

import jax
import jax.numpy as jnp
from flax import nnx

from composer_jax.models.config import ModelConfig
from composer_jax.models.parameter import gather_param, matrix
from composer_jax.ops.lookup import lookup
from composer_jax.parallel import context
from composer_jax.parallel.sharding import axis_size, psum_tensor


class Embedding(nnx.Module):
    """x_t = e_t + sum_{j=1..taps} e_{t-j} W_j.

    The taps (off in K2) hand every position its last few tokens. A from-scratch model of a million parameters needs
    that to copy names and constants, which is most of what a coding agent's tool calls consist of.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d = config.d_model
        self.config = config
        self.table = matrix(rngs, (config.vocab_size, d), ("vocab", "embed"), fan_in=d, config=config)
        if config.embedding_taps:
            self.taps = matrix(rngs, (config.embedding_taps, d, d), (None, "embed", None), fan_in=d, config=config)

    def __call__(self, tokens_BS: jax.Array, positions_BS: jax.Array) -> jax.Array:
        """Embeds whole rows; a tap does not reach back over the start of its document."""
        e_BSD = self.lookup(tokens_BS)
        earlier = []
        for _ in self.offsets:
            earlier.append(context.shift_right(earlier[-1] if earlier else e_BSD))
        return self.convolve(e_BSD, earlier, positions_BS)

    @property
    def offsets(self) -> range:
        return range(1, self.config.embedding_taps + 1)

    def lookup(self, tokens: jax.Array) -> jax.Array:
        """Embeddings [..., D] of tokens [...]; each device of `tensor` has those of its part of the vocabulary."""
        table = gather_param(self.table, self.config.dtype)
        if axis_size("tensor") == 1:
            return lookup(table, tokens)
        here = tokens - jax.lax.axis_index("tensor") * len(table)
        mine = (here >= 0) & (here < len(table))
        return psum_tensor(jnp.where(mine[..., None], lookup(table, jnp.where(mine, here, 0)), 0))

    def convolve(self, e_BSD: jax.Array, earlier: list[jax.Array], positions_BS: jax.Array) -> jax.Array:
        """e_t + sum_j W_j e_{t-j}; earlier[j-1] holds e_{t-j}, ignored where t-j lies before the document."""
        if not earlier:
            return e_BSD
        taps = gather_param(self.taps, e_BSD.dtype)
        return e_BSD + sum(
            jnp.where((positions_BS >= j)[..., None], e, 0) @ taps[j - 1]
            for j, e in zip(self.offsets, earlier, strict=True)
        )
