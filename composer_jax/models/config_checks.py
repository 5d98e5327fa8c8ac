"""Range checks of a ModelConfig. Every failure is a UserError: one sentence with field, value and way out."""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from composer_jax.errors import UserError
from composer_jax.models.attention_kinds import attention_kind
from composer_jax.parallel.dispatch import DISPATCH

if TYPE_CHECKING:
    from composer_jax.models.config import ModelConfig

CHECKPOINT_NAMES = ("latents", "attention", "feed_forward")
"""Values inside a layer that remat_saves can name (jax.ad_checkpoint.checkpoint_name)."""

SMALLEST = {
    "vocab_size": 1,
    "d_model": 1,
    "n_layers": 1,
    "n_heads": 1,
    "qk_rope_dim": 0,
    "qk_nope_dim": 0,
    "v_head_dim": 1,
    "expert_ff_dim": 1,
    "n_experts": 1,
    "experts_per_token": 1,
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
CHOICES = {"router_scores": ("sigmoid", "softmax"), "cache_dtype": ("compute", "int8")}
DTYPES = ("float32", "bfloat16", "float16", "float64")


def check_config(config: "ModelConfig") -> None:
    """Raises a UserError for the first field whose value is out of range or contradicts another."""
    _check_ranges(config)
    _check_names(config)
    _check_layers(config)
    _check_routing(config)
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


def _check_layers(config: "ModelConfig") -> None:
    c = config
    _require(
        c.n_dense_layers < c.n_layers,
        f"n_dense_layers={c.n_dense_layers} must be smaller than n_layers={c.n_layers}; use at most {c.n_layers - 1}.",
    )
    _require(
        c.n_dense_layers == 0 or c.dense_ff_dim > 0,
        f"dense_ff_dim={c.dense_ff_dim} leaves n_dense_layers={c.n_dense_layers} without a width; use 1 or more.",
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


def _check_routing(config: "ModelConfig") -> None:
    c = config
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
