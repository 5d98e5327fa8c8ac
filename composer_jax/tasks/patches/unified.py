"""Unified diffs as `diff -u`, `git diff` and models write them (POSIX diff; git's diff-format).

Models miscount: where the counts of a hunk's header do not lead to the end of the hunk, the hunk's lines do.
"""

import difflib
import re
from collections.abc import Iterator

from composer_jax.tasks.patches.patch import FilePatch, Hunk, PatchError

_LINE = re.compile(r"[^\n]*\n|[^\n]+")  # str.splitlines divides at characters that are not line ends of a diff
_HUNK = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_LIKE_HUNK = re.compile(r"\s*@+\s*-\d")
_UNSIGNED = ("", "\r")  # an empty line of context, from which an editor has stripped the blank
_NO_END = "\\"  # \ No newline at end of file
_SIGNATURE = "-- "  # git writes its version below it
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\([0-7]{1,3}|.)")
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_EXTENDED = ("new file mode ", "deleted file mode ", "new mode ", "rename from ", "rename to ", "copy from ")
_PATH_HEADERS = ("--- ", "+++ ", "rename from ", "rename to ", "copy from ", "copy to ")


def parse_unified(text: str) -> list[FilePatch]:
    """The patches of all files. Raises PatchError."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    patches, at = [], 0
    while at < len(lines):
        if starts_file(lines, at):
            patch, at = _parse_file(lines, at)
            patches.append(patch)
        elif lines[at].startswith("@@"):
            raise PatchError(
                f"line {at + 1} of the patch starts a hunk, but no file was named by --- and +++ before it"
            )
        elif _LIKE_HUNK.match(lines[at]):
            raise PatchError(f"line {at + 1} of the patch is not a header of a hunk like @@ -1,2 +1,2 @@")
        else:
            at += 1  # text of mails and version control around patches
    if not patches:
        raise PatchError(
            "this is no patch: it has neither the lines --- PATH and +++ PATH of a unified diff nor *** Begin Patch"
        )
    return patches


def format_unified(path: str, before: str | None, after: str | None) -> str:
    """The unified diff (a/, b/, three lines of context) of one text file; None: the file is not there."""
    old = f"a/{path}" if before is not None else "/dev/null"
    new = f"b/{path}" if after is not None else "/dev/null"
    lines = difflib.unified_diff(_LINE.findall(before or ""), _LINE.findall(after or ""), old, new)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def header_paths(text: str) -> Iterator[str]:
    """Every path that a header of the diff names, as written and without its first folder (a/ or b/).

    May yield more: lines of a hunk can look like headers. Bytes that are not UTF-8 are surrogate escapes.
    """
    for line in text.split("\n"):
        names: list[str] = []
        if line.startswith("diff --git "):  # a change of the mode has no other header
            names = [name for name in _split_git_names(line.removeprefix("diff --git ")) if name]
        elif header := next((header for header in _PATH_HEADERS if line.startswith(header)), None):
            written = line.removeprefix(header).removesuffix("\r").removesuffix("\t")
            names = [written, written.partition("\t")[0]]
        for name in names:
            path = _unquote(name, "surrogateescape") or name
            yield from {path, path.partition("/")[2]} - {"", "dev/null", "/dev/null"}


def starts_file(lines: list[str], at: int) -> bool:
    """Whether the headers of a file's unified diff begin at a line."""
    return lines[at].startswith("diff --git ") or _names_file(lines, at)


def _names_file(lines: list[str], at: int) -> bool:
    return lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ ")


