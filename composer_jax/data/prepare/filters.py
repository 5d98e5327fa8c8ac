"""Which files are left out before any is compared, and why."""

from __future__ import annotations

import re

from composer_jax.data.corpus import source_text
from composer_jax.data.prepare.languages import Language
from composer_jax.data.prepare.secrets import holds_secret, is_secret_file

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

REASONS = (
    "secret",
    "vendored",
    "built",
    "generated",
    "unknown language",
    "other language",
    "too large",
    "unreadable",
    "binary",
    "wrong encoding",
    "empty",
    "minified",
    "no text",
    "no training file",
    "exact duplicate",
    "near duplicate",
)
"""Everything that a document can be left out for, here and in the files beside this one."""


def reason_by_path(path: str, language: Language | None, languages: tuple[str, ...]) -> str | None:
    """Returns why a file is left out before it is read, one of REASONS; None if it is not.

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


def filter_text(data: bytes, language: Language) -> tuple[str, str | None]:
    """Returns (text with \\n line ends, None), or ("", why the content is left out: one of REASONS)."""
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
