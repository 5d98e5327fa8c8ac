"""The rotary embedding of a config.json: its base, and the rescaling of its frequencies.

transformers 5 stores both in rope_parameters; earlier versions store rope_theta at the top and the rescaling in
rope_scaling. Both are read, and both are written.
"""

from collections.abc import Mapping
from typing import Any

from composer_jax.checkpoint.huggingface.json_value import checked_value
from composer_jax.errors import UserError
from composer_jax.models.rope import Llama3Rope, RopeScaling, Yarn


def read_rope(
    hf_config: Mapping[str, Any], *, temperatures: bool, default_theta: float | None
) -> tuple[float, RopeScaling | None]:
    """Returns (theta, rescaling) of a config.json.

    Args:
      temperatures: whether the attention of this family reads DeepSeek's mscale and mscale_all_dim.
      default_theta: the base where config.json has none; None: it has to have one.

    Raises:
      UserError: a missing or bad value, or a rescaling that is not supported.
    """
    # With both keys, as `write_rope` writes them, transformers uses rope_scaling, and people edit it.
    sections = [hf_config.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    for section in sections:
        if not isinstance(section, Mapping):
            raise UserError(f"config.json scales positions by {section!r}, which is not an object.")
    rope = sections[0] or sections[1]
    thetas = [section["rope_theta"] for section in (rope, sections[1], hf_config) if "rope_theta" in section]
    if not thetas and default_theta is None:
        raise UserError("config.json lacks rope_theta.")
    theta = float(checked_value("rope_theta", thetas[0] if thetas else default_theta, 1.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "llama3":
        return theta, _read_llama3(rope)
    if kind == "yarn":
        return theta, _read_yarn(rope, hf_config, temperatures=temperatures)
    raise UserError(f"config.json scales positions by {kind!r}; only 'default', 'llama3' and 'yarn' are supported.")


def _read_llama3(rope: Mapping[str, Any]) -> Llama3Rope:
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if key not in rope]
    if missing:
        raise UserError(f"config.json scales positions by 'llama3' and lacks its {', '.join(missing)}.")
    factor, low, high = (float(checked_value(key, rope[key], 1.0)) for key in keys[:3])
    return Llama3Rope(factor, low, high, checked_value(keys[3], rope[keys[3]], 1))


def _read_yarn(rope: Mapping[str, Any], hf_config: Mapping[str, Any], *, temperatures: bool) -> Yarn:
    if rope.get("attention_factor") is not None:
        raise UserError(f"config.json has attention_factor={rope['attention_factor']!r}; only null is supported.")
    if "factor" not in rope:
        raise UserError("config.json scales positions by 'yarn' and lacks its factor.")
    numbers = ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    rope = {**rope, **{key: checked_value(key, rope.get(key), 1.0, optional=key != "factor") for key in numbers}}
    original = checked_value(
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
