"""TextTokenizer: what every tokenizer offers, our own (tokenizer.py) and a published model's (model_tokenizer.py)."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from composer_jax.errors import UserError

_BATCH_CHARACTERS = 500_000  # that are encoded at once: enough for all cores, and few enough for smooth progress


class TextTokenizer(Protocol):
    """Text <-> token ids. Text never encodes to control tokens. Immutable; safe to share between threads."""

    @property
    def vocab_size(self) -> int:
        """All ids are below it."""
        ...

    @property
    def eod(self) -> int:
        """The id that ends a document. Raises UserError for a published model that names none."""
        ...

    @property
    def bos(self) -> int | None:
        """The id that the model expects before a text; None if it expects none."""
        ...

    @property
    def pad(self) -> int:
        """The id of padding."""
        ...

    @property
    def fingerprint(self) -> str:
        """A short hash of everything that the encoding depends on."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, never a control token, even if the text spells one.

        Text that continues other text is meant: no tokenizer puts a space before it. `decode` returns the same text.
        """
        ...

    def encode_document(self, text: str) -> list[int]:
        """Returns the ids of a text by itself: as `encode`, but some published tokenizers put a space before it."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns `encode_document` of many texts, which are encoded on all cores."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of any ids, control tokens by name; broken UTF-8 and unknown ids become U+FFFD."""
        ...

    def is_control(self, token: int) -> bool:
        """Whether an id is a control token, which no text encodes to."""
        ...


def encode_texts(tok: TextTokenizer, texts: Iterable[str], dtype: type = np.int32) -> Iterator[np.ndarray]:
    """Yields the ids, [n], of each text; many texts are encoded at once."""
    waiting: list[str] = []
    characters = 0
    for text in texts:
        waiting.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield from (np.asarray(ids, dtype) for ids in tok.encode_batch(waiting))
            waiting, characters = [], 0
    if waiting:
        yield from (np.asarray(ids, dtype) for ids in tok.encode_batch(waiting))


def check_vocab_size(tok: TextTokenizer, rows: int, name: str) -> None:
    """Raises UserError if the tokenizer has ids for which the embedding, of `rows` rows, has none.

    A larger embedding is common: published models pad it to a round number. name: where the model comes from.
    """
    if tok.vocab_size > rows:
        raise UserError(
            f"the tokenizer of {name} has {tok.vocab_size} ids and the embedding {rows} rows; use the tokenizer that "
            f"the weights were trained with"
        )
