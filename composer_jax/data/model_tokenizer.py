"""The tokenizer of a published model (tokenizer.json), in which text never encodes to control tokens."""

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
_SAMPLE = "A line,  two spaces\n\tand \u00e9\u4e2d\U0001f600 <|x|>\n\n"  # decode(encode(...)) must return it


@dataclass(frozen=True)
class ControlToken:
    """A token that only a chat format writes. `lstrip`, `rstrip`: whether it absorbs white space before, after it."""

    id: int
    lstrip: bool
    rstrip: bool


class ModelTokenizer:
    """Text <-> token ids of a published model. Immutable; safe to share between threads.

    control: the control tokens by their text: those that the tokenizer declares special, and those in the chat template
    (many models do not declare the tokens around tool calls special). names: their texts by id.
    """

    def __init__(self, tokenizer_json: str, chat_template: str, name: str) -> None:
        """name: where the files come from, for error messages.

        Raises UserError if `tokenizer_json` is not a tokenizer, or the tokenizer loses text.
        """
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
        """Returns the ids of `text`, never a control token, even if the text spells one."""
        return self._plain.encode(encodable(text), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of any ids, control tokens by name; broken UTF-8 and unknown ids become U+FFFD."""
        parts = []
        for control, run in groupby(ids, key=lambda i: i in self.names or i not in self._known):
            if control:
                parts += [self.names.get(i, _UNKNOWN) for i in run]
            else:
                parts.append(self._backend.decode(list(run), skip_special_tokens=False))
        return "".join(parts)

    def id_of(self, control: str) -> int:
        """Returns the id of a control token. Raises UserError if the tokenizer lacks it."""
        if control not in self.control:
            raise UserError(f"the tokenizer of {self.name} has no control token {control}; use a model that has it")
        return self.control[control].id

    def without_control(self, ids: Iterable[int]) -> list[int]:
        """Returns the ids that are not control tokens."""
        return [i for i in ids if i not in self.names]


def _without(description: dict[str, Any], control: Iterable[str]) -> dict[str, Any]:
    """The description of a tokenizer without these control tokens, which encodes them as characters.

    Post-processing, truncation and padding are removed too, so that it encodes a text and nothing else.
    """
    model = description["model"]
    added = [token for token in description.get("added_tokens", ()) if token["content"] not in control]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        known = set(control) - {model.get("unk_token")}
        vocabulary = {text: i for text, i in vocabulary.items() if text not in known}
    removed = dict.fromkeys(("post_processor", "truncation", "padding"))
    return {**description, **removed, "added_tokens": added, "model": {**model, "vocab": vocabulary}}
