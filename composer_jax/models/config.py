"""ModelConfig: everything that shapes the network, and nothing else, with the ranges of its fields."""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp

from composer_jax.errors import UserError
from composer_jax.models.rope import Llama3Rope, RopeScaling, Yarn
from composer_jax.ops.attention_form import AttentionForm
from composer_jax.ops.quantized_matmul import Precision
from composer_jax.parallel.dispatch import DISPATCH

COMPUTATION_FIELDS = (
    "dispatch",
    "capacity_factor",
    "cache_dtype",
    "cache_routing",
    "cache_mtp",
    "param_dtype",
    "compute_dtype",
    "precision",
    "expert_qat",
    "attention_form",
    "scan_unroll",
    "heads_at_once",
    "head_chunk",
    "expert_chunk",
    "early_expert_gather",
    "remat",
    "remat_saves",
)
"""Fields that say how a network is computed; all others say which network it is."""

CHECKPOINT_NAMES = ("latents", "attention", "out_proj", "feed_forward")
"""Values inside a layer that remat_saves can name (jax.ad_checkpoint.checkpoint_name)."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a Decoder. Numerics follow from these fields only, never from a model's name.

    Fields without a default are sizes that every network states. Defaults are those of DeepSeek-V3 / Kimi K2 (arXiv
    2412.19437, section 4.2; Kimi K2 report) or switch a part off. Sizes of published networks are in presets.py.

    Raises:
      UserError: a value is out of range or contradicts another; the sentence names field, value and way out. Each
        attention kind refuses the fields that it does not use (models/attention_kinds.py: attention_kind).
    """

    vocab_size: int
    """Rows of the embedding, in tokens; at least the tokenizer's vocabulary (K2: 163,840)."""
    d_model: int
    """D: width of the residual stream (K2: 7168)."""
    n_layers: int
    """L: transformer layers, without MTP modules (K2: 61)."""
    n_heads: int
    """H: heads of queries (K2: 64)."""
    qk_rope_dim: int
    """P: rotated numbers of a query or key head, even (K2: 64)."""
    v_head_dim: int
    """V: width of a value head (K2: 128)."""
    expert_ff_dim: int = 0
    """F: hidden width of one expert (K2: 2048); 0 in a network without experts."""
    n_experts: int = 0
    """E: routed experts of an expert layer (K2: 384); 0: no layer has experts (Llama, Qwen2.5, Qwen3-8B)."""
    experts_per_token: int = 0
    """k: routed experts that compute each token (K2: 8); 0 in a network without experts."""
    n_dense_layers: int = 0
    """First layers that have a dense feed-forward block instead of experts (K2: 1, DeepSeek-V3: 3). Without experts all
    layers are dense, and n_layers is stored as 0."""
    dense_layers: tuple[int, ...] | None = None
    """Indices of the layers with a dense feed-forward block where these are not the first ones, ascending from 0
    (Qwen3-MoE's mlp_only_layers). None: the first n_dense_layers."""
    dense_ff_dim: int = 0
    """Hidden width of the dense feed-forward blocks (K2: 18,432); unused where no layer is dense."""
    n_shared_experts: int = 0
    """Shared experts, one feed-forward block of width n_shared_experts * expert_ff_dim (K2: 1)."""

    # -- Attention
    attention: str | None = None
    """Attention kind: a name in models/attention_kinds.py ("mla", "gqa") or the import path of a class as in
    models/attention.py. None: "mla" where kv_lora_rank is set, else "gqa"."""
    kv_lora_rank: int | None = None
    """R: width of the latent that MLA expands to keys and values and that the decode cache stores (K2: 512). None:
    grouped-query attention with n_kv_heads."""
    q_lora_rank: int | None = None
    """Rank of MLA's query projection; None projects directly (K2: 1536, Moonlight: None)."""
    qk_nope_dim: int = 0
    """K: numbers of a query or key head that are not rotated (K2: 128, Qwen3: 0, GLM-4.5: half of the head)."""
    n_kv_heads: int | None = None
    """N: heads of keys and values of grouped-query attention; each serves n_heads / N heads of queries (Qwen3: 4)."""
    qk_norm: bool = False
    """RMSNorm of every query and key head before the rotation (Qwen3, GLM-4.5); grouped-query attention only."""
    qkv_bias: bool = False
    """Biases of the query, key and value projections (GLM-4.5, gpt-oss); grouped-query attention only."""
    out_bias: bool = False
    """Bias of the output projection (gpt-oss); grouped-query attention only."""
    attention_sinks: bool = False
    """One more logit per head in the softmax, without a value (gpt-oss); grouped-query attention only."""
    sliding_window: int | None = None
    """Tokens that a layer with a window attends to, the current one included (gpt-oss: 128); None: no window."""
    full_attention_every: int = 1
    """n: layers n, 2n, ... (counted from 1) attend to the whole context, the others have the window (gpt-oss: 2)."""
    attention_scale: float = 1.0
    """Factor on the 1/sqrt(K+P) of the attention logits. Ours, for small models; 1 in every published network."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies (K2: 50,000; Qwen3-Coder: 10,000,000)."""
    rope_halves: bool = False
    """Rotates the pairs (i, i + P/2) of a head (Qwen3, GLM-4.5, gpt-oss) instead of (2i, 2i + 1) (DeepSeek, K2)."""
    yarn: Yarn | None = None
    """YaRN's rescaled frequencies for contexts beyond that of pretraining (models/rope.py); None: plain rotation."""
    llama3_rope: Llama3Rope | None = None
    """Llama 3.1's rescaled frequencies instead of YaRN's (models/rope.py); None: plain rotation."""
    max_context: int = 4096
    """Longest context in tokens; longer rows and caches are refused (K2: 131,072)."""

    # -- Experts
    routed_scaling_factor: float = 1.0
    """Factor on the normalised gates (K2: 2.827, DeepSeek-V3: 2.5)."""
    n_expert_groups: int = 1
    """Groups of experts for group-limited routing (DeepSeek-V3: 8); a divisor of n_experts."""
    topk_groups: int = 1
    """Groups whose experts a token can choose (DeepSeek-V3: 4)."""
    router_scores: Literal["sigmoid", "softmax"] = "sigmoid"
    """Function from the router's logits to scores: per expert (DeepSeek-V3) or over all experts (Qwen3, gpt-oss)."""
    normalise_gates: bool = True
    """Divides the gates of a token by their sum."""
    router_logit_bias: bool = False
    """Trained bias on the router's logits (gpt-oss), besides the selection bias that every router has."""
    expert_bias: bool = False
    """Biases in the routed experts (gpt-oss)."""
    swiglu_limit: float | None = None
    """Clamp of gpt-oss's SwiGLU in the routed experts (ops/activation.py; gpt-oss: 7.0); None: plain SwiGLU."""

    # -- Norms, embedding, heads
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm except those on MLA's latents (K2: 1e-5)."""
    latent_norm_eps: float = 1e-6
    """Epsilon of the RMSNorms on MLA's query and key-value latents. DeepSeek's and transformers' code fix it at 1e-6,
    also where norm_eps differs (Moonlight, K2.5: 1e-5)."""
    tie_embeddings: bool = False
    """Uses the embedding as the head's weight."""
    n_mtp_modules: int = 0
    """Multi-token-prediction modules after the last layer, each continuing from the previous one (DeepSeek-V3: 1)."""
    embedding_taps: int = 0
    """Taps of a causal convolution on the embeddings: x_t = e_t + sum_j W_j e_{t-j}, j = 1..embedding_taps. Ours, for
    from-scratch models of a million parameters; 0 in every published network."""

    # -- Initial weights
    init: str = "normal"
    """Initialiser: "normal", or the import path of a function as in models/initializers.py."""
    init_std: float | None = None
    """Standard deviation of every weight matrix (DeepSeek-V3: 0.006); None: 1/sqrt(fan in)."""

    # -- Computation: changes speed and memory, and rounding at most (COMPUTATION_FIELDS)
    dispatch: str = "ring"
    """Expert dispatch: a name in parallel/dispatch ("dense", "ring", "ragged_all_to_all") or the import path of a
    Dispatch. dense computes every expert for every token; ring never drops a token; ragged_all_to_all sends less where
    the experts are sharded over more devices than a token has experts, and may drop tokens."""
    capacity_factor: float = 2.0
    """Rows that a device's dispatch buffer holds, as a multiple of its share under even load. ragged_all_to_all drops
    rows beyond it, ring computes them in another round. Not published; ours."""
    cache_dtype: Literal["compute", "int8"] = "compute"
    """Dtype of the sampler's cache: compute_dtype, or int8 with one scale per token and part of an entry, which halves
    memory and traffic against bfloat16 and moves the sampler's probabilities away from the learner's."""
    cache_routing: bool = False
    """Keeps the experts of every token in the sampler's cache, two bytes per expert layer and choice, so that a sample
    can return them (SamplingParams.return_routing)."""
    cache_mtp: bool = False
    """Keeps the entries of the first MTP module in the sampler's cache, so that it can draft tokens. The sampler sets
    it (SamplerConfig.drafts)."""
    param_dtype: str = "float32"
    """Dtype of the weights."""
    compute_dtype: str = "bfloat16"
    """Dtype of activations and of weights in matrix products; sums, norms, router and softmax are float32. "float32"
    leaves the products to the backend's default precision (float32 on a CPU, TF32 on a GPU, one pass in bfloat16 on a
    TPU), which JAX's option jax_default_matmul_precision="highest" makes float32. The router's product always is."""
    precision: Precision = "none"
    """Format that the operands of matrix products are rounded to, by fake quantisation, in training and in the sampler:
    those of attention's projections, of experts and dense feed-forward blocks, and of MTP modules. "mxfp8": MXFP8
    forward and backward. "nvfp4": NVFP4 with a scale per token forward, MXFP8 backward (Composer 2, arXiv 2603.24477).
    Router, embedding, head, norms and attention itself stay in their dtypes. It shows what the format does to a model
    and saves no time (ops/quantized_matmul.py)."""
    expert_qat: Literal["none", "int4"] = "none"
    """"int4": the weights of routed experts are rounded to 4 bits in groups of 32 wherever they are used, and the
    gradient passes straight through, so that they can be published in 4 bits (K2 Thinking)."""
    attention_form: AttentionForm = "auto"
    """How attention of whole rows is computed (ops/attention_form.py): "splash", JAX's fused kernel for TPUs; "cudnn",
    cuDNN's for NVIDIA GPUs from Hopper on; "plain", matrix products with float32 scores. "auto" is the fused form of
    the platform where it can run, else the plain one; the log says which and why. A fused form that is asked for by
    name and cannot run is refused at the start. "plain" also keeps decoding from its kernels
    (ops/tpu_paged_attention.py, ops/gpu_paged_attention.py), which otherwise run where they can."""
    scan_unroll: int = 1
    """Layers per iteration of the scan over depth; full unrolling is faster for a handful of small layers."""
    heads_at_once: int | None = None
    """Heads per device whose keys and values exist at once in MLA's training form (K2's 64 heads at 256 thousand
    positions: 11 GB); None: all."""
    head_chunk: int | None = None
    """Positions per device whose logits over the vocabulary exist at once in a loss (K2 at 32 thousand positions: 21
    GB); None: all."""
    expert_chunk: int | None = None
    """Tokens per device that are dispatched to experts at once; None: all."""
    early_expert_gather: bool = False
    """Training all-gathers the experts' weights of a layer until its attention ends, not only when tokens arrive. A
    compiler that runs collectives beside computation then hides them behind attention (docs/scale.md); the whole
    weights take memory meanwhile."""
    remat: bool = True
    """Recomputes the inside of a layer in the backward pass; layer inputs and remat_saves are kept."""
    remat_saves: tuple[str, ...] = ()
    """Values inside a layer that are kept as well: "latents" (of MLA, small), "attention" (the output of the fused
    kernel, which then runs once), "out_proj" (of attention's output projection) and "feed_forward" (its output)."""

    def __post_init__(self):
        _check(self)
        if self.n_experts == 0:  # one network, one config
            object.__setattr__(self, "n_dense_layers", 0)

    @property
    def n_moe_layers(self) -> int:
        """Layers with experts."""
        return sum(not self.is_dense(layer) for layer in range(self.n_layers))

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """The rescaling of the rotary frequencies; None: plain rotation."""
        return self.yarn or self.llama3_rope

    @property
    def logit_scale(self) -> float:
        """Factor on the attention logits."""
        scaling = 1.0 if self.rope_scaling is None else self.rope_scaling.logit_scale
        return self.attention_scale * (self.qk_nope_dim + self.qk_rope_dim) ** -0.5 * scaling

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has a dense feed-forward block instead of experts."""
        if self.n_experts == 0:
            return True
        return layer < self.n_dense_layers if self.dense_layers is None else layer in self.dense_layers

    def has_window(self, layer: int) -> bool:
        """Whether a layer attends to the sliding window only."""
        return (layer + 1) % self.full_attention_every != 0

    @property
    def dtype(self) -> jnp.dtype:
        """compute_dtype as a dtype."""
        return jnp.dtype(self.compute_dtype)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ModelConfig":
        """Builds a config from plain values, for example those of config.json.

        Raises:
          UserError: a field is unknown or missing, or a value is out of range.
        """
        known = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise UserError(f"Unknown model field {unknown[0]!r}; the fields are {', '.join(known)}.")
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in fields]
        if missing:
            raise UserError(f"The model configuration lacks {', '.join(missing)}; set {missing[0]}.")
        fields = dict(fields)
        for name, kind in (("yarn", Yarn), ("llama3_rope", Llama3Rope)):
            if isinstance(fields.get(name), Mapping):
                fields[name] = _rope_scaling(name, kind, fields[name])
        for name in ("remat_saves", "dense_layers"):
            if isinstance(fields.get(name), list):
                fields[name] = tuple(fields[name])
        return cls(**fields)


def _rope_scaling(name: str, kind: type[RopeScaling], fields: Mapping[str, Any]) -> RopeScaling:
    known = {f.name for f in dataclasses.fields(kind)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise UserError(f"Unknown field {name}.{unknown[0]!r}; the fields are {', '.join(sorted(known))}.")
    if "factor" not in fields:
        raise UserError(f"{name} lacks its factor; set {name}.factor to 1 or more.")
    return kind(**fields)


AT_LEAST_0 = {
    "qk_rope_dim",
    "qk_nope_dim",
    "expert_ff_dim",
    "n_experts",
    "experts_per_token",
    "n_dense_layers",
    "dense_ff_dim",
    "n_shared_experts",
    "n_mtp_modules",
    "embedding_taps",
}
"""Whole-number fields that may be 0; the others are at least 1."""
EXPERT_FIELDS = (
    "expert_ff_dim",
    "experts_per_token",
    "dense_layers",
    "n_shared_experts",
    "routed_scaling_factor",
    "n_expert_groups",
    "topk_groups",
    "router_scores",
    "normalise_gates",
    "router_logit_bias",
    "expert_bias",
    "swiglu_limit",
    "cache_routing",
    "expert_qat",
)
"""Fields that have their default in a network without experts. Of two that differ in one of them, only one is valid."""
DTYPES = ("float32", "bfloat16", "float16", "float64")
_HINTS = typing.get_type_hints(ModelConfig)


def _check(config: ModelConfig) -> None:
    """Raises a UserError for the first field whose value is out of range or contradicts another."""
    _check_values(config)
    _check_names(config)
    _check_precision(config)
    _check_layers(config)
    if config.n_experts:
        _check_dense_layers(config)
        _check_routing(config)
    else:
        _check_without_experts(config)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _check_values(config: ModelConfig) -> None:
    """Checks every number, flag and choice against the type of its field."""
    for field, hint in _HINTS.items():
        value, kinds = getattr(config, field), typing.get_args(hint) or (hint,)
        if value is None and type(None) in kinds:
            continue
        if int in kinds:
            least = int(field not in AT_LEAST_0)
            is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
            _require(is_whole, f"{field}={value!r} must be a whole number; use at least {least}.")
        elif float in kinds:
            is_positive = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
            _require(is_positive, f"{field}={value!r} must be finite and greater than 0; use 1.0.")
        elif bool in kinds:
            _require(isinstance(value, bool), f"{field}={value!r} is not a boolean; use True or False.")
        elif typing.get_origin(hint) is Literal:
            _require(value in kinds, f"{field}={value!r} is unknown; use one of {', '.join(kinds)}.")


def _check_names(config: ModelConfig) -> None:
    _require(
        not config.cache_mtp or config.n_mtp_modules > 0, "cache_mtp=True needs an MTP module; n_mtp_modules is 0."
    )
    for field in ("param_dtype", "compute_dtype"):
        value = getattr(config, field)
        _require(value in DTYPES, f"{field}={value!r} is not a floating-point dtype; use one of {', '.join(DTYPES)}.")
    for field, names in (("dispatch", tuple(DISPATCH)), ("init", ("normal",))):
        value = getattr(config, field)
        _require(
            value in names or ":" in value,
            f"{field}={value!r} is unknown; use {', '.join(names)} or an import path like 'package.module:function'.",
        )
    _require(
        set(config.remat_saves) <= set(CHECKPOINT_NAMES),
        f"remat_saves={config.remat_saves} has unknown names; use {', '.join(CHECKPOINT_NAMES)}.",
    )


def _check_precision(config: ModelConfig) -> None:
    c = config
    _require(
        c.precision == "none" or c.expert_qat == "none",
        f"precision={c.precision!r} and expert_qat={c.expert_qat!r} both round the weights of experts; set one of them "
        "to 'none'.",
    )
    _require(
        c.precision == "none" or c.heads_at_once is None,
        f"heads_at_once={c.heads_at_once} cuts the blocks of precision={c.precision!r}, which run across heads; set "
        "heads_at_once=None or precision='none'.",
    )


def _check_layers(config: ModelConfig) -> None:
    c = config
    _require(
        c.yarn is None or c.llama3_rope is None,
        "yarn and llama3_rope both rescale the rotary frequencies; set one of them to None.",
    )
    _require(
        c.qk_rope_dim % 2 == 0,
        f"qk_rope_dim={c.qk_rope_dim} must be even, because numbers are rotated in pairs; use {c.qk_rope_dim + 1}.",
    )
    _require(
        c.qk_nope_dim + c.qk_rope_dim > 0,
        f"qk_nope_dim={c.qk_nope_dim} and qk_rope_dim={c.qk_rope_dim} leave a head without width; set one of them.",
    )
    _require(
        (c.sliding_window is None) == (c.full_attention_every == 1),
        f"sliding_window={c.sliding_window} and full_attention_every={c.full_attention_every} contradict each other; "
        "set both (window, and 2 or more), or neither (None and 1).",
    )


def _check_without_experts(config: ModelConfig) -> None:
    for field in EXPERT_FIELDS:
        value, default = getattr(config, field), type(config).__dataclass_fields__[field].default
        _require(
            value == default,
            f"{field}={value!r} has no use in a network without experts (n_experts=0); use {default!r}, or set "
            "n_experts.",
        )
    _require(
        config.n_dense_layers in (0, config.n_layers),
        f"n_dense_layers={config.n_dense_layers} leaves other layers without experts (n_experts=0, "
        f"n_layers={config.n_layers}); set n_experts, or use 0 for a network of dense layers.",
    )
    _require(
        config.dense_ff_dim > 0,
        f"dense_ff_dim={config.dense_ff_dim} leaves a network without experts (n_experts=0) without a feed-forward "
        "width; use 1 or more.",
    )


def _check_dense_layers(config: ModelConfig) -> None:
    c = config
    _require(
        c.n_dense_layers < c.n_layers,
        f"n_dense_layers={c.n_dense_layers} must be smaller than n_layers={c.n_layers}; use at most {c.n_layers - 1}, "
        "or n_experts=0 for a network of dense layers.",
    )
    if c.dense_layers is not None:
        _require(
            c.n_dense_layers == 0,
            f"n_dense_layers={c.n_dense_layers} and dense_layers={c.dense_layers} both say which layers are dense; set "
            "n_dense_layers=0 or dense_layers=None.",
        )
        is_set = isinstance(c.dense_layers, tuple) and all(type(layer) is int for layer in c.dense_layers)
        _require(
            is_set and list(c.dense_layers) == sorted({*c.dense_layers} & {*range(c.n_layers)}),
            f"dense_layers={c.dense_layers!r} must be ascending indices of layers; use indices from 0 to "
            f"{c.n_layers - 1}.",
        )
        _require(
            len(c.dense_layers) < c.n_layers,
            f"dense_layers={c.dense_layers} are all of n_layers={c.n_layers}; use n_experts=0 for a network of dense "
            "layers.",
        )
        first = len(c.dense_layers)
        _require(
            c.dense_layers != tuple(range(first)),
            f"dense_layers={c.dense_layers} are the first {first} layers; use n_dense_layers={first} and "
            "dense_layers=None.",
        )
    _require(
        c.dense_ff_dim > 0 or not (c.n_dense_layers or c.dense_layers),
        f"dense_ff_dim={c.dense_ff_dim} leaves the dense layers (n_dense_layers={c.n_dense_layers}, "
        f"dense_layers={c.dense_layers}) without a width; use 1 or more.",
    )


def _check_routing(config: ModelConfig) -> None:
    c = config
    for field in ("expert_ff_dim", "experts_per_token"):
        _require(
            getattr(c, field) > 0,
            f"{field}={getattr(c, field)} leaves n_experts={c.n_experts} without work; use 1 or more, or n_experts=0 "
            "for a network of dense layers.",
        )
    _require(
        c.experts_per_token <= c.n_experts,
        f"experts_per_token={c.experts_per_token} is more than n_experts={c.n_experts}; use at most {c.n_experts}.",
    )
    _require(
        c.n_experts % c.n_expert_groups == 0,
        f"n_experts={c.n_experts} does not divide into n_expert_groups={c.n_expert_groups}; use a divisor of "
        f"{c.n_experts}.",
    )
    _require(
        c.topk_groups <= c.n_expert_groups,
        f"topk_groups={c.topk_groups} is more than n_expert_groups={c.n_expert_groups}; use at most "
        f"{c.n_expert_groups}.",
    )
    size = c.n_experts // c.n_expert_groups
    _require(
        c.topk_groups * size >= c.experts_per_token,
        f"experts_per_token={c.experts_per_token} do not fit into topk_groups={c.topk_groups} groups of {size} "
        f"experts; use at least {-(-c.experts_per_token // size)} groups.",
    )
