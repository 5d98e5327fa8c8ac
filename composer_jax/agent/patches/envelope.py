"""The patch format with file headers in place of line numbers:

*** Begin Patch
*** Update File: a.py      (then, perhaps, *** Move to: b.py)
@@ def f():                (a line above the hunk; optional before the first hunk, may be empty or repeated)
 kept
-old
+new
*** End of File            (if the lines above are the last of the file)
*** Add File: c.py
+every line of it
*** Delete File: d.py
*** End Patch
"""

import re
from collections.abc import Iterator

from composer_jax.agent.patches.unwrap import unwrap
from composer_jax.tasks.patches import FilePatch, Hunk, PatchError, parse_unified, starts_file

_BEGIN, _END = "*** Begin Patch", "*** End Patch"
_BEGIN_LINE = re.compile(r"[ \t]*\*\*\*[ \t]*Begin[ \t]+Patch[ \t*]*$")
_END_LINE = re.compile(
    r"([ \t]*)\*\*\*[ \t]*End[ \t]+Patch(?:[^\s\w].*|[ \t*]*)$"
)  # a closing tag or quote may follow it
_FILE = re.compile(r"\*\*\*[ \t]*(Update|Add|Delete)[ \t]+File[ \t]*:(.*)")
_UPDATE = re.compile(r"[ \t]*(?:\*\*\*[ \t]*Update|\+\+\+)[ \t]")
_MOVE = re.compile(r"\*\*\*[ \t]*Move[ \t]+to[ \t]*:(.*)")
_END_OF_FILE = re.compile(r"\*\*\*[ \t]*End[ \t]+of[ \t]+File[ \t]*$")
_NUMBERS = re.compile(r"@@ -(\d{1,9})(?:,\d{1,9})? \+\d{1,9}(?:,\d{1,9})? @@")
_INDENTED_FILE = re.compile(r"^[ \t]+(?=\*\*\*[ \t]*(?:Update|Add|Delete|Move)[ \t])", re.MULTILINE)
_INDENTED_HUNK = re.compile(r"^[ \t]+(?=@@(?:[ \t]|$))", re.MULTILINE)
_INDENTED_NAMES = re.compile(r"^[ \t]+(--- .*\n)[ \t]+(?=\+\+\+ )", re.MULTILINE)


def parse_patch(text: str) -> list[FilePatch]:
    """The patches of all files in a text of either format. Raises PatchError with one sentence for an invalid one."""
    lines = unwrap(text).split("\n")
    begin, unified = _beginnings(lines)
    if begin < unified:
        return _parse_envelopes(lines, begin)
    if unified == len(lines) and any(_FILE.match(line.strip()) for line in lines):
        raise PatchError(f"the patch must start with {_BEGIN} and end with {_END}")
    return _parse_diff(lines)


def outdent_headers(text: str) -> str:
    """A patch with its headers at the beginning of their lines.

    An indented header is the second reading of a line that `parse_patch` takes for a line of a file. Headers of hunks
    are indented only if every change of a file begins with one: another is a line of a file that is a patch itself.
    """
    text = unwrap(text)
    lines = text.split("\n")
    begin, unified = _beginnings(lines)
    if begin == unified:  # there is neither
        text = _INDENTED_NAMES.sub(r"\1", text)
    elif unified < begin:
        return text
    if all(map(_INDENTED_HUNK.match, _first_lines(lines))):
        text = _INDENTED_HUNK.sub("", text)
    return _INDENTED_FILE.sub("", text)


def _first_lines(lines: list[str]) -> Iterator[str]:
    """The first line of each change of a file in an envelope or a unified diff."""
    for at, line in enumerate(lines):
        if _UPDATE.match(line):
            first = _skip_blank(lines, at + 1)
            if first < len(lines) and _MOVE.match(lines[first].strip()):
                first = _skip_blank(lines, first + 1)
            yield lines[first] if first < len(lines) else ""


def _beginnings(lines: list[str]) -> tuple[int, int]:
    """The lines at which an envelope and a unified diff begin.

    For one that is not there, it is the number of lines.
    """
    ends_line = (at for at, line in enumerate(lines) if line.rstrip().endswith(_BEGIN))
    begin = next((at for at, line in enumerate(lines) if _BEGIN_LINE.match(line)), next(ends_line, len(lines)))
    return begin, next((at for at in range(len(lines)) if starts_file(lines, at)), len(lines))


def _parse_envelopes(lines: list[str], begin: int) -> list[FilePatch]:
    """The patches of the envelope that begins at a line, and of those after it."""
    patches: list[FilePatch] = []
    outside = lines[:begin]
    while begin < len(lines):
        end = _find_end(lines, begin)
        patches += _parse_envelope(lines[begin:end])
        begin = next((at for at in range(end, len(lines)) if _BEGIN_LINE.match(lines[at])), len(lines))
        outside += lines[end:begin]
    outside = [line.lstrip() for line in outside]
    stray = next((line for at, line in enumerate(outside) if _FILE.match(line) or starts_file(outside, at)), None)
    if stray is not None:
        raise PatchError(f"{stray[:80]!r} is not between {_BEGIN} and {_END}")
    return patches


