"""config.json: read into a ModelConfig, and written from one."""

from collections.abc import Mapping
from typing import Any

from composer_jax.checkpoint.huggingface.families import (
    DEEPSEEK_V3,
    FAMILIES,
    GLM4_MOE,
    GPT_OSS,
    LLAMA,
    QWEN3_MOE,
    Family,
    find_family,
)
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.rope import Llama3Rope, RopeScaling, Yarn

TEXT_TOWERS = ("kimi_k25",)
"""Values of model_type with a vision tower, which is not read, beside a language model described by text_config."""


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of config.json about the language model: all of it, except with a vision tower."""
    if hf_config.get("model_type") not in TEXT_TOWERS:
        return hf_config
    text = hf_config.get("text_config")
    if not isinstance(text, Mapping):
        raise UserError(f"config.json of model_type={hf_config['model_type']!r} lacks its text_config.")
    # transformers keeps this one key outside text_config.
    return {**text, "tie_word_embeddings": text.get("tie_word_embeddings", False)}


def model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a config.json; fields about computation (dtypes, dispatch) keep our defaults.

    The result has no multi-token-prediction modules (`count_mtp_modules`), because transformers has none.

    Raises:
      UserError: another architecture, a missing key, or a feature that the Decoder does not support.
    """
    hf_config = text_config(hf_config)
    model_type = hf_config.get("model_type")
    family = next((f for f in FAMILIES if model_type == f.model_type or model_type in f.also), None)
    if family is None:
        known = ", ".join([name for f in FAMILIES for name in (f.model_type, *f.also)] + list(TEXT_TOWERS))
        raise UserError(f"model_type={model_type!r} in config.json is not supported; supported are {known}.")
    keys: dict[str, str] = {}
    missing: dict[str, None] = {}
    for ours, names in family.fields.items():
        present = [key for key in names.split() if key in hf_config]
        if present:
            keys[ours] = present[0]
        else:
            missing[names.split()[0]] = None
    if missing:
        raise UserError(f"config.json lacks {', '.join(missing)}.")
    only = dict(family.only)
    if family is DEEPSEEK_V3:
        only["num_key_value_heads"] = hf_config["num_attention_heads"]
    for key, value in only.items():
        actual = hf_config.get(key, value)
        null_means_value = not value or key == "num_key_value_heads"
        if actual != value and not (actual is None and null_means_value):
            raise UserError(f"config.json has {key}={actual!r}; only {value!r} is supported.")
    theta, scaling = _read_rope(hf_config, family)
    fields = dict(family.fixed)
    for ours, key in keys.items():
        fields[ours] = _checked_value(key, hf_config[key], 1.0 if ours in _REAL else 1, optional=ours in _NULLABLE)
    for ours, (key, default) in family.optional.items():
        value = _checked_value(key, hf_config.get(key), default, optional=True)
        fields[ours] = default if value is None else value
    for ours in ("n_expert_groups", "topk_groups"):  # 0 or null groups mean one group
        if ours in fields:
            fields[ours] = fields[ours] or 1
    if "n_shared_experts" in fields:
        fields["n_shared_experts"] = fields["n_shared_experts"] or 0
    if family is not DEEPSEEK_V3:
        fields |= _heads(hf_config, family)
        _check_layer_types(hf_config, family)
    if family is QWEN3_MOE:
        fields |= _dense_layers(hf_config, fields["n_experts"])
    return ModelConfig(
        **fields,
        rope_theta=theta,
        yarn=scaling if isinstance(scaling, Yarn) else None,
        llama3_rope=scaling if isinstance(scaling, Llama3Rope) else None,
    )


_REAL = ("norm_eps", "routed_scaling_factor")
_NULLABLE = ("q_lora_rank", "sliding_window", "n_expert_groups", "topk_groups", "n_shared_experts")
_EXPERTS_OFF = {"router_scores": "sigmoid", "normalise_gates": True}
"""Defaults of the expert fields that Qwen3-MoE sets otherwise, for a network of it in which no layer has experts."""


