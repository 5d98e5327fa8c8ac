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

from composer_jax.tasks.patches import FilePatch, Hunk, PatchError, parse_unified

_BEGIN, _END, _END_OF_FILE, _MOVE = "*** Begin Patch", "*** End Patch", "*** End of File", "*** Move to: "
_KINDS = {"*** Update File: ": "update", "*** Add File: ": "add", "*** Delete File: ": "delete"}


def parse_patch(text: str) -> list[FilePatch]:
    """The patches of all files in a text of either format. Raises PatchError with one sentence for an invalid one."""
    if text.lstrip().startswith(_BEGIN):
        return parse_envelope(text)
    return parse_unified(text)


def parse_envelope(text: str) -> list[FilePatch]:
    """The patches of all files. Raises PatchError."""
    lines = text.strip("\n").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    while lines and not lines[0].strip():
        del lines[0]
    if lines[0].strip() != _BEGIN or lines[-1].strip() != _END or len(lines) < 2:
        raise PatchError(f"the patch must start with {_BEGIN} and end with {_END}")
    patches, at = [], 1
    while at < len(lines) - 1:
        header = next((head for head in _KINDS if lines[at].startswith(head)), None)
        if header is None:
            raise PatchError(
                f"line {at + 1} of the patch is not a header like {next(iter(_KINDS))}PATH: {lines[at][:80]!r}"
            )
        end = at + 1
        while end < len(lines) - 1 and not lines[end].startswith(tuple(_KINDS)):
            end += 1
        path = lines[at].removeprefix(header).strip()
        if not path:
            raise PatchError(f"line {at + 1} of the patch names no file")
        patches.append(_parse_file(_KINDS[header], path, lines[at + 1 : end]))
        at = end
    if not patches:
        raise PatchError("the patch changes no file")
    return patches


def _parse_file(kind: str, path: str, body: list[str]) -> FilePatch:
    if kind == "delete":
        if any(line.strip() for line in body):
            raise PatchError(f"after the header that deletes {path} come lines that belong to no file")
        return FilePatch(path, None)
    if kind == "add":
        while body and not body[-1].strip():
            body.pop()
        unsigned = next((line for line in body if not line.startswith("+")), None)
        if unsigned is not None:
            raise PatchError(f"{path} is added, so its lines start with +, unlike {unsigned[:80]!r}")
        return FilePatch(None, path, (Hunk((), tuple(f"{line[1:]}\n" for line in body)),))
    new = path
    if body and body[0].startswith(_MOVE):
        new = body.pop(0).removeprefix(_MOVE).strip()
    hunks = tuple(_parse_hunks(path, body))
    if not hunks and new == path:
        raise PatchError(f"nothing is said of what to change in {path}")
    return FilePatch(path, new, hunks)


def _parse_hunks(path: str, body: list[str]) -> list[Hunk]:
    hunks: list[Hunk] = []
    anchors: list[str] = []
    at = 0
    while at < len(body):
        if body[at].startswith("@@"):
            if anchor := body[at][2:].removesuffix("@@").strip():
                anchors.append(anchor)
            at += 1
            continue
        end = at
        while end < len(body) and not body[end].startswith(("@@", _END_OF_FILE)):
            end += 1
        old, new = _split_sides(path, len(hunks) + 1, body[at:end])
        at_end = end < len(body) and body[end].startswith(_END_OF_FILE)
        hunks.append(Hunk(old, new, None, tuple(anchors), at_end))
        anchors = []
        at = end + at_end
    return hunks


def _split_sides(path: str, number: int, lines: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(old lines, new lines) of a hunk."""
    old, new = [], []
    for line in lines:
        sign, rest = line[:1] or " ", f"{line[1:]}\n"  # editors strip the blank of an empty line
        if sign not in " +-":
            raise PatchError(
                f"hunk {number} of {path} has a line that starts with neither blank, + nor -: {line[:80]!r}"
            )
        if sign != "+":
            old.append(rest)
        if sign != "-":
            new.append(rest)
    return tuple(old), tuple(new)
