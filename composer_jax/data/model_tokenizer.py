"""The tokenizer of a published model (tokenizer.json), in which text never encodes to control tokens."""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
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

_SPACE = "\u2581"  # how SentencePiece writes a space
_MARKER = re.compile(rf"[^\w\s{_SPACE}].*\w.*[^\w\s{_SPACE}]", re.DOTALL)  # such as <tool_call> and [/INST]


@dataclass(frozen=True)
class ControlToken:
    """A token that only a chat format writes. `lstrip`, `rstrip`: whether it absorbs white space before, after it."""

    id: int
    lstrip: bool
    rstrip: bool


class ModelTokenizer:
    """Text <-> token ids of a published model (a TextTokenizer). Immutable; safe to share between threads.

    Tokenizers in the style of SentencePiece (Llama 2, Mistral) put a space before a text, and many put one before what
    follows an added token, too. `encode_document` and `encode_after_control` do what the tokenizer does. `encode` and
    `decode` add and remove no space at the beginning, because a conversation is encoded, and sampled, in pieces.

    control: the control tokens by their text: those that the tokenizer declares special, those that its config names,
    markers in the chat template (many models do not declare the tokens around tool calls special) and those for
    filling in the middle (FIM_TOKENS); white space is none. names: their texts by id. end_ids: the ids that end what
    the model generates. joins_spaces: whether the vocabulary is SentencePiece's, in which a word begins with the space
    before it. bos, pad, vocab_size, fingerprint: see TextTokenizer.
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
            self._backend = _backend({**description, "decoder": _without_prefix(description.get("decoder"))})
            named = {name: self._id_in(config, name) for name in ("bos_token", "eos_token", "pad_token")}
            control = _control_tokens(self._backend, description, chat_template, {*named.values(), *end_ids})
            plain = _without_control(description, control)
            without = {name: _without_prefix(plain.get(name)) for name in _PREFIXING}
            self._document = _backend(plain)
            has_prefix = any(part != plain.get(name) for name, part in without.items())
            self._plain = _backend({**plain, **without}) if has_prefix else self._document
            # Whether a space is put before each text between added tokens, not only before the first.
            self._prefixes_each = any(_prefixes_each(plain.get(name)) for name in _PREFIXING)
            self._added = frozenset(token["id"] for token in description.get("added_tokens", ()))
        except Exception as error:  # the backend raises plain Exception
            raise UserError(f"{name} holds no tokenizer.json that can be read ({error}); download it again") from error
        self.name = name
        self.control = {
            text: ControlToken(token["id"], token["lstrip"], token["rstrip"]) for text, token in control.items()
        }
        self.names = {token.id: text for text, token in self.control.items()}
        self._known = frozenset(self._backend.get_vocab(with_added_tokens=True).values())
        # Ids that `decode` reads together with those beside them.
        self._joined = self._known - (self._added if self._prefixes_each else self.names.keys())
        self.joins_spaces = self._backend.token_to_id(_SPACE) is not None
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
        """See TextTokenizer.encode."""
        text, after = encodable(text), []
        if self._prefixes_each and self._added - self.names.keys():
            # Only what is before the first added token continues the text before.
            encoding = self._document.encode(text, add_special_tokens=False)
            first = next((place for place, i in enumerate(encoding.ids) if i in self._added), None)
            if first is not None:
                text, after = text[: encoding.offsets[first][0]], encoding.ids[first:]
        return self._plain.encode(text, add_special_tokens=False).ids + after

    def encode_document(self, text: str) -> list[int]:
        """See TextTokenizer.encode_document."""
        return self._document.encode(encodable(text), add_special_tokens=False).ids

    def encode_after_control(self, text: str) -> list[int]:
        """Returns the ids of a text that follows a control token, with the space that the tokenizer puts there."""
        return self.encode_document(text) if self._prefixes_each else self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See TextTokenizer.encode_batch."""
        encodings = self._document.encode_batch_fast([encodable(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def is_control(self, token: int) -> bool:
        """See TextTokenizer.is_control."""
        return token in self.names

    def decode(self, ids: Iterable[int]) -> str:
        """See TextTokenizer.decode."""
        parts: list[str] = []
        for joined, run in groupby(ids, key=self._joined.__contains__):
            if joined:
                text = self._backend.decode(list(run), skip_special_tokens=False)
                parts.append(text.removeprefix(" ") if self._prefixes_each and parts else text)
            else:
                parts += [self._name(i) for i in run]
        return "".join(parts)

    def id_of(self, control: str) -> int:
        """Returns the id of a control token. Raises UserError if the tokenizer lacks it."""
        if control not in self.control:
            raise UserError(f"the tokenizer of {self.name} has no control token {control}; use a model that has it")
        return self.control[control].id

    def without_control(self, ids: Iterable[int]) -> list[int]:
        """Returns the ids that are not control tokens."""
        return [i for i in ids if i not in self.names]

    def _name(self, token: int) -> str:
        """The text of an id that is decoded by itself."""
        if token in self.names or token not in self._known:
            return self.names.get(token, _UNKNOWN)
        return self._backend.decode([token], skip_special_tokens=False)

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


def _backend(description: Mapping[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _control_tokens(
    backend: tokenizers.Tokenizer, description: Mapping[str, Any], chat_template: str, known: Collection[int | None]
) -> dict[str, dict[str, Any]]:
    """Returns the entries of added_tokens that are control tokens, by text; `known`: the ids that are some anyway."""
    # The tokenizer cuts the template: "<thinking>" holds "<think>" only if it is not a token itself.
    written = set(backend.encode(encodable(chat_template), add_special_tokens=False).ids)
    numbered = isinstance(description["model"]["vocab"], dict)  # a list has no place for ids of added tokens

    def is_control(text: str, token: Mapping[str, Any]) -> bool:
        if not text.strip(f"{_SPACE} \t\r\n") and token["id"] not in known:
            return False
        in_template = token["id"] in written and _MARKER.fullmatch(text) is not None
        return token["special"] or in_template or text in FIM_TEXTS or token["id"] in known or not numbered

    added = {token["content"]: token for token in description.get("added_tokens", ())}
    return {text: token for text, token in added.items() if is_control(text, token)}


def _without_control(description: dict[str, Any], control: Collection[str]) -> dict[str, Any]:
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


_PREFIXING = ("normalizer", "pre_tokenizer")
"""The parts of a tokenizer that can put a space before a text."""


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer, pre-tokenizer or decoder that puts no space before a text, or removes none there."""
    kind = part and part["type"]
    if part is None or kind == "Prepend":
        return None
    if kind == "Metaspace":
        return {**part, "prepend_scheme": "never", "add_prefix_space": False}
    if kind == "Strip" and "start" in part:  # a decoder; the normalizer of this name is another thing
        return {**part, "start": 0}
    inner = {
        key: [kept for one in value if (kept := _without_prefix(one)) is not None]
        for key, value in part.items()
        if kind == "Sequence" and isinstance(value, list)
    }
    return {**part, **inner}


def _prefixes_each(part: dict[str, Any] | None) -> bool:
    """Whether a normalizer or pre-tokenizer puts a space before every text between added tokens."""
    kind = part and part["type"]
    if part is None or kind == "Prepend":
        return part is not None
    if kind == "Metaspace":
        return part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never") == "always"
    return kind == "Sequence" and any(_prefixes_each(one) for v in part.values() if isinstance(v, list) for one in v)
