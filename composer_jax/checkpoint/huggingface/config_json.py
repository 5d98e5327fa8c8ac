"""config.json: read into a ModelConfig, and written from one."""

from collections.abc import Mapping
from typing import Any

from composer_jax.checkpoint.huggingface.families import (
    DEEPSEEK_V3,
    FAMILIES,
    GLM4_MOE,
    GPT_OSS,
    Family,
    find_family,
    find_family_by_type,
)
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.rope import Yarn

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
    family = find_family_by_type(model_type)
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
    theta, yarn = _rotary(hf_config, temperatures=family is DEEPSEEK_V3)
    fields = dict(family.fixed)
    for ours, key in keys.items():
        fields[ours] = _checked(key, hf_config[key], 1.0 if ours in _REAL else 1, optional=ours in _NULLABLE)
    for ours, (key, default) in family.optional.items():
        value = _checked(key, hf_config.get(key), default, optional=True)
        fields[ours] = default if value is None else value
    for ours in ("n_expert_groups", "topk_groups"):  # 0 or null groups mean one group
        fields[ours] = fields[ours] or 1
    if family is not DEEPSEEK_V3:
        fields |= _heads(hf_config, family)
    return ModelConfig(**fields, rope_theta=theta, yarn=yarn)


_REAL = ("norm_eps", "routed_scaling_factor")
_NULLABLE = ("q_lora_rank", "sliding_window")


def _checked(key: str, value: Any, like: bool | int | float, *, optional: bool = False) -> Any:
    """Returns the value if it has the type of `like` and is no negative integer. None passes if it is optional."""
    if value is None and optional:
        return None
    types = {bool: bool, int: int, float: int | float}[type(like)]
    if value is None or not isinstance(value, types) or (isinstance(value, bool) and not isinstance(like, bool)):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[type(like)]
        raise UserError(f"config.json has {key}={value!r}, which is not {expected}.")
    if isinstance(like, int) and value < 0:
        raise UserError(f"config.json has {key}={value!r}, which cannot be negative.")
    return value


def _heads(hf_config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the widths of heads. Raises a UserError if the layers of gpt-oss do not alternate in its own order."""
    width = _checked("head_dim", hf_config.get("head_dim"), 1, optional=True)
    if not width:
        width = hf_config["hidden_size"] // max(hf_config["num_attention_heads"], 1)
    rotary_fraction = 1.0
    if family is GLM4_MOE:
        rope = hf_config.get("rope_parameters") or {}
        rotary_fraction = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 0.5))
        rotary_fraction = _checked("partial_rotary_factor", rotary_fraction, 1.0)
    rotary = int(width * rotary_fraction)
    if family is GPT_OSS:
        layers = hf_config["num_hidden_layers"]
        alternating = [("sliding", "full")[i % 2] + "_attention" for i in range(layers)]
        if (hf_config.get("layer_types") or alternating) != alternating:
            raise UserError(
                f"config.json has layer_types={hf_config['layer_types']}; only alternating ones are supported."
            )
    return {"qk_nope_dim": width - rotary, "qk_rope_dim": rotary, "v_head_dim": width}


def _rotary(hf_config: Mapping[str, Any], *, temperatures: bool) -> tuple[float, Yarn | None]:
    """Returns (theta, YaRN).

    transformers 5 stores both in rope_parameters; earlier versions store theta at the top and YaRN in rope_scaling.

    temperatures: whether the attention of this family reads DeepSeek's mscale and mscale_all_dim.
    """
    # With both keys, as `hf_config` writes them, transformers uses rope_scaling, and people edit it.
    sections = [hf_config.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    for section in sections:
        if not isinstance(section, Mapping):
            raise UserError(f"config.json scales positions by {section!r}, which is not an object.")
    rope = sections[0] or sections[1]
    thetas = [section["rope_theta"] for section in (rope, sections[1], hf_config) if "rope_theta" in section]
    if not thetas:
        raise UserError("config.json lacks rope_theta.")
    theta = _checked("rope_theta", thetas[0], 1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind != "yarn":
        raise UserError(f"config.json scales positions by {kind!r}; only 'yarn' and 'default' are supported.")
    if rope.get("attention_factor") is not None:
        raise UserError(f"config.json has attention_factor={rope['attention_factor']!r}; only null is supported.")
    if "factor" not in rope:
        raise UserError("config.json scales positions by 'yarn' and lacks its factor.")
    numbers = ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    rope = {**rope, **{key: _checked(key, rope.get(key), 1.0, optional=key != "factor") for key in numbers}}
    original = _checked(
        "original_max_position_embeddings", rope.get("original_max_position_embeddings"), 1, optional=True
    )
    mscale, mscale_all_dim = (rope[key] or 0.0 for key in ("mscale", "mscale_all_dim"))
    if mscale and not temperatures:
        raise UserError(f"config.json has mscale={mscale!r}; only null is supported for this model_type.")
    if bool(mscale) != bool(mscale_all_dim):
        raise UserError(
            f"config.json has mscale={mscale!r} and mscale_all_dim={mscale_all_dim!r}; both or none must be set."
        )
    return float(theta), Yarn(
        factor=float(rope["factor"]),
        original_context=original or hf_config["max_position_embeddings"],
        beta_fast=float(rope["beta_fast"] or 32.0),
        beta_slow=float(rope["beta_slow"] or 1.0),
        mscale=float(mscale or 1.0),
        mscale_all_dim=float(mscale_all_dim),
        truncate=rope.get("truncate", True),
    )


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of this network, as transformers reads it."""
    family = find_family(config)
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.yarn is not None:
        rope = {
            "rope_type": "yarn",
            "factor": config.yarn.factor,
            "original_max_position_embeddings": config.yarn.original_context,
            "beta_fast": config.yarn.beta_fast,
            "beta_slow": config.yarn.beta_slow,
            "truncate": config.yarn.truncate,
        }
        if config.yarn.mscale_all_dim:
            rope |= {"mscale": config.yarn.mscale, "mscale_all_dim": config.yarn.mscale_all_dim}
        else:
            _require(config.yarn.mscale == 1, "yarn.mscale", config.yarn.mscale, family)
        if family is not DEEPSEEK_V3:
            _require(not config.yarn.mscale_all_dim, "yarn.mscale_all_dim", config.yarn.mscale_all_dim, family)
    written: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.only,
        **{key: getattr(config, ours) for ours, (key, _) in family.optional.items()},
        **{names.split()[0]: getattr(config, ours) for ours, names in family.fields.items()},
        # For both generations of transformers: theta beside the scaling, and within the parameters.
        "rope_theta": config.rope_theta,
        # The code that DeepSeek and Moonshot ship with their weights reads the key "type".
        "rope_scaling": None if config.yarn is None else rope | {"type": "yarn"},
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
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
    counts = [_checked(key, text.get(key), 1, optional=True) for key in ("num_nextn_predict_layers", "num_mtp_layers")]
    return counts[0] or counts[1] or 0
