"""Mixture-of-experts feed-forward: routed experts plus shared ones (DeepSeekMoE, arXiv 2401.06066)."""

import jax
from flax import nnx

from composer_jax.models.config import ModelConfig
from composer_jax.models.feed_forward import FeedForward
from composer_jax.models.parameter import matrix, use
from composer_jax.models.router import Router, expert_counts
from composer_jax.parallel.dispatch import DISPATCH, Experts


class MixtureOfExperts(nnx.Module):
    """y = sum_i gate_i expert_i(x) + shared(x)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        e, d, f = config.n_experts, config.d_model, config.expert_ff_dim
        self.config = config
        self.router = Router(config, rngs=rngs)
        self.gate = matrix(rngs, (e, d, f), ("experts", "embed", "ff"), fan_in=d, config=config)
        self.up = matrix(rngs, (e, d, f), ("experts", "embed", "ff"), fan_in=d, config=config)
        self.down = matrix(rngs, (e, f, d), ("experts", "ff", "embed"), fan_in=f, config=config)
        if config.n_shared_experts:
            self.shared = FeedForward(config, config.n_shared_experts * f, rngs=rngs)

    def __call__(self, x_BSD: jax.Array, token_mask_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the output and how many real tokens chose each expert, float32 [E]."""
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        routing = self.router(x_TD)
        experts = Experts(*(use(w, x_TD.dtype) for w in (self.gate, self.up, self.down)))
        y_TD = DISPATCH[self.config.dispatch](x_TD, routing.ids_Tk, routing.gates_Tk.astype(x_TD.dtype), experts)
        if self.config.n_shared_experts:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.reshape(x_BSD.shape), expert_counts(
            routing.ids_Tk, token_mask_BS.reshape(-1), self.config.n_experts
        )