def _parse_diff(lines: list[str]) -> list[FilePatch]:
    """The patches of a unified diff, with which no header of an envelope is mixed."""
    patches = parse_unified("\n".join(lines))
    context = {line.removesuffix("\n") for patch in patches for hunk in patch.hunks for line in hunk.old}
    stray = next((line for line in lines if _FILE.match(line.strip()) and line[1:] not in context), None)
    if stray is not None:
        raise PatchError(f"{stray[:80]!r} is in a unified diff; write one patch from {_BEGIN} to {_END}, or one diff")
    return patches


def _find_end(lines: list[str], begin: int) -> int:
    """The line that ends an envelope: the first without indentation, else the last; others may be lines of files."""
    indented = None
    for at in range(begin + 1, len(lines)):
        if match := _END_LINE.match(lines[at]):
            if not match[1]:
                return at
            indented = at
    if indented is None:
        raise PatchError(f"the patch must start with {_BEGIN} and end with {_END}")
    return indented


def _parse_envelope(lines: list[str]) -> list[FilePatch]:
    """The patches of the lines from *** Begin Patch up to *** End Patch."""
    at = _skip_blank(lines, 1)
    if at < len(lines) and starts_file(lines, at):  # a unified diff in an envelope
        return _parse_diff(lines[at:])
    patches: list[FilePatch] = []
    while at < len(lines):
        header = _FILE.match(lines[at])
        if header is None:
            raise PatchError(
                f"line {at + 1} of the patch is not a header like *** Update File: PATH: {lines[at][:80]!r}"
            )
        end = next((end for end in range(at + 1, len(lines)) if _FILE.match(lines[end])), len(lines))
        path = _parse_path(header[2])
        if not path:
            raise PatchError(f"line {at + 1} of the patch names no file")
        patches.append(_parse_file(header[1], path, lines[at + 1 : end]))
        at = end
    if not patches:
        raise PatchError("the patch changes no file")
    return patches


def _parse_path(text: str) -> str:
    """The path of a header, without white space and quotes around it."""
    path = text.strip()
    return path[1:-1] if len(path) > 2 and path[0] == path[-1] and path[0] in "\"'`" else path


def _parse_file(kind: str, path: str, body: list[str]) -> FilePatch:
    """The patch of one file. body: the lines below its header."""
    if kind == "Delete":
        if any(line.strip() for line in body):
            raise PatchError(f"after the header that deletes {path} come lines that belong to no file")
        return FilePatch(path, None)
    if kind == "Add":
        body = _strip_blank(body)
        unsigned = next((line for line in body if line.strip() and not line.startswith("+")), None)
        if unsigned is not None:
            raise PatchError(f"{path} is added, so its lines start with +, unlike {unsigned[:80]!r}")
        return FilePatch(None, path, (Hunk((), tuple(f"{line[1:]}\n" for line in body)),))
    new, at = path, _skip_blank(body, 0)
    move = _MOVE.match(body[at]) if at < len(body) else None
    if move:
        new = _parse_path(move[1])
        if not new:
            raise PatchError(f"the patch does not say where {path} is moved to")
        body = body[at + 1 :]
    hunks = tuple(_parse_hunks(path, body))
    if not hunks and new == path:
        raise PatchError(f"nothing is said of what to change in {path}")
    return FilePatch(path, new, hunks)


def _parse_hunks(path: str, body: list[str]) -> list[Hunk]:
    hunks: list[Hunk] = []
    anchors: list[str] = []
    start: int | None = None
    at = 0
    while at < len(body):
        if body[at].startswith("@@"):
            if numbers := _NUMBERS.match(body[at]):  # as in a unified diff; what follows is only a heading
                start = int(numbers[1])
            elif anchor := body[at][2:].strip().removesuffix("@@").strip():
                anchors.append(anchor)
            at += 1
            continue
        end = next((end for end in range(at, len(body)) if _ends_hunk(body[end])), len(body))
        at_end = end < len(body) and not body[end].startswith("@@")
        signed = [_parse_line(path, len(hunks) + 1, line) for line in body[at:end]]
        if any(sign for sign, _ in signed):
            hunks.append(Hunk.from_lines(signed, start, tuple(anchors), at_end))
            anchors, start = [], None
        at = end + at_end
    return hunks


def _ends_hunk(line: str) -> bool:
    return line.startswith("@@") or bool(_END_OF_FILE.match(line))


def _parse_line(path: str, number: int, line: str) -> tuple[str, str]:
    """(sign, line) of a line of a hunk.

    A blank line has no sign, unless it is the sign of context and nothing else.
    """
    sign = line[0] if line.strip() or line in (" ", " \r") else ""
    if sign not in ("", " ", "+", "-"):
        raise PatchError(f"hunk {number} of {path} has a line that starts with neither blank, + nor -: {line[:80]!r}")
    return sign, f"{line[1:] if sign else line.removeprefix(' ')}\n"


def _skip_blank(lines: list[str], at: int) -> int:
    return next((at for at in range(at, len(lines)) if lines[at].strip()), len(lines))


def _strip_blank(lines: list[str]) -> list[str]:
    """The lines without blank ones at both ends."""
    end = next((end for end in range(len(lines), 0, -1) if lines[end - 1].strip()), 0)
    return lines[_skip_blank(lines, 0) : end]
