"""Fill in the middle (arXiv:2207.14255): a text as prefix, suffix and middle, so that a model learns to insert."""

from __future__ import annotations

import hashlib

from composer_jax.data.fim_tokens import FIM_TOKENS
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.data.text_tokenizer import TextTokenizer
from composer_jax.errors import UserError

FimIds = tuple[int, int, int]
"""The ids of the tokens before prefix, suffix and middle."""


def find_fim_ids(tok: TextTokenizer, name: str) -> FimIds:
    """Returns the tokenizer's ids for filling in the middle. Raises UserError if it has none.

    name: where the tokenizer comes from, for the error.
    """
    control = tok.control if isinstance(tok, ModelTokenizer) else {}
    for tokens in FIM_TOKENS:
        if all(text in control for text in tokens):
            return control[tokens.prefix].id, control[tokens.suffix].id, control[tokens.middle].id
    raise UserError(
        f"the tokenizer {name} has no tokens for filling in the middle, such as {' '.join(FIM_TOKENS[0])}; use "
        "--fim_share=0, or a tokenizer that has them"
    )


def cut_for_fim(text: str, name: str, seed: int, share: float) -> tuple[str, str, str] | None:
    """Returns (prefix, middle, suffix) of a text, or None if it is not among the chosen share.

    A hash of `seed` and `name` chooses, and cuts at two characters with equal probability for each.
    """
    digest = hashlib.sha256(f"{seed}\0{name}".encode("utf-8", errors="surrogateescape")).digest()
    chosen, *places = (int.from_bytes(digest[i : i + 8], "little") for i in (0, 8, 16))
    if chosen / 2**64 >= share:
        return None
    start, end = sorted(place % (len(text) + 1) for place in places)
    return text[:start], text[start:end], text[end:]


def fim_segments(cut: tuple[str, str, str], ids: FimIds) -> list[str | int]:
    """Returns texts and token ids in the order prefix, suffix, middle."""
    prefix, middle, suffix = cut
    return [ids[0], prefix, ids[1], suffix, ids[2], middle]
