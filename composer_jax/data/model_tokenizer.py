"""The tokenizer of a published model (tokenizer.json), with its control tokens kept apart from its text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import tokenizers

from composer_jax.data.tokenizer import encodable
from composer_jax.errors import UserError

_UNKNOWN = "\ufffd"
_SAMPLE = "A line,  two spaces\n\tand \u00e9\u4e2d\U0001f600 <|x|>\n\n"  # must come back from its ids as it was


@dataclass(frozen=True)
class ControlToken:
    """A token that only code writes. `lstrip`, `rstrip`: whether it swallows the white space before and after it."""

    id: int
    lstrip: bool
    rstrip: bool


class ModelTokenizer:
    """Text <-> token ids of a published model. Immutable; safe to share between threads.

    control: the control tokens by how they are spelled: those the tokenizer calls special, and those that the chat
    template spells (many models do not call the marks of tool calls special). names: the same by id.
    """

    def __init__(self, tokenizer_json: str, chat_template: str, name: str) -> None:
        """name: where it comes from, for messages. Raises UserError for what is no tokenizer or loses text."""
        try:
            description = json.loads(tokenizer_json)
            self._backend = tokenizers.Tokenizer.from_str(tokenizer_json)
            added = {token["content"]: token for token in description.get("added_tokens", ())}
            control = {text: token for text, token in added.items() if token["special"] or text in chat_template}
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(_without(description, control)))
        except Exception as error:  # the backend raises plain Exception
            raise UserError(f"{name} holds no tokenizer.json that can be read ({error}); download it again") from error
        self.name = name
        self.control = {
            text: ControlToken(token["id"], token["lstrip"], token["rstrip"]) for text, token in control.items()
        }
        self.names = {token.id: text for text, token in self.control.items()}
        self._known = frozenset(self._backend.get_vocab(with_added_tokens=True).values())
        if self.decode(self.encode(_SAMPLE)) != _SAMPLE:
            raise UserError(f"the tokenizer of {name} does not give text back as it was; use a byte-level tokenizer")

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, never a control token, even where the text spells one out."""
        return self._plain.encode(encodable(text), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of any ids, control tokens by name. Total: broken UTF-8 and unknown ids give U+FFFD."""
        parts = []
        for control, run in groupby(ids, key=lambda i: i in self.names or i not in self._known):
            if control:
                parts += [self.names.get(i, _UNKNOWN) for i in run]
            else:
                parts.append(self._backend.decode(list(run), skip_special_tokens=False))
        return "".join(parts)

    def id_of(self, control: str) -> int:
        """Raises UserError when the tokenizer has no such control token."""
        if control not in self.control:
            raise UserError(f"the tokenizer of {self.name} has no control token {control}; use a model that has it")
        return self.control[control].id

    def without_control(self, ids: Iterable[int]) -> list[int]:
        """The ids that stand for text."""
        return [i for i in ids if i not in self.names]


def _without(description: dict[str, Any], control: Iterable[str]) -> dict[str, Any]:
    """A tokenizer that has never heard of the control tokens: to it they are characters. It encodes all of a text, and
    nothing else, whatever else it is told to do for training."""
    model = description["model"]
    added = [token for token in description.get("added_tokens", ()) if token["content"] not in control]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        known = set(control) - {model.get("unk_token")}
        vocabulary = {text: i for text, i in vocabulary.items() if text not in known}
    nothing_else = dict.fromkeys(("post_processor", "truncation", "padding"))
    return {**description, **nothing_else, "added_tokens": added, "model": {**model, "vocab": vocabulary}}