def _parse_file(lines: list[str], at: int) -> tuple[FilePatch, int]:
    """The patch that starts at a line, and the line after it."""
    git = lines[at].removeprefix("diff --git ") if lines[at].startswith("diff --git ") else None
    headers, at = _parse_extended_headers(lines, at, git)
    old, new = _git_names(git) if git is not None else (None, None)
    if "rename from" in headers and "rename to" in headers:
        old, new = _parse_name(headers["rename from"]), _parse_name(headers["rename to"])
    if at < len(lines) and _names_file(lines, at):
        names = _strip_prefixes(_parse_name(lines[at][4:]), _parse_name(lines[at + 1][4:]))
        is_next_file = bool(headers) and None not in (old, new) and not {*names} <= {old, new, None}
    else:
        names, is_next_file = (None, None), True
    if not is_next_file:
        (old, new), at = names, at + 2
    else:
        old = None if "new file mode" in headers else old
        new = None if "deleted file mode" in headers else new
    if old is None and new is None:
        raise PatchError(f"the patch does not say which file it changes: {_repr(git or '/dev/null')}")
    hunks = []
    while (head := _skip_blank(lines, at)) < len(lines) and lines[head].startswith("@@"):
        hunk, at = _parse_hunk(lines, head, new or old or "", len(hunks) + 1)
        hunks.append(hunk)
    if not hunks and _has_changes(lines, at):
        raise PatchError(f"the change of {new or old} starts without a header of a hunk like @@ -1,2 +1,2 @@")
    if "copy from" in headers:
        raise PatchError(f"{new} is a copy of another file, which is not understood; add it as a new file")
    mode = headers.get("new file mode", headers.get("new mode"))
    if mode is not None and mode not in ("100644", "100755"):
        raise PatchError(f"{new or old} has mode {_repr(mode)}; only 100644 and 100755 can be made")
    if not hunks and mode is None and old == new:
        raise PatchError(f"nothing is said of what to change in {old}")
    return FilePatch(old, new, tuple(hunks), None if mode is None else mode == "100755"), at


def _parse_extended_headers(lines: list[str], at: int, git: str | None) -> tuple[dict[str, str], int]:
    """(git's extended header lines: name -> value, the line after them). git: the rest of the line `diff --git`."""
    headers: dict[str, str] = {}
    at += git is not None
    while at < len(lines) and not starts_file(lines, at) and not lines[at].startswith("@@"):
        for key in _EXTENDED:
            if lines[at].startswith(key):
                headers[key.strip()] = lines[at].removeprefix(key).strip()
        if lines[at].startswith(("GIT binary patch", "Binary files ")):
            raise PatchError(f"{_repr(git or '')} is changed in binary, which cannot be applied")
        if git is not None and lines[at].startswith(("+", "-")):
            break
        if git is None or not lines[at].strip():
            break
        at += 1
    return headers, at


def _parse_hunk(lines: list[str], at: int, path: str, number: int) -> tuple[Hunk, int]:
    head = _HUNK.match(lines[at])
    body, start = at + 1, None
    end = None
    if head:
        start = int(head[1])
        end = _end_by_counts(lines, body, int(head[2] or 1), int(head[4] or 1))
    if end is None:
        end = _end_by_signs(lines, body)
        # Without true counts, blank lines here may be of the hunk: what follows them need not be prose.
        if _has_changes(lines, stop := _skip_blank(lines, end)):
            raise PatchError(
                f"hunk {number} of {path} has a line that starts with neither blank, + nor -: {_repr(lines[stop])}"
            )
    signed: list[tuple[str, str]] = []
    for line in lines[body:end]:
        if not line.startswith(_NO_END):
            signed.append((line[0], f"{line[1:]}\n") if line not in _UNSIGNED else ("", f"{line}\n"))
        elif signed:
            signed[-1] = signed[-1][0], signed[-1][1].removesuffix("\n")
    if not signed:
        raise PatchError(f"hunk {number} of {path} has no lines")
    return Hunk.from_lines(signed, start), end


def _end_by_counts(lines: list[str], at: int, old: int, new: int) -> int | None:
    """The line after a hunk of `old` and `new` lines; None if the lines contradict these counts."""
    first = at
    while at < len(lines) and (old > 0 or new > 0 or lines[at].startswith(_NO_END)):
        sign = _sign(lines[at])
        if sign not in " +-\\" or (sign == _NO_END and at == first):
            return None
        old -= sign in " -"
        new -= sign in " +"
        at += 1
    ended = at == len(lines) or starts_file(lines, at) or lines[at] == _SIGNATURE or lines[at][:1] not in tuple(" +-")
    return at if (old, new) == (0, 0) and ended else None


