"""The tokenizer of a published model (tokenizer.json), in which text never encodes to control tokens."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import tokenizers

from composer_jax.data.tokenizer import encodable
from composer_jax.errors import UserError

_UNKNOWN = "\ufffd"
_SAMPLE = "A line,  two spaces\n\tand \u00e9\u4e2d\U0001f600 <|x|>\n\n"  # decode(encode(...)) must return it


class FimTokens(NamedTuple):
    """Texts of the control tokens before the prefix, the suffix and the middle of a text to fill in."""

    prefix: str
    suffix: str
    middle: str


FIM_TOKENS = (
    FimTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Qwen3, CodeGemma
    FimTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM2
    FimTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder, DeepSeek-V3
    FimTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FimTokens("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),  # Codestral
)
"""The first three that a tokenizer has are used."""

FIM_TEXTS = frozenset(text for tokens in FIM_TOKENS for text in tokens)
"""All of their texts, to which no file may encode."""


@dataclass(frozen=True)
class ControlToken:
    """A token that only a chat format writes. `lstrip`, `rstrip`: whether it absorbs white space before, after it."""

    id: int
    lstrip: bool
    rstrip: bool


class ModelTokenizer:
    """Text <-> token ids of a published model (a TextTokenizer). Immutable; safe to share between threads.

    control: the control tokens by their text: those that the tokenizer declares special, those that its config names,
    those in the chat template (many models do not declare the tokens around tool calls special) and those for filling
    in the middle (FIM_TOKENS). names: their texts by id. end_ids: the ids that end what the model generates.
    bos, pad, vocab_size, fingerprint: see TextTokenizer.
    """

    def __init__(
        self,
        tokenizer_json: str,
        chat_template: str,
        name: str,
        *,
        config: Mapping[str, Any] | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        """
        name: where the files come from, for error messages.
        config: tokenizer_config.json, of which bos_token, eos_token, pad_token and add_bos_token are read.
        end_ids: eos_token_id of generation_config.json.

        Raises UserError if `tokenizer_json` is not a tokenizer, or the tokenizer loses text.
        """
        config = config or {}
        try:
            description = json.loads(tokenizer_json)
            self._backend = tokenizers.Tokenizer.from_str(tokenizer_json)
            named = {name: self._id_in(config, name) for name in ("bos_token", "eos_token", "pad_token")}
            known = {*named.values(), *end_ids}
            numbered = isinstance(description["model"]["vocab"], dict)  # a list has no place for ids of added tokens
            added = {token["content"]: token for token in description.get("added_tokens", ())}
            control = {
                text: token
                for text, token in added.items()
                if token["special"]
                or text in chat_template
                or text in FIM_TEXTS
                or token["id"] in known
                or not numbered
            }
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(_without(description, control)))
        except Exception as error:  # the backend raises plain Exception
            raise UserError(f"{name} holds no tokenizer.json that can be read ({error}); download it again") from error
        self.name = name
        self.control = {
            text: ControlToken(token["id"], token["lstrip"], token["rstrip"]) for text, token in control.items()
        }
        self.names = {token.id: text for text, token in self.control.items()}
        self._known = frozenset(self._backend.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(self._known, default=-1) + 1
        self.end_ids = tuple(i for i in end_ids if i in self._known)
        self.bos = named["bos_token"] if self._adds_bos(named["bos_token"], config) else None
        # A token that ends what a model generates, but no message of its template, ends a document.
        ends = [named["eos_token"], *self.end_ids]
        self._eod = next((i for i in self.end_ids if self.names.get(i, "") not in chat_template), None)
        if self._eod is None:
            self._eod = next((i for i in ends if i is not None), None)
        pad = named["pad_token"] if named["pad_token"] is not None else self._eod
        self.pad = 0 if pad is None else pad
        self.fingerprint = hashlib.sha256("\0".join([tokenizer_json, *sorted(control)]).encode()).hexdigest()[:16]
        if self.decode(self.encode(_SAMPLE)) != _SAMPLE:
            raise UserError(f"the tokenizer of {name} does not give text back as it was; use a byte-level tokenizer")

    @property
    def eod(self) -> int:
        """The id that ends a document. Raises UserError if the model names none."""
        if self._eod is None:
            raise UserError(
                f"{self.name} names no end of text; set eos_token in tokenizer_config.json, or eos_token_id in "
                f"generation_config.json"
            )
        return self._eod

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, never a control token, even if the text spells one."""
        return self._plain.encode(encodable(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts on all cores."""
        encodings = self._plain.encode_batch_fast([encodable(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def is_control(self, token: int) -> bool:
        """See TextTokenizer.is_control."""
        return token in self.names

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

    def _id_in(self, config: Mapping[str, Any], name: str) -> int | None:
        """The id of the token that a field of the config names; None if there is none."""
        text = token_text(config.get(name))
        return self._backend.token_to_id(text) if text else None

    def _adds_bos(self, bos: int | None, config: Mapping[str, Any]) -> bool:
        """Whether the model was trained on texts that begin with `bos`."""
        if bos is None or "add_bos_token" in config:
            return bos is not None and bool(config["add_bos_token"])
        return self._backend.encode("a", add_special_tokens=True).ids[:1] == [bos]


def token_text(token: str | Mapping[str, Any] | None) -> str:
    """Returns the text of a token in tokenizer_config.json, which is a string or an object; "" for null."""
    return token["content"] if isinstance(token, Mapping) else token or ""


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
        # An added token of the vocabulary keeps its id; the others would be numbered anew, as if none were left out.
        vocabulary |= {token["content"]: token["id"] for token in added if token["content"] not in vocabulary}
    removed = dict.fromkeys(("post_processor", "truncation", "padding"))
    return {**description, **removed, "added_tokens": added, "model": {**model, "vocab": vocabulary}}
