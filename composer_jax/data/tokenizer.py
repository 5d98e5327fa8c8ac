"""The tokenizer: byte-level BPE in which a word has the same ids in every context.

Agents copy file names, function names and lines to replace. If a word's tokens included the space before it, `calc` in
a sentence and `"calc"` in a tool call would be different ids, and a small model would have to learn to map one to the
other before it could copy. Text is therefore pre-tokenised into words (without neighbours), single digits, punctuation
(which may include a space) and white space. A backslash stays with the character that it escapes, so that the word
after `\\n` in a JSON string is intact too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError

SPECIAL = (
    "<|pad|>",
    "<|bos|>",
    "<|eod|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|call|>",
    "<|end|>",
)
"""Control tokens; the index in this tuple is the id. Text never encodes to them."""

SMALLEST_VOCABULARY = len(SPECIAL) + 256  # every byte has an id, so that every text can be encoded

# Text between matches (letters outside ASCII) is a piece of its own.
_PIECES = r"""[A-Za-z]+|[0-9]|_|\n\s*|\\[nrt"'\\]?| ?[^\w\s\\]+ ?|\s+"""


class Tokenizer:
    """Text <-> token ids. Immutable; safe to share between threads.

    `vocab_size`: ids are 0..vocab_size-1. `pad`, `bos`, `eod`, `system`, `user`, `assistant`, `tool`, `call`
    and `end` are the ids of the control tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # Otherwise the backend would encode the characters "<|end|>" in a file as the control token.
        backend.encode_special_tokens = True
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size()
        self.pad, self.bos, self.eod, self.system, self.user = 0, 1, 2, 3, 4
        self.assistant, self.tool, self.call, self.end = 5, 6, 7, 8
        self._bytes = _bytes_of_ids(backend)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Trains a tokenizer with `vocab_size` ids, or fewer if the texts are short.

        Raises UserError if `vocab_size` is less than the control tokens and the 256 bytes.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise UserError(
                f"a vocabulary of {vocab_size} cannot hold {len(SPECIAL)} control tokens and 256 bytes; "
                f"use at least {SMALLEST_VOCABULARY}"
            )
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(_PIECES), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=list(SPECIAL),
            # Sorted, because the backend's own order, and with it the ids, would change from run to run.
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator((encodable(text) for text in texts), trainer)
        return cls(backend)

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Reads a file of `save`. Raises UserError if it is missing, damaged, or not a tokenizer of this class."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the tokenizer {path} ({error}); train one first") from error
        return cls.from_text(text, str(path))

    @classmethod
    def from_text(cls, text: str, name: str) -> Tokenizer:
        """Makes a tokenizer from the text of a file of `save`, called `name` in errors. Raises UserError as `load`."""
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the backend raises plain Exception
            raise UserError(f"{name} is not a tokenizer ({error}); delete it to train a new one") from error
        if any(backend.token_to_id(name) != i for i, name in enumerate(SPECIAL)):
            raise UserError(
                f"the tokenizer {name} does not hold the control tokens {SPECIAL[0]}..{SPECIAL[-1]} as ids "
                f"0..{len(SPECIAL) - 1}; use one written by this library"
            )
        return cls(backend)

    def save(self, path: Path | str) -> None:
        """Writes one JSON file, atomically."""
        write_atomically(path, self._backend.to_str().encode())

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, never a control token, even if the text spells one.

        `decode` returns the same text, except that lone surrogates, which are not characters, become U+FFFD.
        """
        return self._backend.encode(encodable(text), add_special_tokens=False).ids

    def encode_document(self, text: str) -> list[int]:
        """See TextTokenizer.encode_document."""
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts on all cores."""
        encodings = self._backend.encode_batch_fast([encodable(t) for t in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def is_control(self, token: int) -> bool:
        """See TextTokenizer.is_control."""
        return 0 <= token < len(SPECIAL)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of any ids, control tokens by name; broken UTF-8 and unknown ids become U+FFFD."""
        table, size = self._bytes, self.vocab_size
        joined = b"".join(table[i] if 0 <= i < size else b"\xef\xbf\xbd" for i in ids)
        return joined.decode("utf-8", errors="replace")

    @property
    def fingerprint(self) -> str:
        """A short hash of everything that the encoding depends on."""
        return hashlib.sha256(self._backend.to_str().encode("utf-8")).hexdigest()[:16]


def encodable(text: str) -> str:
    """Replaces lone surrogates, which JSON escapes can contain and UTF-8 cannot encode, by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")
    return text


def _bytes_of_ids(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of each id. Joining bytes before decoding keeps characters that several ids share intact."""
    # The byte-level alphabet: printable bytes are themselves, the others are 256, 257, ... in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    byte_of = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
    table = [name.encode() for name in SPECIAL]
    for i in range(len(SPECIAL), backend.get_vocab_size()):
        name = backend.id_to_token(i)
        assert name is not None, f"id {i} is below the vocabulary's size"
        table.append(bytes(byte_of[c] for c in name))
    return table
