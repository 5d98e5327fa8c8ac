"""Texts that look as if they held a secret: private keys, tokens of known services, random-looking passwords."""

from __future__ import annotations

import math
import posixpath
import re
from collections import Counter

_FILE_NAMES = frozenset(
    ".env .npmrc .netrc .pypirc .pgpass .htpasswd credentials id_rsa id_dsa id_ecdsa id_ed25519".split()
)
_ENDINGS = frozenset(".pem .key .pfx .p12 .jks .keystore .kdbx .ppk".split())

# Each pattern is only searched in texts that hold one of its marks, because a search for bytes is far faster.
_PATTERNS = [
    ((b" PRIVATE KEY",), rb"-----BEGIN [A-Z ]*PRIVATE KEY( BLOCK)?-----\s+[A-Za-z0-9+/=:, \r\n-]{64}"),
    ((b"AKIA", b"ASIA"), rb"\bA[KS]IA[0-9A-Z]{16}\b"),
    ((b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_"), rb"\bgh[pousr]_[A-Za-z0-9]{36}"),
    ((b"github_pat_",), rb"\bgithub_pat_[A-Za-z0-9_]{60}"),
    ((b"glpat-",), rb"\bglpat-[A-Za-z0-9_-]{20}"),
    ((b"AIza",), rb"\bAIza[A-Za-z0-9_-]{35}"),
    ((b"xox",), rb"\bxox[abprs]-[0-9]{8,}-[A-Za-z0-9-]{16}"),
    ((b"hooks.slack.com",), rb"hooks\.slack\.com/services/T[A-Z0-9]{8,}/B[A-Z0-9]{8,}/[A-Za-z0-9]{20}"),
    ((b"k_live_",), rb"\b[rs]k_live_[A-Za-z0-9]{20}"),
    ((b"sk-",), rb"\bsk-(ant-|proj-|svcacct-)?[A-Za-z0-9_-]{40}"),
    ((b"hf_",), rb"\bhf_[A-Za-z]{34}\b"),
    ((b"npm_",), rb"\bnpm_[A-Za-z0-9]{36}\b"),
    ((b"pypi-AgE",), rb"\bpypi-AgE[A-Za-z0-9_-]{50}"),
    ((b"SG.",), rb"\bSG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}"),
]
_KNOWN = [(marks, re.compile(pattern)) for marks, pattern in _PATTERNS]
_QUOTED = re.compile(rb"""["']([A-Za-z0-9+/=_-]{20,120})["']""")
_NAMED = re.compile(rb"""(?i)(passw(or)?d|secret|token|api_?key|access_?key)[A-Za-z0-9_]*["']?\s*(=|:|=>|:=)\s*$""")
_NAME_BYTES = 60  # before a quoted text, in which the name that it is given is looked for
_ENTROPY_BITS = 3.7  # per character; English words have about 3.2, random base64 of 20 characters about 4.1
_EXAMPLE = re.compile(rb"(?i)example|placeholder|xxxx|your[_-]|dummy|0123456|abcdef")


def is_secret_file(path: str) -> bool:
    """Whether a file of this name usually holds keys or passwords."""
    name = posixpath.basename(path)
    return name in _FILE_NAMES or name.startswith(".env.") or posixpath.splitext(name)[1] in _ENDINGS


def holds_secret(data: bytes) -> bool:
    """Whether a text holds a key or token of a known form, or a random-looking text that is named as a secret.

    Published examples (with "example", "dummy", "xxxx" or the like inside) do not count.
    """
    for marks, pattern in _KNOWN:
        if any(mark in data for mark in marks):
            if any(not _EXAMPLE.search(match[0]) for match in pattern.finditer(data)):
                return True
    return any(_is_named_secret(data, match) for match in _QUOTED.finditer(data))


def _is_named_secret(data: bytes, match: re.Match[bytes]) -> bool:
    value = match[1]
    if _NAMED.search(data, max(0, match.start() - _NAME_BYTES), match.start()) is None:
        return False
    kinds = [any(low <= byte <= high for byte in value) for low, high in (b"az", b"AZ", b"09")]
    return all(kinds) and _entropy(value) > _ENTROPY_BITS and not _EXAMPLE.search(value)


def _entropy(value: bytes) -> float:
    """Bits per byte of the distribution of the bytes."""
    counts = Counter(value).values()
    return -sum(count / len(value) * math.log2(count / len(value)) for count in counts)
