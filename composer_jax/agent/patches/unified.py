"""Unified diffs, as `diff -u` and `git diff` write them (POSIX diff, and git's diff-format), and as models do.

Models miscount: where the numbers of a hunk's header do not lead to the end of the hunk, its lines do.
"""

import re
from collections.abc import Iterator

from composer_jax.agent.patches.patch import FilePatch, Hunk, PatchError

_HUNK = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_NO_END = "\\"  # \ No newline at end of file
_SIGNATURE = "-- "  # below it, git writes its version
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


def parse_unified(text: str) -> list[FilePatch]:
    """The patches of all files. Raises PatchError."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    patches, at = [], 0
    while at < len(lines):
        if _starts_file(lines, at):
            patch, at = _file(lines, at)
            patches.append(patch)
        elif lines[at].startswith("@@"):
            raise PatchError(
                f"line {at + 1} of the patch starts a hunk, but no file was named by --- and +++ before it"
            )
        else:
            at += 1  # what mail and version control write around patches
    if not patches:
        raise PatchError(
            "this is no patch: it has neither the lines --- PATH and +++ PATH of a unified diff nor *** Begin Patch"
        )
    return patches


def _starts_file(lines: list[str], at: int) -> bool:
    return lines[at].startswith("diff --git ") or _names_file(lines, at)


def _names_file(lines: list[str], at: int) -> bool:
    return lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ ")


def _file(lines: list[str], at: int) -> tuple[FilePatch, int]:
    """The patch that starts at a line, and the line after it."""
    said: dict[str, str] = {}
    git = lines[at].removeprefix("diff --git ") if lines[at].startswith("diff --git ") else None
    at += git is not None
    while at < len(lines) and not _starts_file(lines, at) and not lines[at].startswith("@@"):
        for key in ("new file mode ", "deleted file mode ", "new mode ", "rename from ", "rename to ", "copy from "):
            if lines[at].startswith(key):
                said[key.strip()] = lines[at].removeprefix(key).strip()
        if lines[at].startswith(("GIT binary patch", "Binary files ")):
            raise PatchError(f"{_shown(git or '')} is changed in binary, which cannot be applied")
        if git is None or not lines[at].strip():
            break
        at += 1
    old, new = _git_names(git) if git is not None else (None, None)
    if at < len(lines) and _names_file(lines, at):
        old, new = _strip(_name(lines[at][4:]), _name(lines[at + 1][4:]))
        at += 2
    else:
        if "rename from" in said and "rename to" in said:
            old, new = _name(said["rename from"]), _name(said["rename to"])
        old = None if "new file mode" in said else old
        new = None if "deleted file mode" in said else new
    if old is None and new is None:
        raise PatchError(f"the patch does not say which file it changes: {_shown(git or '/dev/null')}")
    hunks = []
    while at < len(lines) and lines[at].startswith("@@"):
        hunk, at = _hunk(lines, at, new or old or "", len(hunks) + 1)
        hunks.append(hunk)
    if "copy from" in said:
        raise PatchError(f"{new} is a copy of another file, which is not understood; add it as a new file")
    mode = said.get("new file mode", said.get("new mode"))
    if mode is not None and mode not in ("100644", "100755"):
        raise PatchError(f"{new or old} has mode {_shown(mode)}; only 100644 and 100755 can be made")
    if not hunks and mode is None and old == new:
        raise PatchError(f"nothing is said of what to change in {old}")
    return FilePatch(old, new, tuple(hunks), None if mode is None else mode == "100755"), at


def _hunk(lines: list[str], at: int, path: str, number: int) -> tuple[Hunk, int]:
    head = _HUNK.match(lines[at])
    body, start = at + 1, None
    end = None
    if head:
        start = int(head[1])
        end = _counted(lines, body, int(head[2] or 1), int(head[4] or 1))
    if end is None:
        end = _until_it_ends(lines, body)
    old: list[str] = []
    new: list[str] = []
    last: tuple[list[str], ...] = ()
    for line in lines[body:end]:
        if line.startswith(_NO_END):
            for side in last:
                side[-1] = side[-1].removesuffix("\n")
            continue
        sign, rest = line[:1] or " ", f"{line[1:]}\n"
        last = {" ": (old, new), "-": (old,), "+": (new,)}[sign]
        for side in last:
            side.append(rest)
    if not old and not new:
        raise PatchError(f"hunk {number} of {path} has no lines")
    return Hunk(tuple(old), tuple(new), start), end


def _counted(lines: list[str], at: int, old: int, new: int) -> int | None:
    """Where the hunk ends that has so many lines; None if it cannot be so."""
    first = at
    while at < len(lines) and (old > 0 or new > 0 or lines[at].startswith(_NO_END)):
        sign = lines[at][:1] or " "
        if sign not in " +-\\" or (sign == _NO_END and at == first):
            return None
        old -= sign in " -"
        new -= sign in " +"
        at += 1
    ended = at == len(lines) or _starts_file(lines, at) or lines[at] == _SIGNATURE or lines[at][:1] not in tuple(" +-")
    return at if (old, new) == (0, 0) and ended else None


def _until_it_ends(lines: list[str], at: int) -> int:
    """Where the lines of a hunk end, by what they look like."""
    first = at
    while at < len(lines) and not _starts_file(lines, at) and (lines[at][:1] or " ") in " +-\\":
        if lines[at].startswith(_NO_END) and at == first:
            break
        at += 1
    while at > first and not lines[at - 1]:  # empty lines before the next header
        at -= 1
    return at


def _name(text: str) -> str | None:
    """A path in a header: without the time behind it, unquoted; None for /dev/null."""
    text = text.rstrip("\r")
    name = _unquoted(text) if text.startswith('"') else text.partition("\t")[0].rstrip()
    return None if name == "/dev/null" else name


def _strip(old: str | None, new: str | None) -> tuple[str | None, str | None]:
    """Without a/ and b/, where they are there for both names."""
    if (old is None or old.startswith("a/")) and (new is None or new.startswith("b/")):
        return old and old[2:], new and new[2:]
    return old, new


def _git_names(text: str) -> tuple[str | None, str | None]:
    """Both names behind `diff --git`. Names with blanks in them are told by other lines, unless they are the same."""
    if text.startswith('"'):
        parts = list(_quoted_parts(text))
    else:
        half = len(text) // 2
        same = text[:half][2:] == text[half + 1 :][2:] and text[half : half + 1] == " "
        parts = [text[:half], text[half + 1 :]] if same else text.split(" ")
    return _strip(parts[0], parts[1]) if len(parts) == 2 else (None, None)


def _quoted_parts(text: str) -> Iterator[str]:
    for part in re.findall(r'"(?:[^"\\]|\\.)*"|[^ "]+', text):
        yield _unquoted(part) if part.startswith('"') else part


def _unquoted(text: str) -> str:
    """A name in quotes, with octal bytes and letters behind backslashes."""
    found = re.match(r'"((?:[^"\\]|\\.)*)"', text)
    if found is None:
        raise PatchError(f"a file name has a quote too few: {_shown(text)}")

    def byte(escape: re.Match[str]) -> bytes:
        word = escape[1]
        return bytes([int(word, 8) & 255]) if word[0].isdigit() else _ESCAPES.get(word, word).encode()

    data, last = b"", 0
    for escape in re.finditer(r"\\([0-7]{1,3}|.)", found[1]):
        data += found[1][last : escape.start()].encode() + byte(escape)
        last = escape.end()
    return (data + found[1][last:].encode()).decode(errors="replace")


def _shown(text: str) -> str:
    return repr(text[:80])
