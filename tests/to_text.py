"""Ids of the compact format as text to read in an assertion."""

from collections.abc import Iterable

from composer_jax.data.tokenizer import Tokenizer


def to_text(tok: Tokenizer, ids: Iterable[int]) -> str:
    """Returns any ids as text: control tokens by name, a line break after each message, no padding."""
    messages: list[list[int]] = [[]]
    for i in ids:
        if i != tok.pad:
            messages[-1].append(i)
        if i == tok.end:
            messages.append([])
    return "\n".join(tok.decode(message) for message in messages)
