"""Loads tokenizer, chat format and sampling defaults of a published model, from its files and never from its name."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

from composer_jax.data.chat import harmony_parts
from composer_jax.data.chat.call_forms import FORMS
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.harmony import HarmonyFormat
from composer_jax.data.chat.jinja_template import JinjaTemplate
from composer_jax.data.chat.kimi import KIMI, KimiFormat
from composer_jax.data.chat.template_tools import TemplateToolsFormat, call_form
from composer_jax.data.chat.text_tools import TextToolsFormat
from composer_jax.data.chat.tool_prompt import TOOL_PROMPT
from composer_jax.data.model_tokenizer import ModelTokenizer, token_text
from composer_jax.data.text_files import TextFiles, read_json_object, text_files
from composer_jax.data.tokenizer import SPECIAL, Tokenizer
from composer_jax.errors import UserError

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
GENERATION = "generation_config.json"
TOKENIZER_FILES = (TOKENIZER, CONFIG, TEMPLATE, GENERATION)
"""All files that tokenizer and chat format are read from."""
_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")  # fields of tokenizer_config.json that templates use
NOT_APPLIED = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "typical_p": 1.0}
"""Fields that change what transformers samples and that this sampler lacks, with the value that changes nothing."""


def load_tokenizer(source: TextFiles | Path | str) -> Tokenizer | ModelTokenizer:
    """Returns the tokenizer of a model: Tokenizer if it has our control tokens, else ModelTokenizer.

    source: a folder with tokenizer.json and, for a published model, tokenizer_config.json, generation_config.json and
    chat_template.jinja, each of which may be missing; its path or URL, or any TextFiles.

    Raises UserError without tokenizer.json, and for files that cannot be read.
    """
    files = text_files(source)
    text = files.text(TOKENIZER)
    if text is None:
        raise UserError(
            f"{files.name} has no tokenizer.json; convert its tokenizer with the transformers library first"
        )
    config = read_json_object(files, CONFIG)
    end_ids = read_end_ids(files, GENERATION, read_json_object(files, GENERATION))
    tok = ModelTokenizer(text, "".join(_templates(files, config)), files.name, config=config, end_ids=end_ids)
    if set(SPECIAL) <= tok.control.keys():
        return Tokenizer.from_text(text, f"{files.name}/{TOKENIZER}")
    return tok


def load_chat_format(source: TextFiles | Path | str, *, tool_prompt: str = TOOL_PROMPT) -> ChatFormat:
    """Returns the chat format of a model; its `tokenizer` is that of `load_tokenizer`.

    CompactFormat and HarmonyFormat if the tokenizer has their control tokens, TemplateToolsFormat if the template
    writes calls in one of the forms of call_forms.py, KimiFormat if in that of kimi.py, else TextToolsFormat.

    Args:
      source: as in `load_tokenizer`.
      tool_prompt: declares the tools in TextToolsFormat (tool_prompt.py); other formats declare them their way.

    Raises UserError for a model without tokenizer or template, and for a template that cannot be used.
    """
    files = text_files(source)
    tok = load_tokenizer(files)
    if isinstance(tok, Tokenizer):
        return CompactFormat(tok)
    config = read_json_object(files, CONFIG)
    source_text, tool_source = _templates(files, config)
    if not source_text:
        raise UserError(f"{files.name} has no chat template; use a model that has one, such as an instruct model")
    variables = {name: token_text(config[name]) for name in _VARIABLES if config.get(name)}
    template = JinjaTemplate(source_text, variables, files.name, tool_source=tool_source)
    if set(harmony_parts.CONTROL) <= tok.control.keys():
        return HarmonyFormat(tok, template)
    found = call_form(tok, template, (*FORMS, KIMI))
    if found is None:
        return TextToolsFormat(tok, template, tool_prompt)
    form, separator = found
    if form is KIMI:
        return KimiFormat(tok, template, separator)
    return TemplateToolsFormat(tok, template, form, separator)


def _templates(files: TextFiles, config: dict[str, Any]) -> tuple[str, str]:
    """The template's source, and that of the template for conversations with tools; "" where there is none.

    As in transformers, a list or an object of named templates has "default" and perhaps "tool_use".
    """
    source = files.text(TEMPLATE)
    if source is not None:
        return source.removeprefix("\ufeff"), ""
    configured = config.get("chat_template") or ""
    if isinstance(configured, str):
        return configured.removeprefix("\ufeff"), ""
    entries = (
        [{"name": k, "template": v} for k, v in configured.items()] if isinstance(configured, dict) else configured
    )
    try:
        named = {entry["name"]: entry["template"].removeprefix("\ufeff") for entry in entries}
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{files.name}/{CONFIG} has a chat_template that is neither a text nor a list of named templates "
            f"({error}); correct the file."
        ) from error
    default, tool_use = named.get("default", ""), named.get("tool_use", "")
    return (default, tool_use) if default else (tool_use, "")


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

    Raises UserError for a file that is not a JSON object, or a field of another type.
    """
    config = read_json_object(files, GENERATION)
    where = f"{files.name}/{GENERATION} has"
    kinds = {"temperature": (int, float), "top_p": (int, float), "top_k": int, "min_p": (int, float)}
    numbers = {field: config[field] for field in kinds if config.get(field) is not None}
    for field, value in numbers.items():
        if not isinstance(value, kinds[field]) or isinstance(value, bool):
            raise UserError(f"{where} {field}={value!r}, which is not a number; correct the file.")
    if config.get("do_sample") is False:
        numbers["temperature"] = 0.0
    for field, neutral in NOT_APPLIED.items():
        if config.get(field, neutral) not in (None, neutral):
            warnings.warn(
                f"{where} {field}={config[field]}, which the sampler does not apply; its samples can differ from those "
                "that the model's authors intend.",
                stacklevel=2,
            )
    end_ids = read_end_ids(files, GENERATION, config)
    if not end_ids:
        end_ids = read_end_ids(files, "config.json", read_json_object(files, "config.json"))
    return GenerationDefaults(**numbers, end_ids=end_ids)


def read_end_ids(files: TextFiles, file: str, config: dict[str, Any]) -> tuple[int, ...]:
    """Returns eos_token_id, a number or a list in a config; () without it.

    config: the content of `file`, which errors name.

    Raises UserError for another type.
    """
    ids = config.get("eos_token_id")
    ids = [ids] if isinstance(ids, int) else ids or []
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise UserError(f"{files.name}/{file} has eos_token_id={ids!r}; it must be a token id or a list of them.")
    return tuple(ids)
