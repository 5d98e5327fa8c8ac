"""The formats under test, and conversations to render in them."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from composer_jax.data.chat.chat_format import ChatFormat, Message
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.chat.messages import AssistantMessage, ToolCall
from composer_jax.data.tokenizer import SPECIAL, Tokenizer
from tests.data.model_folders import (
    CHATML,
    CHATML_TOKENS,
    CLOSED,
    HARMONY,
    HARMONY_TOKENS,
    HEADER_TOKENS,
    HEADERS,
    KEYS,
    KEYS_TOKENS,
    KIMI,
    KIMI_OPENS,
    KIMI_THINKING,
    KIMI_THINKING_TOKENS,
    KIMI_TOKENS,
    OPENS,
    QWEN,
    QWEN_TOKENS,
    TEXTS,
    THINKING_TOKENS,
    THINKS,
    XML,
    tokenizer_json,
    write_folder,
)

NAMES = ("compact", "qwen", "kimi", "chatml", "headers")
TEMPLATES = {
    "qwen": (QWEN_TOKENS, QWEN),
    "kimi": (KIMI_TOKENS, KIMI),
    "kimi_thinking": (KIMI_THINKING_TOKENS, KIMI_THINKING),
    "kimi_opens": (KIMI_THINKING_TOKENS, KIMI_OPENS),
    "chatml": (CHATML_TOKENS, CHATML),
    "harmony": (HARMONY_TOKENS, HARMONY),
    "headers": (HEADER_TOKENS, HEADERS.replace(" | trim", "")),
    "thinks": (THINKING_TOKENS, THINKS),
    "opens": (CHATML_TOKENS, OPENS),
    "closed": (THINKING_TOKENS, CLOSED),
    "xml": (QWEN_TOKENS, XML),
    "keys": (KEYS_TOKENS, KEYS),
}
"""Name -> control tokens and template. Those that rewrite what they are given are not in NAMES."""
CONTROL = {"compact": SPECIAL} | {name: tuple(tokens) for name, (tokens, _) in TEMPLATES.items()}


@dataclass(frozen=True)
class Declaration:
    """A tool as far as a format is concerned."""

    name: str
    description: str
    parameters: dict[str, Any]


@functools.cache
def format_of(name: str) -> ChatFormat:
    if name == "compact":
        return CompactFormat(Tokenizer.train(TEXTS, 320))
    tokens, template = TEMPLATES[name]
    with tempfile.TemporaryDirectory() as folder:
        return load_chat_format(write_folder(Path(folder), tokenizer_json(tokens), template))


def decode(chat: ChatFormat, ids: list[int]) -> str:
    """Ids with control tokens by name."""
    return chat.tokenizer.decode(ids)


def control_ids(name: str) -> set[int]:
    if name == "compact":
        return set(range(len(SPECIAL)))
    return set(format_of(name).tokenizer.names)


def contents(name: str) -> st.SearchStrategy[str]:
    """Text that likes to spell control tokens, and pieces of them."""
    pieces = [text[start:end] for text in CONTROL[name] for start, end in ((0, None), (0, -1), (1, None))]
    return st.lists(st.text(max_size=6) | st.sampled_from([*pieces, "\n", " ", "composer"]), max_size=4).map("".join)


def calls(name: str) -> st.SearchStrategy[ToolCall]:
    text = contents(name)
    value = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
        max_leaves=4,
    )
    names = st.from_regex(r"[A-Za-z0-9_.-]{1,9}", fullmatch=True)
    return st.builds(ToolCall, names, st.dictionaries(text, value, max_size=2))


@st.composite
def conversations(draw: st.DrawFn, name: str) -> list[Message | AssistantMessage]:
    """A request, then turns of the model, each with as many answers as calls; one without calls is answered by a
    user."""
    text = contents(name)
    messages: list[Message | AssistantMessage] = [Message("system", draw(text))] if draw(st.booleans()) else []
    messages.append(Message("user", draw(text)))
    for _ in range(draw(st.integers(0, 3))):
        asked = draw(st.lists(calls(name), max_size=2))
        messages.append(AssistantMessage(draw(text), tuple(asked), True))
        messages += [Message("tool", draw(text)) for _ in asked] or [Message("user", draw(text))]
    return messages


def declared(name: str) -> st.SearchStrategy[list[Declaration]]:
    schema = st.fixed_dictionaries({"type": st.just("object"), "title": contents(name)})
    return st.lists(st.builds(Declaration, st.just("read"), contents(name), schema), max_size=2)
