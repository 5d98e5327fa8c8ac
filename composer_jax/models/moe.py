"""Mixture-of-experts feed-forward: routed experts plus shared ones (DeepSeekMoE, arXiv 2401.06066)."""

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from composer_jax.models.config import ModelConfig
from composer_jax.models.feed_forward import FeedForward
from composer_jax.models.parameter import gather_param, matrix, parameter
from composer_jax.models.router import Router, Routing
from composer_jax.models.router_replay import RouterReplay
from composer_jax.models.router_stats import RouterStats, measure_routing
from composer_jax.ops.activation import clamped_swiglu, swiglu
from composer_jax.ops.chunks import map_chunks
from composer_jax.ops.fake_quantization import fake_int4
from composer_jax.ops.shapes import check_shapes
from composer_jax.parallel.dispatch import Biases, Experts, find_dispatch


class MixtureOfExperts(nnx.Module):
    """y = sum_i gate_i expert_i(x) + shared(x)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        e, d, f = config.n_experts, config.d_model, config.expert_ff_dim
        self.config = config
        self.router = Router(config, rngs=rngs)
        self.gate = matrix(rngs, (e, d, f), ("experts", "embed", None), in_axis=1, config=config)
        self.up = matrix(rngs, (e, d, f), ("experts", "embed", None), in_axis=1, config=config)
        self.down = matrix(rngs, (e, f, d), ("experts", None, "embed"), in_axis=1, config=config)
        if config.expert_bias:
            zeros = lambda width: jnp.zeros((e, width), config.param_dtype)  # noqa: E731
            self.gate_bias = parameter(zeros(f), "experts", None)
            self.up_bias = parameter(zeros(f), "experts", None)
            self.down_bias = parameter(zeros(d), "experts", "embed")
        if config.n_shared_experts:
            self.shared = FeedForward(config, config.n_shared_experts * f, rngs=rngs)

    def __call__(
        self,
        x_BSD: jax.Array,
        token_mask_BS: jax.Array,
        replay: RouterReplay | None = None,
        experts: Experts | None = None,
    ) -> tuple[jax.Array, RouterStats]:
        """Returns y [B,S,D] and what the router measured.

        Args:
          token_mask_BS: false for padding.
          replay: its ids are [B,S,k]; None lets the router choose.
          experts: the result of gather_experts, if it was called before.
        """
        check_shapes(
            chex.Dimensions(D=self.config.d_model),
            x_BSD=(x_BSD, jnp.floating),
            token_mask_BS=(token_mask_BS, bool),
        )
        if replay is not None:
            check_shapes(ids_BSk=(replay.ids, jnp.integer), token_mask_BS=(token_mask_BS, bool))
            replay = replay._replace(ids=replay.ids.reshape(-1, replay.ids.shape[-1]))
        routing = self.router(x_BSD.reshape(-1, x_BSD.shape[-1]), replay)
        experts = self.gather_experts(x_BSD.dtype) if experts is None else experts
        y_BSD, dropped = self._compute(x_BSD, routing, token_mask_BS, experts)
        return y_BSD, measure_routing(routing, token_mask_BS, dropped)

    def extend(self, x_BSD: jax.Array, token_mask_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Decode form: returns y [B,S,D] and the chosen experts of each token, int32 [B,S,k]."""
        routing = self.router(x_BSD.reshape(-1, x_BSD.shape[-1]))
        y_BSD, _ = self._compute(x_BSD, routing, token_mask_BS, self.gather_experts(x_BSD.dtype))
        return y_BSD, routing.ids_Tk.reshape(*token_mask_BS.shape, -1)

    def _compute(
        self, x_BSD: jax.Array, routing: Routing, token_mask_BS: jax.Array, experts: Experts
    ) -> tuple[jax.Array, jax.Array]:
        """Returns y [B,S,D] and how many (token, choice) pairs were dropped, a float32 scalar."""
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        config, limit = self.config, self.config.swiglu_limit
        activation = swiglu if limit is None else clamped_swiglu(limit)
        dispatch_kind = find_dispatch(config.dispatch)

        def dispatch(experts: Experts, x_TD: jax.Array, mask_T: jax.Array, ids_Tk: jax.Array, gates_Tk: jax.Array):
            # Padding, also that of the last chunk, is sent to no expert (-1): it takes no capacity from tokens, and an
            # expert has no more rows than there are tokens.
            ids_Tk = jnp.where(mask_T[:, None], ids_Tk, -1)
            y_TD, dropped = dispatch_kind(
                x_TD, ids_Tk, gates_Tk, experts, activation, capacity_factor=config.capacity_factor
            )
            return y_TD, dropped[None]

        tokens = x_TD, token_mask_BS.reshape(-1), routing.ids_Tk, routing.gates_Tk.astype(x_TD.dtype)
        y_TD, dropped = map_chunks(dispatch, config.expert_chunk, experts, *tokens)
        if self.config.n_shared_experts:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.reshape(x_BSD.shape), dropped.sum()

    def gather_experts(self, dtype: DTypeLike) -> Experts:
        """Returns the weights of this device's experts in `dtype`, all-gathered over the FSDP mesh axes."""
        fetch = lambda weight: gather_param(weight, dtype)  # noqa: E731
        biases = None
        if self.config.expert_bias:
            biases = Biases(fetch(self.gate_bias), fetch(self.up_bias), fetch(self.down_bias))
        gate, up, down = fetch(self.gate), fetch(self.up), fetch(self.down)
        if self.config.expert_qat == "int4":
            gate, up, down = (fake_int4(weight, axis=1) for weight in (gate, up, down))
        return Experts(gate, up, down, biases, self.config.precision)
