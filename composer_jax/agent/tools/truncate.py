"""Truncation of observations to the length that a set of tools allows."""

COMPACT_CHARACTERS = 2000
"""Of one observation of the compact set, and of every error."""
MAX_CHARACTERS = 20_000
"""Of one observation of the repository set."""
HEAD = 12_000
"""Characters of a truncated observation of the repository set that are its beginning; the others are its end."""


def truncate_end(text: str) -> str:
    """The text, or its first COMPACT_CHARACTERS and how many were dropped."""
    if len(text) <= COMPACT_CHARACTERS:
        return text
    return f"{text[:COMPACT_CHARACTERS]}\n[{len(text) - COMPACT_CHARACTERS} characters dropped]"


def truncate_middle(text: str) -> str:
    """The text, or of more than MAX_CHARACTERS its beginning, its end, and how much is between them."""
    if len(text) <= MAX_CHARACTERS:
        return text
    tail = MAX_CHARACTERS - HEAD
    dropped = text[HEAD:-tail]
    counts = f"{len(dropped)} characters with {dropped.count(chr(10))} line breaks dropped"
    return f"{text[:HEAD]}\n[{counts}]\n{text[-tail:]}"
