"""GenerationDefaults: how a published model is meant to be sampled, from its generation_config.json."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from composer_jax.data.text_files import TextFiles, read_json_object
from composer_jax.errors import UserError

FILE = "generation_config.json"
NOT_APPLIED = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "typical_p": 1.0}
"""Fields that change what transformers samples and that this sampler lacks, with the value that changes nothing."""


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """Sampling parameters (sampler/policy.py) of requests that do not name them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    end_ids: tuple[int, ...] = ()
    """Ids that end what the model generates (eos_token_id)."""


def read_generation_defaults(files: TextFiles) -> GenerationDefaults:
    """Reads generation_config.json; a field that is absent or null has its value in GenerationDefaults.

    Without eos_token_id there, that of config.json counts. `"do_sample": false` is temperature 0, as in transformers.
    A field of NOT_APPLIED that changes something is named in a warning. Length limits are not read.

    Raises:
      UserError: a file that is not a JSON object, or a field of another type.
    """
    config = read_json_object(files, FILE)
    numbers = {}
    for field, kinds in (
        ("temperature", (int, float)),
        ("top_p", (int, float)),
        ("top_k", int),
        ("min_p", (int, float)),
    ):
        value = config.get(field)
        if value is not None:
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise UserError(f"{files.name}/{FILE} has {field}={value!r}, which is not a number; correct the file.")
            numbers[field] = value
    if config.get("do_sample") is False:
        numbers["temperature"] = 0.0
    for field, neutral in NOT_APPLIED.items():
        if config.get(field, neutral) not in (None, neutral):
            warnings.warn(
                f"{files.name}/{FILE} has {field}={config[field]}, which the sampler does not apply; its samples can "
                "differ from those that the model's authors intend.",
                stacklevel=2,
            )
    end_ids = read_end_ids(files, FILE, config) or read_end_ids(
        files, "config.json", read_json_object(files, "config.json")
    )
    return GenerationDefaults(**numbers, end_ids=end_ids)


def read_end_ids(files: TextFiles, file: str, config: dict[str, Any]) -> tuple[int, ...]:
    """Returns eos_token_id of a config that was read from `file`: a number or a list. Raises UserError otherwise."""
    ids = config.get("eos_token_id")
    ids = [ids] if isinstance(ids, int) else ids or []
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise UserError(f"{files.name}/{file} has eos_token_id={ids!r}; it must be a token id or a list of them.")
    return tuple(ids)
