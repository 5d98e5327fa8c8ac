"""Loads the tokenizer and the chat format of a published model, which follow from its files, never from its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer_jax.data.chat import kimi
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.generation_defaults import FILE as GENERATION
from composer_jax.data.chat.generation_defaults import read_end_ids
from composer_jax.data.chat.hermes import HermesFormat, writes_calls
from composer_jax.data.chat.jinja_template import JinjaTemplate
from composer_jax.data.chat.kimi import KimiFormat
from composer_jax.data.chat.text_tools import TextToolsFormat
from composer_jax.data.chat.tool_prompt import TOOL_PROMPT
from composer_jax.data.model_tokenizer import ModelTokenizer, token_text
from composer_jax.data.text_files import TextFiles, read_json_object, text_files
from composer_jax.data.tokenizer import SPECIAL, Tokenizer
from composer_jax.errors import UserError

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
TOKENIZER_FILES = (TOKENIZER, CONFIG, TEMPLATE, GENERATION)
"""All files that this module reads."""
_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")  # fields of tokenizer_config.json that templates use


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
    tok = ModelTokenizer(text, _template(files, config), files.name, config=config, end_ids=end_ids)
    if set(SPECIAL) <= tok.control.keys():
        return Tokenizer.from_text(text, f"{files.name}/{TOKENIZER}")
    return tok


def load_chat_format(source: TextFiles | Path | str, *, tool_prompt: str = TOOL_PROMPT) -> ChatFormat:
    """Returns the chat format of a model; its `tokenizer` is that of `load_tokenizer`.

    CompactFormat if the tokenizer has its control tokens, KimiFormat likewise, HermesFormat if the template writes
    calls between control tokens as Hermes and Qwen do, else TextToolsFormat.

    Args:
      source: as in `load_tokenizer`.
      tool_prompt: declares the tools in TextToolsFormat (tool_prompt.py); other formats declare them their way.

    Raises UserError for a model without tokenizer or template, and for a template that cannot be used.
    """
    files = text_files(source)
    tok = load_tokenizer(files)
    if isinstance(tok, Tokenizer):
        return CompactFormat(tok)
    if set(kimi.CONTROL) <= tok.control.keys():
        return KimiFormat(tok)
    config = read_json_object(files, CONFIG)
    source_text = _template(files, config)
    if not source_text:
        raise UserError(f"{files.name} has no chat template; use a model that has one, such as an instruct model")
    variables = {name: token_text(config[name]) for name in _VARIABLES if config.get(name)}
    template = JinjaTemplate(source_text, variables, files.name)
    return HermesFormat(tok, template) if writes_calls(tok, template) else TextToolsFormat(tok, template, tool_prompt)


def _template(files: TextFiles, config: dict[str, Any]) -> str:
    """The template's source, "" if there is none. Among several in a config, the one for tools."""
    source = files.text(TEMPLATE)
    if source is not None:
        return source
    configured = config.get("chat_template") or ""
    if isinstance(configured, str):
        return configured
    named = {entry["name"]: entry["template"] for entry in configured}
    return named.get("tool_use") or named.get("default", "")
