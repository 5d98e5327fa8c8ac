"""ModelConfig: everything that shapes the network, and nothing else."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp

from composer_jax.errors import UserError
from composer_jax.models.rope import Yarn
from composer_jax.parallel.dispatch import DISPATCH

SAVES = ("latents", "attention", "feed_forward")
"""Names of values inside a layer that can be kept for the backward pass."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a Decoder. Numerics follow from these fields only, never from a model's name.

    Defaults of optional fields are those of DeepSeek-V3 / Kimi K2 (arXiv 2412.19437, section 4.2; Kimi K2 report).
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_dense_layers: int
    """The first layers that use a dense feed-forward block instead of experts (K2: 1, DeepSeek-V3: 3)."""
    n_heads: int
    kv_lora_rank: int | None
    """R: width of the latent that keys and values are made from, and that the decode cache stores (K2: 512). None:
    grouped-query attention with n_kv_heads instead (models/gqa.py)."""
    qk_nope_dim: int
    """K: entries of a query or key head without position (Qwen3: 0, GLM-4.5: half of the head)."""
    qk_rope_dim: int
    v_head_dim: int
    dense_ff_dim: int
    expert_ff_dim: int
    n_experts: int
    experts_per_token: int
    n_shared_experts: int
    """Shared experts are one feed-forward block of width n_shared_experts * expert_ff_dim."""
    q_lora_rank: int | None = None
    """Rank of the query projection; None projects directly (K2: 1536, Moonlight: None)."""
    routed_scaling_factor: float = 1.0
    """Multiplies the normalised gates (K2: 2.827)."""
    n_expert_groups: int = 1
    topk_groups: int = 1
    """Group-limited routing: only experts of the topk_groups best groups can be chosen (DeepSeek-V3: 8 and 4)."""
    router_scores: Literal["sigmoid", "softmax"] = "sigmoid"
    """How the router's logits become scores: for each expert alone, or over all of them (Qwen3, gpt-oss)."""
    normalise_gates: bool = True
    """Whether the gates of a token's experts are divided by their sum."""
    router_logit_bias: bool = False
    """A trained bias in the router's logits (gpt-oss); the bias of the load rule is another, and always there."""
    expert_bias: bool = False
    """Biases in the routed experts (gpt-oss)."""
    swiglu_limit: float | None = None
    """gpt-oss's clamped SwiGLU in the routed experts (ops/activation.py), and where it clamps (7.0); None: SwiGLU."""
    n_kv_heads: int | None = None
    """N: heads of keys and values of grouped-query attention; each serves n_heads / N heads of queries."""
    qk_norm: bool = False
    """RMSNorm of every query and key head before the rotation (Qwen3, GLM-4.5)."""
    qkv_bias: bool = False
    out_bias: bool = False
    attention_sinks: bool = False
    """One more logit per head in the softmax, whose weight goes nowhere (gpt-oss)."""
    sliding_window: int | None = None
    """Tokens that a layer with a window sees, itself included (gpt-oss: 128)."""
    full_attention_every: int = 1
    """Of so many layers, the last sees everything and the others the window (gpt-oss: 2); 1: all see everything."""
    norm_eps: float = 1e-6
    latent_norm_eps: float = 1e-6
    """Epsilon of the norms on MLA's query and key-value latents. DeepSeek's and transformers' code fix it at 1e-6, also
    where norm_eps is another (Moonlight, K2.5: 1e-5)."""
    rope_theta: float = 10_000.0
    rope_halves: bool = False
    """Which entries of a head are rotated as a pair: i and i + P/2, or 2i and 2i + 1 (DeepSeek, K2)."""
    yarn: Yarn | None = None
    """How positions beyond the context of pretraining are told apart (models/rope.py); None: plain rotation."""
    max_context: int = 4096
    """Longest context in tokens; longer rows and caches are refused."""
    tie_embeddings: bool = False
    n_mtp_modules: int = 0
    """Multi-token-prediction modules after the last layer, each continuing from the one before."""

    # -- Extras that K2 does not have. They help a from-scratch model of a million parameters; off in every other
    # preset.
    attention_scale: float = 1.0
    """Multiplies the 1/sqrt(K+P) of the attention logits."""
    embedding_taps: int = 0
    """A causal convolution on the embeddings: x_t = e_t + sum_j W_j e_{t-j}, j = 1..embedding_taps."""
    init: str = "normal"
    """Initial weights: "normal", or the import path of an initialiser (models/initializers.py)."""
    init_std: float | None = None
    """Standard deviation of every weight matrix (DeepSeek-V3: 0.006); None means 1/sqrt(fan in)."""

    # -- How it is computed
    dispatch: str = "ring"
    """Expert dispatch (parallel/dispatch/): "dense" computes every expert for every token; "ring" never drops a token;
    "all_to_all" and "ragged_all_to_all" send less if experts are divided over more devices than a token has experts,
    and may drop tokens. Or the import path of a user's own, "package.module:function"."""
    capacity_factor: float = 2.0
    """Rows that a device has room for at once, as a multiple of what it would get if all experts were chosen equally
    often. What does not fit is dropped by all_to_all and ragged_all_to_all, and takes another round with ring. Not
    published; ours."""
    cache_dtype: Literal["compute", "int8"] = "compute"
    """What the sampler's cache is kept in: the compute dtype, or 8 bits with one scale per token and group, which takes
    half of the room and of the traffic of bfloat16 and moves the sampler's probabilities away from the learner's."""
    param_dtype: str = "float32"
    compute_dtype: str = "bfloat16"
    scan_unroll: int = 1
    """Layers per iteration of the scan over depth. Unrolling fully is faster for a handful of small layers."""
    heads_at_once: int | None = None
    """Heads per device whose keys and values exist at once in MLA's training form (256 thousand positions of K2's 64
    heads would be 11 GB of them); None: all."""
    head_chunk: int | None = None
    """Positions per device whose logits over the vocabulary exist at once in a loss (32 thousand positions of K2 would
    make 21 GB of them); None: all."""
    expert_chunk: int | None = None
    """Tokens per device that go to their experts at once; None: all."""
    remat: bool = True
    """Recompute a layer's inside in the backward pass; only the layer inputs are kept, and what remat_saves names."""
    remat_saves: tuple[str, ...] = ()
    """What of a layer's inside is kept as well: "latents" (of MLA, small), "attention" (what the TPU's kernel gives, so
    that it runs once) and "feed_forward" (its output)."""

    def __post_init__(self):
        def require(condition: bool, message: str):
            if not condition:
                raise UserError(message)

        require(
            self.experts_per_token <= self.n_experts,
            f"experts_per_token={self.experts_per_token} is more than n_experts={self.n_experts}; "
            "choose at most that many.",
        )
        require(
            self.n_experts % self.n_expert_groups == 0,
            f"n_experts={self.n_experts} does not divide into n_expert_groups={self.n_expert_groups}.",
        )
        require(
            0 < self.topk_groups <= self.n_expert_groups,
            f"topk_groups={self.topk_groups} must be between 1 and n_expert_groups={self.n_expert_groups}.",
        )
        require(
            self.topk_groups * (self.n_experts // self.n_expert_groups) >= self.experts_per_token,
            f"experts_per_token={self.experts_per_token} do not fit into topk_groups={self.topk_groups} groups of "
            f"{self.n_experts // self.n_expert_groups} experts.",
        )
        require(
            0 <= self.n_dense_layers < self.n_layers,
            f"n_dense_layers={self.n_dense_layers} must be smaller than n_layers={self.n_layers}.",
        )
        if self.kv_lora_rank is None:
            require(
                self.n_kv_heads is not None and self.n_kv_heads >= 1 and self.n_heads % self.n_kv_heads == 0,
                f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}: kv_lora_rank is None.",
            )
            require(
                self.q_lora_rank is None,
                f"q_lora_rank={self.q_lora_rank}: latent attention only, but kv_lora_rank=None.",
            )
            require(
                self.heads_at_once is None, f"heads_at_once={self.heads_at_once}: latent attention only; leave it out."
            )
        else:
            for field in ("n_kv_heads", "qk_norm", "qkv_bias", "out_bias", "attention_sinks"):
                require(
                    not getattr(self, field),
                    f"{field}={getattr(self, field)} belongs to grouped-query attention; set kv_lora_rank=None for it.",
                )
        require(
            self.full_attention_every == 1
            if self.sliding_window is None
            else self.sliding_window >= 1 and self.full_attention_every > 1,
            f"sliding_window={self.sliding_window} and full_attention_every={self.full_attention_every}: a window "
            "needs layers that have it, and the other way round.",
        )
        require(
            self.router_scores in ("sigmoid", "softmax"),
            f"router_scores={self.router_scores!r} is unknown; use 'sigmoid' or 'softmax'.",
        )
        require(
            self.qk_nope_dim >= 0 and self.qk_rope_dim >= 0,
            f"qk_nope_dim={self.qk_nope_dim} and qk_rope_dim={self.qk_rope_dim} are widths; neither can be negative.",
        )
        require(self.qk_rope_dim % 2 == 0, f"qk_rope_dim={self.qk_rope_dim} must be even: rotary pairs.")
        require(
            set(self.remat_saves) <= set(SAVES),
            f"remat_saves={self.remat_saves} has names other than {', '.join(SAVES)}.",
        )
        require(
            self.dispatch in DISPATCH or ":" in self.dispatch,
            f"dispatch={self.dispatch!r} is unknown; use one of {', '.join(DISPATCH)}, or an import path like "
            "'package.module:function'.",
        )
        require(
            0 < self.capacity_factor < float("inf"),
            f"capacity_factor={self.capacity_factor} must be a number greater than 0; 2.0 is room for twice the mean.",
        )
        for field in ("heads_at_once", "head_chunk", "expert_chunk"):
            size = getattr(self, field)
            require(size is None or size >= 1, f"{field}={size} must be at least 1; leave it out for all at once.")
        require(
            self.cache_dtype in ("compute", "int8"),
            f"cache_dtype={self.cache_dtype!r} is unknown; use 'compute' or 'int8'.",
        )
        require(
            self.init == "normal" or ":" in self.init,
            f"init={self.init!r} is unknown; use 'normal' or an import path like 'package.module:function'.",
        )
        require(self.n_mtp_modules >= 0, f"n_mtp_modules={self.n_mtp_modules} is a count; use 0 or more.")

    @property
    def n_moe_layers(self) -> int:
        return self.n_layers - self.n_dense_layers

    @property
    def latent_dim(self) -> int:
        """Floats that the decode cache stores per token and layer: R + P, or the keys and values of N heads."""
        if self.kv_lora_rank is None:
            return self.n_kv_heads * (self.qk_nope_dim + self.qk_rope_dim + self.v_head_dim)
        return self.kv_lora_rank + self.qk_rope_dim

    @property
    def logit_scale(self) -> float:
        """What attention logits are multiplied by."""
        yarn = 1.0 if self.yarn is None else self.yarn.logit_scale
        return self.attention_scale * (self.qk_nope_dim + self.qk_rope_dim) ** -0.5 * yarn

    def has_window(self, layer: int) -> bool:
        """Whether a layer sees only the sliding window."""
        return (layer + 1) % self.full_attention_every != 0

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.compute_dtype)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ModelConfig":
        """Builds from plain values; an unknown or missing field is a UserError that names it."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise UserError(f"Unknown model field {unknown[0]!r}; the fields are {', '.join(known)}.")
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in fields]
        if missing:
            raise UserError(f"The model configuration lacks {', '.join(missing)}.")
        if isinstance(fields.get("yarn"), Mapping):
            fields = {**fields, "yarn": _yarn(fields["yarn"])}
        if "remat_saves" in fields:
            fields = {**fields, "remat_saves": tuple(fields["remat_saves"])}
        return cls(**fields)


def _yarn(fields: Mapping[str, Any]) -> Yarn:
    known = {f.name for f in dataclasses.fields(Yarn)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise UserError(f"Unknown field yarn.{unknown[0]!r}; the fields are {', '.join(sorted(known))}.")
    if "factor" not in fields:
        raise UserError("yarn lacks its factor.")
    return Yarn(**fields)
