"""Mixture-of-experts feed-forward: routed experts plus shared ones (DeepSeekMoE, arXiv 2401.06066)."""

import jax
import jax.numpy as jnp
from flax import nnx

from composer_jax.models.config import ModelConfig
from composer_jax.models.feed_forward import FeedForward
from composer_jax.models.parameter import gather_param, matrix, parameter
from composer_jax.models.router import Router
from composer_jax.models.router_stats import RouterStats, measure_routing
from composer_jax.ops.activation import Activation, clamped_swiglu, swiglu
from composer_jax.ops.chunks import map_chunks
from composer_jax.parallel.dispatch import Biases, Experts, find_dispatch


class MixtureOfExperts(nnx.Module):
    """y = sum_i gate_i expert_i(x) + shared(x)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        e, d, f = config.n_experts, config.d_model, config.expert_ff_dim
        self.config = config
        self.router = Router(config, rngs=rngs)
        self.gate = matrix(rngs, (e, d, f), ("experts", "embed", None), fan_in=d, config=config)
        self.up = matrix(rngs, (e, d, f), ("experts", "embed", None), fan_in=d, config=config)
        self.down = matrix(rngs, (e, f, d), ("experts", None, "embed"), fan_in=f, config=config)
        if config.expert_bias:
            zeros = lambda width: jnp.zeros((e, width), config.param_dtype)  # noqa: E731
            self.gate_bias = parameter(zeros(f), "experts", None)
            self.up_bias = parameter(zeros(f), "experts", None)
            self.down_bias = parameter(zeros(d), "experts", "embed")
        if config.n_shared_experts:
            self.shared = FeedForward(config, config.n_shared_experts * f, rngs=rngs)

    def __call__(self, x_BSD: jax.Array, token_mask_BS: jax.Array) -> tuple[jax.Array, RouterStats]:
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        routing = self.router(x_TD)
        experts, activation, config = self._experts(x_TD.dtype), self._activation, self.config

        def dispatch(*tokens):
            y_TD, dropped = find_dispatch(config.dispatch)(
                *tokens, experts, activation, capacity_factor=config.capacity_factor
            )
            return y_TD, dropped[None]

        # Padding goes to no expert: it would take room from tokens.
        ids_Tk = jnp.where(token_mask_BS.reshape(-1, 1), routing.ids_Tk, -1)
        tokens = x_TD, ids_Tk, routing.gates_Tk.astype(x_TD.dtype)
        y_TD, dropped = map_chunks(dispatch, config.expert_chunk, *tokens)
        if self.config.n_shared_experts:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.reshape(x_BSD.shape), measure_routing(routing, token_mask_BS, dropped.sum())

    def _experts(self, dtype) -> Experts:
        biases = None
        if self.config.expert_bias:
            biases = Biases(*(gather_param(b, dtype) for b in (self.gate_bias, self.up_bias, self.down_bias)))
        return Experts(*(gather_param(w, dtype) for w in (self.gate, self.up, self.down)), biases)

    @property
    def _activation(self) -> Activation:
        limit = self.config.swiglu_limit
        return swiglu if limit is None else clamped_swiglu(limit)
