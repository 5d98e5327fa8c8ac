"""Which files are left out before any is compared, and why; also how texts that hold a secret are recognised."""

import math
import os
import posixpath
import re
from collections import Counter

from composer_jax.data.corpus import source_text
from composer_jax.data.prepare.languages import Language

_VENDORED = frozenset(
    "node_modules bower_components jspm_packages vendor vendored _vendor third_party third-party thirdparty external "
    "site-packages dist-packages Pods Carthage".split()
)
_BUILT = frozenset("build dist target __pycache__ .next .nuxt .gradle .tox .venv venv".split())
_GENERATED_NAME = re.compile(
    r"(\.min\.(js|css)|\.bundle\.js|[-.]lock\.(ya?ml|toml)|_pb2(_grpc)?\.pyi?|\.pb\.(go|cc|h)|\.g\.dart|\.designer\.cs"
    r"|\.generated\.\w+|_generated\.\w+|(^|/)pnpm-lock\.yaml)$",
    re.IGNORECASE,
)
_GENERATED_TEXT = re.compile(
    rb"@generated\b|do not (edit|modify)|auto-?generated|code generated|automatically generated|generated automatically"
    rb"|file (is|was|has been) generated"
)
_HEAD_BYTES = 1000  # in which a generated file says that it is one
_LONGEST_LINE, _MEAN_LINE = 1000, 100
"""Bytes of a line, above which code is taken for minified: StarCoder's filters (arXiv:2305.06161, section 3.1)."""

POINTER_STARTS = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/", b"/annex/")
_MOST_POINTER_BYTES = 1024
_PATH_ALONE = re.compile(rb"[^\x00-\x20:;,'\"(){}<>|*?$=`#!]{1,1024}")  # without a line end, as the target of a link

_SECRET_FILE_NAMES = frozenset(
    ".env .npmrc .netrc .pypirc .pgpass .htpasswd credentials id_rsa id_dsa id_ecdsa id_ed25519".split()
)
_SECRET_ENDINGS = frozenset(".pem .key .pfx .p12 .jks .keystore .kdbx .ppk".split())

# Each pattern is only searched in texts that hold one of its marks, because a search for bytes is far faster.
_SECRET_PATTERNS = [
    (marks, re.compile(pattern))
    for marks, pattern in [
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
]
_QUOTED = re.compile(rb"""["']([A-Za-z0-9+/=_-]{20,120})["']""")
_SECRET_NAME = re.compile(
    rb"""(?i)(passw(or)?d|secret|token|api_?key|access_?key)[A-Za-z0-9_]*["']?\s*(=|:|=>|:=)\s*$"""
)
_NAME_BYTES = 60  # before a quoted text, in which the name that it is given is looked for
_ENTROPY_BITS = 3.7  # per character; English words have about 3.2, random base64 of 20 characters about 4.1
_EXAMPLE_SECRET = re.compile(rb"(?i)example|placeholder|xxxx|your[_-]|dummy|0123456|abcdef")


def reason_by_path(path: str, language: Language | None, languages: tuple[str, ...]) -> str | None:
    """Returns why a file is left out before it is read; None if it is not.

    Args:
      path: relative to the source, with slashes.
      language: the file's; None is left out.
      languages: names of the languages that are read; empty is all of them.
    """
    folders = path.split("/")[:-1]
    if is_secret_file(path):
        return "secret"
    if not _VENDORED.isdisjoint(folders):
        return "vendored"
    if not _BUILT.isdisjoint(folders):
        return "built"
    if _GENERATED_NAME.search(path):
        return "generated"
    if language is None:
        return "unknown language"
    return "other language" if languages and language.name not in languages else None


def filter_text(data: bytes, language: Language, path: str) -> tuple[str, str | None]:
    """Returns (text with \\n line ends, None), or ("", why the content of the file `path` is left out)."""
    if pointer := pointer_kind(data, language, path):
        return "", pointer
    if b"\0" in data:
        return "", "binary"
    try:
        text = source_text(data)
    except UnicodeDecodeError:
        return "", "wrong encoding"
    if not text or text.isspace():
        return "", "empty"
    if not language.prose and language.name != "diff":
        if _GENERATED_TEXT.search(data[:_HEAD_BYTES].lower()):
            return "", "generated"
        lines = text.split("\n")
        if len(text) > _MEAN_LINE * len(lines) or max(map(len, lines)) > _LONGEST_LINE:
            return "", "minified"
    return ("", "secret") if holds_secret(data) else (text, None)


def pointer_kind(data: bytes, language: Language, path: str) -> str | None:
    """Returns "pointer" or "link" for a file that only names another one, else None.

    A pointer of git-lfs or git-annex stands for content that is stored elsewhere. A link is a file with the path of its
    target, as git checks out links where the file system has none. A single word in a file of prose is its text.
    """
    if data.startswith(POINTER_STARTS) and len(data) <= _MOST_POINTER_BYTES:
        return "pointer"
    if not _PATH_ALONE.fullmatch(data):
        return None
    name, target = posixpath.basename(path), os.fsdecode(data)
    if target.startswith(("./", "../", ".git/")):
        return "link"
    own, ending = posixpath.splitext(name)
    if target == name or ("/" not in target and ending and language.prose):
        return None
    target_own, target_ending = posixpath.splitext(posixpath.basename(target))
    return "link" if (ending == target_ending if ending else own == target_own) else None


def is_secret_file(path: str) -> bool:
    """Whether a file of this name usually holds keys or passwords."""
    name = posixpath.basename(path)
    return name in _SECRET_FILE_NAMES or name.startswith(".env.") or posixpath.splitext(name)[1] in _SECRET_ENDINGS


def holds_secret(data: bytes) -> bool:
    """Whether a text holds a key or token of a known form, or a random-looking text that is named as a secret.

    Published examples (with "example", "dummy", "xxxx" or the like inside) do not count.
    """
    for marks, pattern in _SECRET_PATTERNS:
        if any(mark in data for mark in marks):
            if any(not _EXAMPLE_SECRET.search(match[0]) for match in pattern.finditer(data)):
                return True
    return any(_is_named_secret(data, match) for match in _QUOTED.finditer(data))


def _is_named_secret(data: bytes, match: re.Match[bytes]) -> bool:
    value = match[1]
    if _SECRET_NAME.search(data, max(0, match.start() - _NAME_BYTES), match.start()) is None:
        return False
    kinds = [any(low <= byte <= high for byte in value) for low, high in (b"az", b"AZ", b"09")]
    return all(kinds) and _entropy(value) > _ENTROPY_BITS and not _EXAMPLE_SECRET.search(value)


def _entropy(value: bytes) -> float:
    """Bits per byte of the distribution of the bytes."""
    counts = Counter(value).values()
    return -sum(count / len(value) * math.log2(count / len(value)) for count in counts)
