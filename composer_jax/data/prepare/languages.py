"""The languages that are prepared: how their files are named, and how a comment is written in them."""

import posixpath
from dataclasses import dataclass


@dataclass(frozen=True)
class Language:
    """One language. `comment` surrounds a comment of one line; `prose` says that its files are documentation."""

    name: str
    comment: tuple[str, str]
    endings: tuple[str, ...]
    file_names: tuple[str, ...] = ()
    prose: bool = False

    def comment_line(self, text: str) -> str:
        """Returns a line of the language that holds `text`, without line breaks, as a comment."""
        before, after = self.comment
        if after:  # a text that holds the end of a comment would end this one
            text = text.replace(after, " ".join(after))
        return f"{before} {text}{f' {after}' if after else ''}\n"

    @property
    def comment_starts(self) -> tuple[str, ...]:
        """Beginnings of lines that are only a comment; * is that of the inner lines of /* */."""
        return ("//", "/*", "*") if self.comment in (_SLASHES, _STARS) else (self.comment[0],)


_HASH, _SLASHES, _DASHES, _STARS, _MARKUP = ("#", ""), ("//", ""), ("--", ""), ("/*", "*/"), ("<!--", "-->")

LANGUAGES = (
    Language("python", _HASH, (".py", ".pyi")),
    Language("javascript", _SLASHES, (".js", ".jsx", ".mjs", ".cjs")),
    Language("typescript", _SLASHES, (".ts", ".tsx", ".mts", ".cts")),
    Language("c", _SLASHES, (".c", ".h")),
    Language("cpp", _SLASHES, (".cc", ".cpp", ".cxx", ".hh", ".hpp", ".hxx", ".cu", ".cuh")),
    Language("csharp", _SLASHES, (".cs",)),
    Language("go", _SLASHES, (".go",)),
    Language("java", _SLASHES, (".java",)),
    Language("kotlin", _SLASHES, (".kt", ".kts")),
    Language("scala", _SLASHES, (".scala",)),
    Language("swift", _SLASHES, (".swift",)),
    Language("dart", _SLASHES, (".dart",)),
    Language("rust", _SLASHES, (".rs",)),
    Language("php", _SLASHES, (".php",)),
    Language("ruby", _HASH, (".rb", ".rake"), ("Rakefile", "Gemfile")),
    Language("perl", _HASH, (".pl", ".pm")),
    Language("r", _HASH, (".r", ".R")),
    Language("julia", _HASH, (".jl",)),
    Language("elixir", _HASH, (".ex", ".exs")),
    Language("erlang", ("%", ""), (".erl", ".hrl")),
    Language("clojure", (";", ""), (".clj", ".cljs")),
    Language("haskell", _DASHES, (".hs",)),
    Language("lua", _DASHES, (".lua",)),
    Language("ocaml", ("(*", "*)"), (".ml", ".mli")),
    Language("zig", _SLASHES, (".zig",)),
    Language("protobuf", _SLASHES, (".proto",)),
    Language("shell", _HASH, (".sh", ".bash", ".zsh")),
    Language("sql", _DASHES, (".sql",)),
    Language("html", _MARKUP, (".html", ".htm", ".vue", ".svelte")),
    Language("css", _STARS, (".css", ".scss", ".less")),
    Language("yaml", _HASH, (".yaml", ".yml")),
    Language("toml", _HASH, (".toml",)),
    Language("make", _HASH, (".mk",), ("Makefile", "makefile", "GNUmakefile")),
    Language("cmake", _HASH, (".cmake",), ("CMakeLists.txt",)),
    Language("docker", _HASH, (".dockerfile",), ("Dockerfile", "Containerfile")),
    Language("markdown", _MARKUP, (".md", ".markdown", ".mdx"), prose=True),
    Language("restructuredtext", ("..", ""), (".rst",), prose=True),
    Language("text", _HASH, (".txt", ".adoc"), ("README",), prose=True),
)
"""Notebooks and data files (JSON, XML, CSV) are not among them."""

TEXT = LANGUAGES[-1]
"""The language of a row that names no file."""
DIFF = Language("diff", _HASH, ())
"""The language of commits."""

_BY_ENDING = {ending: language for language in LANGUAGES for ending in language.endings}
_BY_FILE_NAME = {name: language for language in LANGUAGES for name in language.file_names}


def language_of(path: str) -> Language | None:
    """Returns the language of a file by its name; None if it is none of LANGUAGES."""
    name = posixpath.basename(path)
    return _BY_FILE_NAME.get(name) or _BY_ENDING.get(posixpath.splitext(name)[1])