def _end_by_signs(lines: list[str], at: int) -> int:
    """The line after a hunk, by the first characters of its lines."""
    first = at
    while at < len(lines) and not starts_file(lines, at) and _sign(lines[at]) in " +-\\":
        if lines[at].startswith(_NO_END) and at == first:
            break
        at += 1
    while at > first and not lines[at - 1].strip():  # before the next header
        at -= 1
    return at


def _has_changes(lines: list[str], at: int) -> bool:
    """Whether the paragraph from line `at` on has a line that a hunk would add or remove.

    A blank line, a header, git's signature or a fence of Markdown ends it: what is behind it may be prose.
    """
    while at < len(lines) and lines[at].strip() and not lines[at].startswith(("@@", "```", "~~~")):
        if starts_file(lines, at) or lines[at] == _SIGNATURE:
            return False
        if lines[at].startswith(("+", "-")):
            return True
        at += 1
    return False


def _sign(line: str) -> str:
    return " " if line in _UNSIGNED else line[0]


def _skip_blank(lines: list[str], at: int) -> int:
    return next((at for at in range(at, len(lines)) if lines[at].strip()), len(lines))


def _parse_name(text: str) -> str | None:
    """A path in a header, unquoted and without the time behind it; None for /dev/null."""
    text = text.rstrip("\r")
    name = _require_unquoted(text) if text.startswith('"') else text.partition("\t")[0].rstrip()
    return None if name == "/dev/null" else name


def _strip_prefixes(old: str | None, new: str | None) -> tuple[str | None, str | None]:
    """The paths without a/ and b/ where both have them."""
    if (old is None or old.startswith("a/")) and (new is None or new.startswith("b/")):
        return old and old[2:], new and new[2:]
    return old, new


def _git_names(text: str) -> tuple[str | None, str | None]:
    """Both paths behind `diff --git`; (None, None) where the line is ambiguous, so that other headers name them."""
    parts = _split_git_names(text)
    if text.startswith('"'):
        parts = [_require_unquoted(part) if part.startswith('"') else part for part in parts]
    return _strip_prefixes(parts[0], parts[1]) if len(parts) == 2 else (None, None)


def _split_git_names(text: str) -> list[str]:
    """The paths behind `diff --git`, still quoted; two unless different paths hold blanks."""
    if text.startswith('"'):
        return re.findall(r'"(?:[^"\\]|\\.)*"|[^ "]+', text)
    half = len(text) // 2
    same = text[:half][2:] == text[half + 1 :][2:] and text[half : half + 1] == " "
    return [text[:half], text[half + 1 :]] if same else text.split(" ")


def _require_unquoted(text: str) -> str:
    name = _unquote(text, "replace")
    if name is None:
        raise PatchError(f"a file name has a quote too few: {_repr(text)}")
    return name


def _unquote(text: str, errors: str) -> str | None:
    """A quoted path without quotes and escapes (octal bytes, letters); None if `text` does not start with one.

    errors: how bytes that are not UTF-8 are decoded.
    """
    quoted = _QUOTED.match(text)
    if quoted is None:
        return None

    def byte(escape: re.Match[str]) -> bytes:
        word = escape[1]
        return bytes([int(word, 8) & 255]) if word[0].isdigit() else _ESCAPES.get(word, word).encode()

    data, last = b"", 0
    for escape in _ESCAPE.finditer(quoted[1]):
        data += quoted[1][last : escape.start()].encode(errors="surrogateescape") + byte(escape)
        last = escape.end()
    return (data + quoted[1][last:].encode(errors="surrogateescape")).decode(errors=errors)


def _repr(text: str) -> str:
    return repr(text[:80])