def _heads(hf_config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the number of heads of keys and values where config.json may leave it out, and the widths of heads."""
    heads = hf_config["num_attention_heads"]
    fields: dict[str, Any] = {}
    if "n_kv_heads" in family.optional and hf_config.get("num_key_value_heads") is None:
        fields["n_kv_heads"] = heads
    width = _checked_value("head_dim", hf_config.get("head_dim"), 1, optional=True) or family.head_dim
    if not width:
        width = hf_config["hidden_size"] // max(heads, 1)
    rope = hf_config.get("rope_parameters") or {}
    rotary_fraction = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if rotary_fraction is None:
        rotary_fraction = 0.5 if family is GLM4_MOE else 1.0
    rotary_fraction = _checked_value("partial_rotary_factor", rotary_fraction, 1.0)
    if rotary_fraction != 1 and family is not GLM4_MOE:
        raise UserError(
            f"config.json has partial_rotary_factor={rotary_fraction}; only 1 is supported for this model_type."
        )
    rotary = int(width * rotary_fraction)
    return fields | {"qk_nope_dim": width - rotary, "qk_rope_dim": rotary, "v_head_dim": width}


def _check_layer_types(hf_config: Mapping[str, Any], family: Family) -> None:
    """Raises a UserError if layers have other windows than every layer of the family."""
    kinds = ("sliding", "full") if family is GPT_OSS else ("full",)
    expected = [f"{kinds[i % len(kinds)]}_attention" for i in range(hf_config["num_hidden_layers"])]
    if (hf_config.get("layer_types") or expected) != expected:
        supported = "alternating ones are" if family is GPT_OSS else "'full_attention' is"
        raise UserError(f"config.json has layer_types={hf_config['layer_types']}; only {supported} supported.")


def _dense_layers(hf_config: Mapping[str, Any], n_experts: int) -> dict[str, Any]:
    """Returns the fields that say which layers of Qwen3-MoE have experts.

    A layer has experts if mlp_only_layers does not list it and decoder_sparse_step divides its number, counted from 1.
    """
    step = _checked_value("decoder_sparse_step", hf_config.get("decoder_sparse_step", 1), 1)
    if step < 1:
        raise UserError(f"config.json has decoder_sparse_step={step}, which must be 1 or more.")
    listed = hf_config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise UserError(f"config.json has mlp_only_layers={listed!r}, which is not a list of layer numbers.")
    layers = range(hf_config["num_hidden_layers"])
    dense = tuple(layer for layer in layers if layer in listed or (layer + 1) % step or not n_experts)
    if len(dense) == len(layers):  # none has experts
        return {"n_experts": 0, "experts_per_token": 0, "expert_ff_dim": 0, **_EXPERTS_OFF}
    if dense == tuple(range(len(dense))):
        return {"n_dense_layers": len(dense)}
    return {"dense_layers": dense}


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of this network, as transformers reads it."""
    family = find_family(config)
    if config.yarn is not None:
        if not config.yarn.mscale_all_dim:
            _require(config.yarn.mscale == 1, "yarn.mscale", config.yarn.mscale, family)
        if family is not DEEPSEEK_V3:
            _require(not config.yarn.mscale_all_dim, "yarn.mscale_all_dim", config.yarn.mscale_all_dim, family)
    written: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.only,
        **{key: getattr(config, ours) for ours, (key, _) in family.optional.items()},
        **{names.split()[0]: getattr(config, ours) for ours, names in family.fields.items()},
        **write_rope(config.rope_theta, config.rope_scaling),
        "torch_dtype": config.param_dtype,
    }
    if family is DEEPSEEK_V3:
        return written | {"num_key_value_heads": config.n_heads, "num_nextn_predict_layers": config.n_mtp_modules}
    width = config.qk_nope_dim + config.qk_rope_dim
    _require(config.v_head_dim == width, "v_head_dim", config.v_head_dim, family)
    written["head_dim"] = width
    if family is GLM4_MOE:
        fraction = config.qk_rope_dim / width
        # transformers rounds down in the same way.
        _require(int(width * fraction) == config.qk_rope_dim, "qk_rope_dim", config.qk_rope_dim, family)
        written["partial_rotary_factor"] = written["rope_parameters"]["partial_rotary_factor"] = fraction
        written["num_nextn_predict_layers"] = config.n_mtp_modules
    else:
        _require(config.qk_nope_dim == 0, "qk_nope_dim", config.qk_nope_dim, family)
    if family is QWEN3_MOE:
        written["mlp_only_layers"] = [layer for layer in range(config.n_layers) if config.is_dense(layer)]
        written["decoder_sparse_step"] = 1
    if family is LLAMA:  # transformers refuses it, although head_dim is stated
        _require(config.d_model % config.n_heads == 0, "n_heads", config.n_heads, family)
    if family is GPT_OSS:
        written["layer_types"] = [
            ("sliding" if config.has_window(layer) else "full") + "_attention" for layer in range(config.n_layers)
        ]
    return written


def _require(condition: bool, field: str, value: Any, family: Family) -> None:
    if not condition:
        raise UserError(f"{field}={value} cannot be stored in a {family.model_type} checkpoint.")


def count_mtp_modules(hf_config: Mapping[str, Any]) -> int:
    """Returns the number of multi-token-prediction modules after the last layer of the checkpoint."""
    text = text_config(hf_config)
    counts = [
        _checked_value(key, text.get(key), 1, optional=True) for key in ("num_nextn_predict_layers", "num_mtp_layers")
    ]
    return counts[0] or counts[1] or 0


