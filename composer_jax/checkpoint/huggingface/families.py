"""The architectures of transformers that the Decoder implements, and the keys of their config.json.

A family is data: the key of each field of ModelConfig, and the values that both sides fix. Reading looks the family up
by model_type; writing finds the family that can hold every field of a ModelConfig.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from composer_jax.errors import UserError
from composer_jax.models.attention_kinds import attention_name
from composer_jax.models.config import ModelConfig

_COMMON = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "dense_ff_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "max_context": "max_position_embeddings",
}
_EXPERTS = {"experts_per_token": "num_experts_per_tok"}
_GROUPED = {"n_expert_groups": ("n_group", 1), "topk_groups": ("topk_group", 1)}
_TIED = {"tie_embeddings": ("tie_word_embeddings", False)}

_NO_EXTRAS = {"embedding_taps": 0, "attention_scale": 1.0}
_NO_MODULES = {"n_mtp_modules": 0}
_PLAIN_EXPERTS = {"router_logit_bias": False, "expert_bias": False, "swiglu_limit": None}
_UNIFORM_LAYERS = {"attention_sinks": False, "sliding_window": None}
_NO_GROUPS = {"n_expert_groups": 1, "topk_groups": 1, "routed_scaling_factor": 1.0}
_FIRST_DENSE = {"dense_layers": None}
_ONLY_EXPERTS = _FIRST_DENSE | {"n_dense_layers": 0, "n_shared_experts": 0}
_NO_EXPERTS = {"n_experts": 0}
_HEADS = {"kv_lora_rank": None, "rope_halves": True}


@dataclasses.dataclass(frozen=True)
class Family:
    model_type: str
    architecture: str
    fields: Mapping[str, str]
    """Our field -> the required key of config.json; with several, any one is read and the first is written."""
    optional: Mapping[str, tuple[str, Any]]
    """Our field -> (key, value if config.json lacks the key)."""
    only: Mapping[str, Any]
    """Keys of which one value is supported; it is also the meaning of a config.json without the key."""
    fixed: Mapping[str, Any]
    """Our fields that have one value in this family."""
    also: tuple[str, ...] = ()
    """Further values of model_type for the same architecture."""
    head_dim: int | None = None
    """Width of a head where config.json has no head_dim; None: hidden_size over num_attention_heads."""
    rope_theta: float | None = None
    """Rotary base where config.json has none; None: it has to have one."""
    rope_scaling: Mapping[str, Any] | None = None
    """Rescaling of positions where config.json says nothing about it; None: there is none."""


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    also=("kimi_k2",),
    fields=_COMMON
    | _EXPERTS
    | {
        "n_dense_layers": "first_k_dense_replace",
        "kv_lora_rank": "kv_lora_rank",
        "q_lora_rank": "q_lora_rank",
        "qk_nope_dim": "qk_nope_head_dim",
        "qk_rope_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
        "expert_ff_dim": "moe_intermediate_size",
        "n_experts": "n_routed_experts",
        "routed_scaling_factor": "routed_scaling_factor",
        # Without these keys, transformers has other values than the code that is published beside the weights.
        "n_expert_groups": "n_group",
        "topk_groups": "topk_group",
        "n_shared_experts": "n_shared_experts",
    },
    optional=_TIED,
    only={
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_interleave": True,
    },
    fixed=_NO_EXTRAS
    | _PLAIN_EXPERTS
    | _UNIFORM_LAYERS
    | _FIRST_DENSE
    | {"router_scores": "sigmoid", "normalise_gates": True, "rope_halves": False, "latent_norm_eps": 1e-6},
)

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=_COMMON
    | _EXPERTS
    | {
        "n_dense_layers": "first_k_dense_replace",
        "n_kv_heads": "num_key_value_heads",
        "expert_ff_dim": "moe_intermediate_size",
        "n_experts": "n_routed_experts",
        "routed_scaling_factor": "routed_scaling_factor",
    },
    optional=_TIED
    | _GROUPED
    | {
        "n_shared_experts": ("n_shared_experts", 1),
        "qkv_bias": ("attention_bias", False),
        "qk_norm": ("use_qk_norm", False),
    },
    only={"norm_topk_prob": True, "hidden_act": "silu"},
    fixed=_NO_EXTRAS
    | _PLAIN_EXPERTS
    | _UNIFORM_LAYERS
    | _HEADS
    | _FIRST_DENSE
    | {"router_scores": "sigmoid", "normalise_gates": True, "out_bias": False},
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=_COMMON
    | _EXPERTS
    | {
        "n_kv_heads": "num_key_value_heads",
        "expert_ff_dim": "moe_intermediate_size",
        "n_experts": "num_experts num_local_experts",
    },
    optional=_TIED
    | {
        "normalise_gates": ("norm_topk_prob", False),
        "qkv_bias": ("attention_bias", False),
        "out_bias": ("attention_bias", False),
    },
    only={"hidden_act": "silu", "use_sliding_window": False},
    fixed=_NO_EXTRAS
    | _NO_MODULES
    | _PLAIN_EXPERTS
    | _UNIFORM_LAYERS
    | _NO_GROUPS
    | _HEADS
    | {"router_scores": "softmax", "qk_norm": True, "n_shared_experts": 0},
)

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=_COMMON
    | _EXPERTS
    | {
        "n_kv_heads": "num_key_value_heads",
        "expert_ff_dim": "intermediate_size",
        "n_experts": "num_local_experts",
        "sliding_window": "sliding_window",
    },
    optional=_TIED
    | {
        "swiglu_limit": ("swiglu_limit", 7.0),
        "qkv_bias": ("attention_bias", True),
        "out_bias": ("attention_bias", True),
    },
    only={"hidden_act": "silu", "swiglu_alpha": 1.702},
    fixed=_NO_EXTRAS
    | _NO_MODULES
    | _NO_GROUPS
    | _ONLY_EXPERTS
    | _HEADS
    | {
        "router_scores": "softmax",
        "normalise_gates": True,
        "router_logit_bias": True,
        "expert_bias": True,
        "attention_sinks": True,
        "qk_norm": False,
        "full_attention_every": 2,
    },
    head_dim=64,
    rope_theta=150_000.0,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
)

_DENSE = _NO_EXTRAS | _NO_MODULES | _UNIFORM_LAYERS | _NO_EXPERTS | _HEADS
_BIASES = {"qkv_bias": ("attention_bias", False), "out_bias": ("attention_bias", False)}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=_COMMON,
    # Without the key, and with null, there are as many heads of keys as of queries (config_json.py).
    optional=_TIED | _BIASES | {"n_kv_heads": ("num_key_value_heads", 0)},
    only={"hidden_act": "silu", "mlp_bias": False},
    fixed=_DENSE | {"qk_norm": False},
    rope_theta=10_000.0,
)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=_COMMON | {"n_kv_heads": "num_key_value_heads"},
    optional=_TIED,
    only={"hidden_act": "silu", "use_sliding_window": False},
    fixed=_DENSE | {"qkv_bias": True, "out_bias": False, "qk_norm": False},
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=_COMMON | {"n_kv_heads": "num_key_value_heads"},
    optional=_TIED | _BIASES,
    only={"hidden_act": "silu", "use_sliding_window": False},
    fixed=_DENSE | {"qk_norm": True},
    head_dim=128,
)

FAMILIES = (DEEPSEEK_V3, GLM4_MOE, QWEN3_MOE, GPT_OSS, LLAMA, QWEN2, QWEN3)


def find_family(config: ModelConfig) -> Family:
    """Returns the family that can store this network. Raises a UserError that names a field that none can store."""
    by_attention = {"mla": DEEPSEEK_V3, "gqa": _grouped_family(config)}
    name = attention_name(config)
    if name not in by_attention:
        raise UserError(
            f"attention={name!r} cannot be stored in a Hugging Face checkpoint; use {' or '.join(by_attention)}."
        )
    likely = by_attention[name]
    if not config.n_experts and "n_experts" not in likely.fixed:
        raise UserError(
            f"n_experts=0 cannot be stored in a {likely.model_type} checkpoint; use grouped-query attention for a "
            "network without experts."
        )
    for field, value in likely.fixed.items():
        actual = getattr(config, field)
        if actual != value:
            way_out = "; leave the modules out (mtp=False, --nomtp)" if field == "n_mtp_modules" else ""
            raise UserError(
                f"{field}={actual} cannot be stored in a {likely.model_type} checkpoint; only {value} can be{way_out}."
            )
    shared: dict[str, str] = {}
    for field, key in [*likely.fields.items(), *((field, key) for field, (key, _) in likely.optional.items())]:
        first = shared.setdefault(key.split()[0], field)
        if getattr(config, field) != getattr(config, first) and field != "dense_ff_dim" and first != "dense_ff_dim":
            raise UserError(
                f"{first}={getattr(config, first)} and {field}={getattr(config, field)} share the key {key} of a "
                f"{likely.model_type} checkpoint."
            )
    return likely


def _grouped_family(config: ModelConfig) -> Family:
    """Returns the family that a network with grouped-query attention resembles most."""
    if config.n_experts == 0:
        if config.qk_norm:
            return QWEN3
        return QWEN2 if config.qkv_bias and not config.out_bias else LLAMA
    return GPT_OSS if config.expert_bias else GLM4_MOE if config.router_scores == "sigmoid" else QWEN3_MOE
