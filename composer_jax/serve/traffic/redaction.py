"""Redaction: secrets, e-mail addresses and home folders in text, by pattern and by entropy.

Traffic on disk holds no text, and token ids cannot be changed without making their log-probabilities wrong. So turns
are marked where a secret or an address is in their text (`has_secret_ids`), and whoever makes a text of a turn, such
as a judge, passes it through `redact`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

SECRET = re.compile(
    r"""
    (?P<key>\b(?:
        (?:AKIA|ASIA)[0-9A-Z]{16} | gh[pousr]_[A-Za-z0-9]{36} | github_pat_\w{22} | glpat-[\w-]{20}
      | sk-[\w-]{20} | [sr]k_(?:live|test)_[A-Za-z0-9]{16} | xox[abeoprs]-[\w-]{10} | AIza[\w-]{35}
      | xapp-[\w-]{10} | hooks\.slack\.com/services/[\w/]{20} | npm_[A-Za-z0-9]{36}
      | pypi-[\w-]{32} | hf_[A-Za-z0-9]{30} | dop_v1_[0-9a-f]{64} | SG\.[\w-]{20}
      | (?<![\w-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}
    )[\w.-]*)
  | (?P<pem>-----BEGIN[ ][A-Z ]{0,30}PRIVATE[ ]KEY(?:[ ]BLOCK)?-----
        (?:[A-Za-z0-9+/=\s\\:.()]{0,8192}-----END[ ][A-Z ]{0,30}KEY(?:[ ]BLOCK)?-----)?)
  | (?P<url>(?<=://)[^\s/@:'"]{1,64}:[^\s/@'"]{1,128}(?=@))
  | (?P<header>(?:(?<=(?i:bearer)[ ])|(?<=(?i:authorization:[ ]basic)[ ]))(?=\S{0,64}[0-9])[\w.~+/-]{16,}=*)
  | (?P<env>^(?:export[ ])?[A-Z0-9_]{0,40}(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)[A-Z0-9_]{0,20}=
        (?![$<{(])["']?[^\s"'$]{6,})
  | (?P<field>(?i:pass(?:word|wd)|secret|token|(?:api|access|account)_?-?key|credential)\w{0,20}["']?\s{0,4}(?::|=>?)
        \s{0,4}(?:["'](?=[^"'\s]{0,64}[0-9])[^"'\s<>{}$()]{8,}
        | (?=[^\s0-9]{0,64}[0-9])(?=[^\sA-Za-z]{0,64}[A-Za-z])[A-Za-z0-9+/=~!@\#%^*-]{8,}+(?![\w.(\[{<])))
  | (?P<email>(?<![\w.+-])(?!git@|noreply@)[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}
        (?:\.[A-Za-z0-9-]{1,63}){0,4}\.[A-Za-z]{2,24}\b)
    """,
    re.VERBOSE | re.MULTILINE,
)
HOME = re.compile(r"(?<![\w.])(?:/home/|/Users/|[A-Za-z]:\\{1,2}Users\\{1,2})(?!runner\b|ubuntu\b|user\b)[\w.-]+")
LONG_WORD = re.compile(r"[A-Za-z0-9+/_-]{24,}")
"""What may be random characters, which `_is_random` decides."""
LEAST_ENTROPY, LEAST_CHANGES = 3.9, 0.42
WINDOW, OVERLAP = 2048, 256
"""Token ids that are decoded and searched at once, so that other threads run in between, and those searched twice."""


def has_secret(text: str) -> bool:
    """Returns whether a text has a secret or an e-mail address."""
    return next(_secrets(text), None) is not None


def redact(text: str) -> str:
    """Returns a text with [secret] for each secret, [email] for addresses and [home] for home folders."""
    parts, end = [], 0
    homes = ((*match.span(), "[home]") for match in HOME.finditer(text))
    for start, stop, mark in sorted([*_secrets(text), *homes]):
        if stop > end:
            parts += [text[end:start], mark] if start >= end else []
            end = stop
    return "".join([*parts, text[end:]])


def has_secret_ids(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
    """Returns whether the text of token ids has a secret or an e-mail address."""
    starts = range(0, max(1, len(ids) - OVERLAP), WINDOW - OVERLAP)
    return any(has_secret(decode(ids[start : start + WINDOW])) for start in starts)


def _secrets(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, mark) of the secrets and addresses in a text, in no order."""
    for match in SECRET.finditer(text):
        yield *match.span(), "[email]" if match.lastgroup == "email" else "[secret]"
    for match in LONG_WORD.finditer(text):
        if _is_random(match[0]):
            yield *match.span(), "[secret]"


def _is_random(run: str) -> bool:
    """Whether characters look drawn at random: of many kinds, which change more often than in names and in paths.

    Hexadecimal digits are not: those of a key look as those of a commit.
    """
    entropy = -sum(n / len(run) * math.log2(n / len(run)) for n in Counter(run).values())
    kinds = ["a" if c.islower() else "A" if c.isupper() else "0" if c.isdigit() else "-" for c in run]
    changes = sum(a != b for a, b in zip(kinds, kinds[1:], strict=False)) / len(run)
    return entropy >= LEAST_ENTROPY and changes >= LEAST_CHANGES and len({*"aA0"} & {*kinds}) == 3