def _read_rope(hf_config: Mapping[str, Any], family: Family) -> tuple[float, RopeScaling | None]:
    """Returns (theta, rescaling) of the rotary embedding of a config.json.

    transformers 5 stores both in rope_parameters; earlier versions store rope_theta at the top and the rescaling in
    rope_scaling. Both are read, and both are written. What config.json leaves out is the family's.

    Raises:
      UserError: a missing or bad value, or a rescaling that is not supported.
    """
    # With both keys, as `write_rope` writes them, transformers uses rope_scaling, and people edit it.
    sections = [hf_config.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    for section in sections:
        if not isinstance(section, Mapping):
            raise UserError(f"config.json scales positions by {section!r}, which is not an object.")
    rope = sections[0] or sections[1] or family.rope_scaling or {}
    thetas = [section["rope_theta"] for section in (rope, sections[1], hf_config) if "rope_theta" in section]
    if not thetas and family.rope_theta is None:
        raise UserError("config.json lacks rope_theta.")
    theta = float(_checked_value("rope_theta", thetas[0] if thetas else family.rope_theta, 1.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "llama3":
        return theta, _read_llama3(rope)
    if kind == "yarn":
        return theta, _read_yarn(rope, hf_config, temperatures=family is DEEPSEEK_V3)
    raise UserError(f"config.json scales positions by {kind!r}; only 'default', 'llama3' and 'yarn' are supported.")


def _read_llama3(rope: Mapping[str, Any]) -> Llama3Rope:
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if key not in rope]
    if missing:
        raise UserError(f"config.json scales positions by 'llama3' and lacks its {', '.join(missing)}.")
    factor, low, high = (float(_checked_value(key, rope[key], 1.0)) for key in keys[:3])
    return Llama3Rope(factor, low, high, _checked_value(keys[3], rope[keys[3]], 1))


def _read_yarn(rope: Mapping[str, Any], hf_config: Mapping[str, Any], *, temperatures: bool) -> Yarn:
    """temperatures: whether the attention of the family reads DeepSeek's mscale and mscale_all_dim."""
    if rope.get("attention_factor") is not None:
        raise UserError(f"config.json has attention_factor={rope['attention_factor']!r}; only null is supported.")
    if "factor" not in rope:
        raise UserError("config.json scales positions by 'yarn' and lacks its factor.")
    numbers = ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    rope = {**rope, **{key: _checked_value(key, rope.get(key), 1.0, optional=key != "factor") for key in numbers}}
    original = _checked_value(
        "original_max_position_embeddings", rope.get("original_max_position_embeddings"), 1, optional=True
    )
    mscale, mscale_all_dim = (rope[key] or 0.0 for key in ("mscale", "mscale_all_dim"))
    if mscale and not temperatures:
        raise UserError(f"config.json has mscale={mscale!r}; only null is supported for this model_type.")
    if bool(mscale) != bool(mscale_all_dim):
        raise UserError(
            f"config.json has mscale={mscale!r} and mscale_all_dim={mscale_all_dim!r}; both or none must be set."
        )
    return Yarn(
        factor=float(rope["factor"]),
        original_context=original or hf_config["max_position_embeddings"],
        beta_fast=float(rope["beta_fast"] or 32.0),
        beta_slow=float(rope["beta_slow"] or 1.0),
        mscale=float(mscale or 1.0),
        mscale_all_dim=float(mscale_all_dim),
        truncate=rope.get("truncate", True),
    )


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns the keys of config.json about the rotary embedding, for both generations of transformers."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if isinstance(scaling, Yarn):
        rope = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_context,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
        if scaling.mscale_all_dim:
            rope |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    elif scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return {
        "rope_theta": theta,
        # The code that DeepSeek and Moonshot ship with their weights reads the key "type".
        "rope_scaling": None if scaling is None else rope | {"type": rope["rope_type"]},
        "rope_parameters": {"rope_theta": theta, **rope},
    }


def _checked_value(key: str, value: Any, like: bool | int | float, *, optional: bool = False) -> Any:
    """Returns the value if it has the type of `like` and is not a negative integer. None passes if it is optional.

    Raises:
      UserError: another type, or a negative integer; the sentence names key and value.
    """
    if value is None and optional:
        return None
    types = {bool: bool, int: int, float: int | float}[type(like)]
    if value is None or not isinstance(value, types) or (isinstance(value, bool) and not isinstance(like, bool)):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[type(like)]
        raise UserError(f"config.json has {key}={value!r}, which is not {expected}.")
    if isinstance(like, int) and value < 0:
        raise UserError(f"config.json has {key}={value!r}, which cannot be negative.")
    return value
