"""The words of code: identifiers and their parts, in lower case and without plural endings."""

import functools
import re
from collections import Counter

MAX_WORD = 64  # characters; what is longer is data
# A run of capitals ends before the last one if a small letter follows: HTTPServer is http server.
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_a-zA-Z]+")
_NAME = re.compile(r"\w+")
# Words that are too frequent in code and questions to discriminate.
_COMMON = frozenset(
    "a an and are as at be by class def do does for from how i if import in is it its of on or return self that the "
    "this to was what when where which who why with you".split()
)


def split_words(text: str) -> list[str]:
    """The words of a text, in order. `readHTTPHeader_v2` gives read, http, header, v, 2 and readhttpheader_v2."""
    return [word for name in _NAME.findall(text) for word in _words_of(name)]


def count_words(text: str) -> Counter[str]:
    """The count of each word of a text."""
    counts: Counter[str] = Counter()
    for name, count in Counter(_NAME.findall(text)).items():
        for word in _words_of(name):
            counts[word] += count
    return counts


@functools.lru_cache(maxsize=1 << 17)  # the same names occur again and again
def _words_of(name: str) -> tuple[str, ...]:
    if len(name) > MAX_WORD:
        return ()
    parts = [part.lower() for part in _PART.findall(name)]
    stems = [_stem(part) for part in parts if part not in _COMMON]
    return tuple(stems) if len(parts) < 2 else (*stems, name.lower())


def _stem(word: str) -> str:
    """The word without plural s: `files` becomes `file`; `class`, `status` and `is` stay."""
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word
