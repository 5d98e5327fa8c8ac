"""Router with auxiliary-loss-free balance (DeepSeek-V3, arXiv 2412.19437, equations 13 to 16)."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from composer_jax.models.config import ModelConfig
from composer_jax.models.parameter import RouterBias, gather_param, matrix, parameter
from composer_jax.models.router_replay import ReplayedChoice, RouterReplay, replay_experts
from composer_jax.ops.shapes import check_shapes


class Routing(NamedTuple):
    """The experts chosen for each token, and their weights."""

    ids_Tk: jax.Array
    """int32: chosen experts, best first."""
    gates_Tk: jax.Array
    """float32: weights of the chosen experts."""
    scores_TE: jax.Array
    """float32: scores of all experts, without the selection bias."""
    replayed: ReplayedChoice | None = None
    """What became of the experts that came with the tokens; None where none did."""


class Router(nnx.Module):
    """s = sigmoid(x W) or softmax(x W) in float32; the top k of s + bias are chosen.

    x W is a float32 product on every backend: 12 D E operations per token on a TPU, six passes in bfloat16.
    Gates are s_i, or s_i / sum_chosen(s) where normalised, times routed_scaling_factor. The bias affects the choice
    only: it enters no gate and receives no gradient. Under replay (models/router_replay.py) the experts of other
    computations stand in for the top k; the scores, and so the gates, are this router's.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.weight = matrix(
            rngs, (config.d_model, config.n_experts), ("embed", None), full_precision=True, config=config
        )
        if config.router_logit_bias:
            self.logit_bias = parameter(jnp.zeros(config.n_experts, config.param_dtype), None)
        self.bias = RouterBias(jnp.zeros(config.n_experts, jnp.float32), axes=(None,))

    def __call__(self, x_TD: jax.Array, replay: RouterReplay | None = None) -> Routing:
        """Returns the routing of tokens; the ids of `replay` are [T,k]."""
        config, replayed = self.config, None
        check_shapes(chex.Dimensions(D=config.d_model), x_TD=(x_TD, jnp.floating))
        # A TPU or GPU would otherwise round float32 operands to bfloat16 or TF32, and near ties choose other experts.
        logits_TE = jnp.matmul(
            x_TD.astype(jnp.float32), gather_param(self.weight, jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        if config.router_logit_bias:
            logits_TE = logits_TE + gather_param(self.logit_bias, jnp.float32)
        scores_TE = (jax.nn.sigmoid if config.router_scores == "sigmoid" else jax.nn.softmax)(logits_TE)
        ids_Tk = select_experts(scores_TE + self.bias.get_value(), config)
        if replay is not None:
            replayed = replay_experts(ids_Tk, scores_TE, replay)
            ids_Tk = replayed.ids_Tk
        gates_Tk = jnp.take_along_axis(scores_TE, ids_Tk, axis=-1)
        if config.normalise_gates:
            gates_Tk = gates_Tk / (gates_Tk.sum(-1, keepdims=True) + 1e-20)
        return Routing(ids_Tk, gates_Tk * config.routed_scaling_factor, scores_TE, replayed)


def select_experts(choice_TE: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns the top k experts by biased score, int32 [T,k], limited to the best groups of experts.

    A group's strength is the sum of its two best scores. No gradient reaches choice_TE.
    """
    check_shapes(chex.Dimensions(E=config.n_experts), choice_TE=(choice_TE, jnp.floating))
    choice_TE = jax.lax.stop_gradient(choice_TE)
    if config.n_expert_groups > 1:
        groups = choice_TE.reshape(-1, config.n_expert_groups, config.n_experts // config.n_expert_groups)
        strength = jax.lax.top_k(groups, min(2, groups.shape[-1]))[0].sum(-1)
        best = jax.lax.top_k(strength, config.topk_groups)[1]
        allowed = jax.nn.one_hot(best, config.n_expert_groups, dtype=bool).any(-2)
        choice_TE = jnp.where(allowed[:, :, None], groups, -jnp.inf).reshape(choice_TE.shape)
    return jax.lax.top_k(choice_TE, config.experts_per_token)[1]


def expert_counts(ids_Tk: jax.Array, token_mask_T: jax.Array, n_experts: int) -> jax.Array:
    """Returns the number of real tokens that chose each expert, float32 [E]; padding does not count."""
    check_shapes(ids_Tk=(ids_Tk, jnp.integer), token_mask_T=(token_mask_T, bool))
    chosen = jax.nn.one_hot(ids_Tk, n_experts, dtype=jnp.float32).sum(-2)
    return (chosen * token_mask_T[:, None]).sum(0)


def updated_bias(bias: jax.Array, counts: jax.Array, rate: float) -> jax.Array:
    """Returns bias + rate * (sign(e) - mean sign(e)), e = mean load - load (Moonlight, arXiv 2502.16982).

    `bias` and `counts` are float32 [..., E]; the counts are those of the global batch. A layer without tokens keeps its
    bias.
    """
    chex.assert_equal_shape([bias, counts])
    error = jnp.sign(counts.mean(-1, keepdims=True) - counts)
    return bias + rate * (error - error.mean(-1, keepdims=True))
