"""Range checks of a ModelConfig. Every failure is a UserError: one sentence with field, value and way out."""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from composer_jax.errors import UserError
from composer_jax.models.attention_kinds import attention_kind
from composer_jax.ops.quantized_matmul import PRECISIONS
from composer_jax.parallel.dispatch import DISPATCH

if TYPE_CHECKING:
    from composer_jax.models.config import ModelConfig

CHECKPOINT_NAMES = ("latents", "attention", "out_proj", "feed_forward")
"""Values inside a layer that remat_saves can name (jax.ad_checkpoint.checkpoint_name)."""

SMALLEST = {
    "vocab_size": 1,
    "d_model": 1,
    "n_layers": 1,
    "n_heads": 1,
    "qk_rope_dim": 0,
    "qk_nope_dim": 0,
    "v_head_dim": 1,
    "expert_ff_dim": 0,
    "n_experts": 0,
    "experts_per_token": 0,
    "n_dense_layers": 0,
    "dense_ff_dim": 0,
    "n_shared_experts": 0,
    "kv_lora_rank": 1,
    "q_lora_rank": 1,
    "n_kv_heads": 1,
    "sliding_window": 1,
    "full_attention_every": 1,
    "max_context": 1,
    "n_expert_groups": 1,
    "topk_groups": 1,
    "n_mtp_modules": 0,
    "embedding_taps": 0,
    "scan_unroll": 1,
    "heads_at_once": 1,
    "head_chunk": 1,
    "expert_chunk": 1,
}
"""Whole-number fields and their smallest value; None passes where the field's type allows it."""
OPTIONAL = {
    "kv_lora_rank",
    "q_lora_rank",
    "n_kv_heads",
    "sliding_window",
    "heads_at_once",
    "head_chunk",
    "expert_chunk",
    "swiglu_limit",
    "init_std",
}
POSITIVE = (
    "attention_scale",
    "rope_theta",
    "routed_scaling_factor",
    "swiglu_limit",
    "norm_eps",
    "latent_norm_eps",
    "init_std",
    "capacity_factor",
)
"""Fields that are finite numbers greater than 0."""
CHOICES = {
    "router_scores": ("sigmoid", "softmax"),
    "cache_dtype": ("compute", "int8"),
    "precision": PRECISIONS,
    "expert_qat": ("none", "int4"),
}
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


def check_config(config: "ModelConfig") -> None:
    """Raises a UserError for the first field whose value is out of range or contradicts another."""
    _check_ranges(config)
    _check_names(config)
    _check_precision(config)
    _check_layers(config)
    if config.n_experts:
        _check_dense_layers(config)
        _check_routing(config)
    else:
        _check_without_experts(config)
    attention_kind(config).check_config(config)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _check_ranges(config: "ModelConfig") -> None:
    for field, value in _numbers(config, SMALLEST):
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        least = SMALLEST[field]
        _require(is_whole and value >= least, f"{field}={value!r} must be a whole number; use at least {least}.")
    for field, value in _numbers(config, POSITIVE):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        _require(is_number and 0 < value < math.inf, f"{field}={value!r} must be finite and greater than 0; use 1.0.")


def _numbers(config: "ModelConfig", fields: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yields (field, value), without optional fields that are None."""
    for field in fields:
        value = getattr(config, field)
        if value is not None or field not in OPTIONAL:
            yield field, value


def _check_names(config: "ModelConfig") -> None:
    for field, choices in CHOICES.items():
        value = getattr(config, field)
        _require(value in choices, f"{field}={value!r} is unknown; use one of {', '.join(choices)}.")
    for field in ("cache_routing", "cache_mtp"):
        value = getattr(config, field)
        _require(isinstance(value, bool), f"{field}={value!r} is no truth value.")
    _require(
        not config.cache_mtp or config.n_mtp_modules > 0, "cache_mtp=True needs an MTP module; n_mtp_modules is 0."
    )
    for field in ("param_dtype", "compute_dtype"):
        value = getattr(config, field)
        _require(value in DTYPES, f"{field}={value!r} is no floating-point dtype; use one of {', '.join(DTYPES)}.")
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


def _check_precision(config: "ModelConfig") -> None:
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


def _check_layers(config: "ModelConfig") -> None:
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


def _check_without_experts(config: "ModelConfig") -> None:
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


def _check_dense_layers(config: "ModelConfig") -> None:
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


def _check_routing(config: "ModelConfig") -> None:
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
