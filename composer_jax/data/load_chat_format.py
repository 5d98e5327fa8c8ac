"""Which chat format a model speaks: what its tokenizer and its template hold decides, never what it is called."""

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

_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")  # what templates name of tokenizer_config.json


def load_chat_format(folder: Path | str) -> ChatFormat:
    """The format of a model folder: tokenizer.json, and tokenizer_config.json or chat_template.jinja.

    Ours if the control tokens are ours; Kimi K2's if they are those; else that of the template, if it writes calls
    in the style of Hermes and Qwen. Raises UserError for a folder that fits none of them.
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
    if any(mark not in source for mark in chat_template.CALL):
        raise UserError(
            f"the chat template of {folder} writes no calls between {' and '.join(chat_template.CALL)}; "
            f"use a model whose template does"
        )
    variables = {name: _spelled(config[name]) for name in _VARIABLES if config.get(name)}
    return TemplateFormat(tok, JinjaTemplate(source, variables, str(folder)))


def _read(path: Path) -> str | None:
    """The text of a file, None where there is none."""
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
    """The template's source, "" where there is none. Of several that a config names, the one for tools."""
    alone = _read(path)
    if alone is not None:
        return alone
    inside = config.get("chat_template") or ""
    if isinstance(inside, str):
        return inside
    named = {entry["name"]: entry["template"] for entry in inside}
    return named.get("tool_use") or named.get("default", "")


def _spelled(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]
