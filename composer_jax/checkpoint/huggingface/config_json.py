"""config.json: a ModelConfig from the one of a checkpoint, and the one that goes with our weights."""

from collections.abc import Mapping
from typing import Any

from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.rope import Yarn

MODEL_TYPES = ("deepseek_v3", "kimi_k2")
"""Values of config.json's model_type that name this architecture."""

TEXT_TOWERS = ("kimi_k25",)
"""Values of model_type whose text_config is one of these, beside a tower for pictures, which we leave out."""

_FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_dense_layers": "first_k_dense_replace",
    "n_heads": "num_attention_heads",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_dim": "qk_nope_head_dim",
    "qk_rope_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "dense_ff_dim": "intermediate_size",
    "expert_ff_dim": "moe_intermediate_size",
    "n_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "q_lora_rank": "q_lora_rank",
    "routed_scaling_factor": "routed_scaling_factor",
    "norm_eps": "rms_norm_eps",
    "max_context": "max_position_embeddings",
}
"""Our field -> the key that config.json must have."""

_ONLY = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_interleave": True,
}
"""Keys of which one value is built; a config.json without the key means that value."""


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that is about the language model: all of it, but for models that also see."""
    if hf_config.get("model_type") not in TEXT_TOWERS:
        return hf_config
    text = hf_config.get("text_config")
    if not isinstance(text, Mapping):
        raise UserError(f"config.json of model_type={hf_config['model_type']!r} lacks its text_config.")
    # transformers has this one key beside the towers.
    return {**text, "tie_word_embeddings": text.get("tie_word_embeddings", False)}


def model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a checkpoint from its config.json. How it is computed (dtypes, dispatch) keeps our defaults.

    Multi-token-prediction modules, which DeepSeek-V3's files have and transformers leaves out, are left out.

    Raises:
      UserError: another architecture, a missing key, or a feature that the Decoder does not have yet.
    """
    hf_config = text_config(hf_config)
    kind = hf_config.get("model_type")
    if kind not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES + TEXT_TOWERS)
        raise UserError(f"model_type={kind!r} in config.json cannot be read; these can: {known}.")
    missing = [key for key in _FIELDS.values() if key not in hf_config]
    if missing:
        raise UserError(f"config.json lacks {', '.join(missing)}.")
    only = _ONLY | {"num_key_value_heads": hf_config["num_attention_heads"]}
    for key, value in only.items():
        found = hf_config.get(key, value)
        null_means_value = not value or key == "num_key_value_heads"
        if found != value and not (found is None and null_means_value):
            raise UserError(f"config.json has {key}={found!r}; only {value!r} can be read yet.")
    theta, yarn = _rotary(hf_config)
    return ModelConfig(
        **{ours: hf_config[theirs] for ours, theirs in _FIELDS.items()},
        n_shared_experts=hf_config.get("n_shared_experts") or 0,
        n_expert_groups=hf_config.get("n_group") or 1,
        topk_groups=hf_config.get("topk_group") or 1,
        rope_theta=theta,
        yarn=yarn,
        tie_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
    )


def _rotary(hf_config: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """(theta, YaRN): in rope_parameters since transformers 5; before, theta at the top and YaRN in rope_scaling."""
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", hf_config.get("rope_theta"))
    if theta is None:
        raise UserError("config.json lacks rope_theta.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind != "yarn":
        raise UserError(f"config.json scales positions by {kind!r}; only 'yarn' and 'default' can be read yet.")
    if rope.get("attention_factor") is not None:
        raise UserError(f"config.json has attention_factor={rope['attention_factor']!r}; only null can be read yet.")
    if "factor" not in rope:
        raise UserError("config.json scales positions by 'yarn' and lacks its factor.")
    mscale, mscale_all_dim = (rope.get(key) or 0.0 for key in ("mscale", "mscale_all_dim"))
    if bool(mscale) != bool(mscale_all_dim):
        raise UserError(
            f"config.json has mscale={mscale!r} and mscale_all_dim={mscale_all_dim!r}; both or none can be read yet."
        )
    return float(theta), Yarn(
        factor=float(rope["factor"]),
        original_context=rope.get("original_max_position_embeddings") or hf_config["max_position_embeddings"],
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        mscale=float(mscale or 1.0),
        mscale_all_dim=float(mscale_all_dim),
        truncate=rope.get("truncate", True),
    )


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json for the weights of this network, as transformers' DeepseekV3Config reads it."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.yarn is not None:
        rope = {
            "rope_type": "yarn",
            "factor": config.yarn.factor,
            "original_max_position_embeddings": config.yarn.original_context,
            "beta_fast": config.yarn.beta_fast,
            "beta_slow": config.yarn.beta_slow,
            "mscale": config.yarn.mscale,
            "mscale_all_dim": config.yarn.mscale_all_dim,
            "truncate": config.yarn.truncate,
        }
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        "num_key_value_heads": config.n_heads,
        "n_shared_experts": config.n_shared_experts,
        "n_group": config.n_expert_groups,
        "topk_group": config.topk_groups,
        **_ONLY,
        "num_nextn_predict_layers": 0,
        # Both generations of transformers: theta beside the scaling, and within the parameters.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.yarn is None else rope,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.param_dtype,
    }
