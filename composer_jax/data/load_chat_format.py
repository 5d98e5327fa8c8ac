"""Loads the chat format of a model folder, which follows from its tokenizer and template, never from a model's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from composer_jax.data import chat_kimi, chat_template
from composer_jax.data.chat_compact import CompactFormat
from composer_jax.data.chat_format import ChatFormat
from composer_jax.data.chat_kimi import KimiFormat
from composer_jax.data.chat_template import TemplateFormat
from composer_jax.data.jinja_template import JinjaTemplate
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.data.tokenizer import SPECIAL, Tokenizer
from composer_jax.errors import UserError

_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")  # fields of tokenizer_config.json that templates use


def load_chat_format(folder: Path | str) -> ChatFormat:
    """Returns the format of a folder with tokenizer.json and tokenizer_config.json or chat_template.jinja.

    CompactFormat if the tokenizer has its control tokens, KimiFormat likewise, else TemplateFormat if the template
    writes calls in the style of Hermes and Qwen.

    Raises UserError for a folder that fits none of them.
    """
    folder = Path(folder)
    text = _read(folder / "tokenizer.json")
    if text is None:
        raise UserError(f"{folder} has no tokenizer.json; convert its tokenizer with the transformers library first")
    config = _config(folder / "tokenizer_config.json")
    source = _template(folder / "chat_template.jinja", config)
    tok = ModelTokenizer(text, source, str(folder))
    if set(SPECIAL) <= tok.control.keys():
        return CompactFormat(Tokenizer.load(folder / "tokenizer.json"))
    if set(chat_kimi.CONTROL) <= tok.control.keys():
        return KimiFormat(tok)
    if not source:
        raise UserError(f"{folder} has no chat template; use a model that has one, such as an instruct model")
    if any(token not in source for token in chat_template.CALL):
        raise UserError(
            f"the chat template of {folder} writes no calls between {' and '.join(chat_template.CALL)}; "
            f"use a model whose template does"
        )
    variables = {name: _token_text(config[name]) for name in _VARIABLES if config.get(name)}
    return TemplateFormat(tok, JinjaTemplate(source, variables, str(folder)))


def _read(path: Path) -> str | None:
    """The text of a file; None if there is no file."""
    try:
        return path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); download it again") from error


def _config(path: Path) -> dict[str, Any]:
    text = _read(path)
    try:
        config = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object; download it again")
    return config


def _template(path: Path, config: dict[str, Any]) -> str:
    """The template's source, "" if there is none. Among several in a config, the one for tools."""
    source = _read(path)
    if source is not None:
        return source
    configured = config.get("chat_template") or ""
    if isinstance(configured, str):
        return configured
    named = {entry["name"]: entry["template"] for entry in configured}
    return named.get("tool_use") or named.get("default", "")


def _token_text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]
