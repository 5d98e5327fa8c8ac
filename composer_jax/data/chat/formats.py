"""The table of a run's chat formats. A new format is one file and one line here, or an import path in a config.

A model folder names no format: load_chat_format.py finds the format that fits its tokenizer and template.
"""

from collections.abc import Callable, Mapping

from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.extensions import resolve

CHAT_FORMATS: Mapping[str, Callable[..., ChatFormat]] = {"compact": CompactFormat}
"""Builders by DataConfig.chat_format."""


def chat_format_kind(name: str) -> Callable[..., ChatFormat]:
    """Returns the builder that data.chat_format names.

    Raises UserError when the name is neither in CHAT_FORMATS nor an import path that resolves.
    """
    return resolve(name, CHAT_FORMATS, "config.data.chat_format")
