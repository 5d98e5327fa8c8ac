"""Random files, and patches and edits of them, as git, the envelope's format and models write them."""

import functools
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.patch_reference import (
    BOM,
    PlacedHunk,
    Refused,
    Signed,
    apply_reference,
    content,
    line_end,
    shown,
    universal_lines,
)

_LINES = (
    *(
        "a",
        "a",
        "b",
        "b",
        "c",
        "",
        "",
        "",
        "    x = 1",
        "    x = 2",
        "\tif y:",
        "def f():",
        "def g(a):",
        " lead",
        "trail ",
    ),
    *(
        "-- x",
        "++ y",
        "+p",
        "-m",
        "@@ q",
        "@@ -1 +1 @@",
        "\\ No",
        "x\fy",
        "x\u2028y",
        'it\'s "\\$x"',
        "café",
        "日本",
        "  ",
    ),
    *("*** Update File: f", "*** End Patch", "--- a/f", "diff --git a/f b/f", "`", "\ufffd"),
)
_DAMAGES = ("", "", "", "", "shift", "line", "less context", "order", "file", "file", "missing")
_ENDS = ("\n", "\n", "\n", "\n", "\r\n", "\r\n", "\r", "")  # "": mixed


@dataclass(frozen=True)
class FuzzCase:
    """A call of a tool on files.

    kind: "edit" for a call of edit_file; others are patches, "mangled ..." if characters of them were changed.
    after: the files after a patch; None if it is refused. is_known: whether the result is known.
    as_git: whether git reads the patch, too.
    """

    kind: str
    before: Mapping[str, bytes]
    arguments: Mapping[str, str]
    after: Mapping[str, bytes] | None
    is_known: bool = True
    as_git: bool = False


@dataclass(frozen=True)
class _Change:
    old: str | None
    new: str | None
    hunks: tuple[PlacedHunk, ...] = ()


class PatchWriter:
    """Writes random cases."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def case(self) -> FuzzCase:
        """Returns a unified diff, an envelope or an edit."""
        kind = self._random.choice(("unified", "unified", "envelope", "edit"))
        return self._edit() if kind == "edit" else self._patch(kind)

    # Files.

    def _line(self) -> str:
        return self._random.choice(_LINES)

    def _text(self, end: str, longest: int = 12) -> str:
        lines = [self._line() + (end or self._random.choice(("\n", "\r\n", "\r"))) for _ in range(self._below(longest))]
        if lines and self._chance(0.2):
            lines[-1] = lines[-1].rstrip("\r\n")
        return "".join(lines)

    def _file(self) -> bytes:
        text = self._text(self._random.choice(_ENDS))
        if self._chance(0.1):
            return text.encode("latin-1", "ignore")
        return (BOM * self._chance(0.1) + text).encode()

    def _below(self, most: int) -> int:
        return self._random.randint(0, most)

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    # Patches.

    def _patch(self, kind: str) -> FuzzCase:
        folder = f"c{self._random.getrandbits(40):x}"  # git applies many cases at once
        names = [
            f"{folder}/{name}" for name in self._random.sample(("f", "g.py", "d/h", "a b"), self._random.randint(1, 3))
        ]
        before = {name: self._file() for name in names}
        context = self._random.choice((0, 1, 2, 3, 3, 3)) if kind == "unified" else self._random.choice((0, 1, 2, 3))
        changes = [self._change(kind, name, before[name], context) for name in names]
        for change in changes:
            if change.old is None:
                del before[change.new or ""]
        damage = self._random.choice(_DAMAGES)
        if damage == "missing" and before:
            del before[self._random.choice(list(before))]
        elif damage == "file":
            before = {path: self._drifted(data) for path, data in before.items()}
        by = self._random.randint(-4, 4) * (kind == "unified")
        changes = [replace(change, hunks=self._damaged(change.hunks, damage, by)) for change in changes]
        style = self._random.choice((*(["plain"] * 12), "blanks", "blanks", *_STYLES))
        if kind == "envelope":  # where a line of white space is one without a sign
            changes = [replace(change, hunks=tuple(map(_without_signs, change.hunks))) for change in changes]
        if style == "blanks":
            changes = [replace(change, hunks=tuple(map(self._with_blanks, change.hunks))) for change in changes]
        headers = self._random.choice((*(["git"] * 7), "mixed"))
        write = functools.partial(_unified, always_git=headers == "git") if kind == "unified" else self._envelope
        text = _STYLES.get(style, str)(
            "".join(map(write, changes)) if kind == "unified" else _enclosed(map(write, changes))
        )
        is_known = not self._chance(0.1)
        if not is_known:
            text = self._mangled(text)
        as_git = kind == "unified" and style == "plain" and is_known and context > 0 and headers != "mixed"
        # git wants hunks without context below them at the end of a file, and takes a last line without a line end for
        # the beginning of one.
        as_git = as_git and not (
            damage and any(hunk.signed[-1][0] != " " for change in changes for hunk in change.hunks)
        )
        as_git = as_git and not (damage and "\\ No newline" in text)
        after = _patched(before, changes) if is_known else None
        return FuzzCase(kind if is_known else f"mangled {kind}", before, {"patch": text}, after, is_known, as_git)

    def _change(self, kind: str, name: str, data: bytes, context: int) -> _Change:
        action = self._random.random()
        if action < 0.1:
            text = self._text("\n" if kind == "envelope" else self._random.choice(_ENDS[:-1]))
            lines = [line if line.endswith("\n") or kind == "unified" else f"{line}\n" for line in _byte_lines(text)]
            return _Change(None, name, (PlacedHunk(tuple(("+", line) for line in lines), 0),) if lines else ())
        lines = self._lines_of(kind, data)
        if action < 0.2:
            hunk = PlacedHunk(tuple(("-", line) for line in lines), 1)
            return _Change(name, None, (hunk,) if kind == "unified" and lines else ())
        hunks = self._hunks(lines, context, kind)
        return _Change(name, f"{name}.new" if self._chance(0.1) or not hunks else name, hunks)

    def _lines_of(self, kind: str, data: bytes) -> list[str]:
        """The lines of a file as the author of a patch sees them: as they are, or as read_file shows them."""
        text = data.decode(errors="surrogateescape")
        lines = _byte_lines(text)
        is_whole = kind == "unified" or text.endswith("\n")
        if is_whole and shown(text) == text and self._chance(0.7):
            return lines
        return [f"{content(line)}\n" for line in universal_lines(text.removeprefix(BOM))]

    def _hunks(self, lines: Sequence[str], context: int, kind: str) -> tuple[PlacedHunk, ...]:
        signed = self._changed(lines, kind)
        changed = [at for at, (sign, _) in enumerate(signed) if sign != " "]
        ranges: list[list[int]] = []
        for at in changed:
            if ranges and at - context <= ranges[-1][1] + context:
                ranges[-1][1] = at + 1
            else:
                ranges.append([at, at + 1])
        hunks = []
        for first, last in ranges:
            part = signed[max(0, first - context) : last + context]
            above = [line for sign, line in signed[: max(0, first - context)] if sign != "+"]
            has_old = any(sign != "+" for sign, _ in part)
            if kind == "unified":
                hunks.append(PlacedHunk(tuple(part), len(above) + int(has_old)))
                continue
            headings = [line.strip() for line in above if re.match(r"\w", line.strip())]
            anchors = (self._random.choice(headings),) if headings and self._chance(0.3) else ()
            at_end = last + context >= len(signed) and self._chance(0.4)
            hunks.append(PlacedHunk(tuple(part), None, anchors, at_end))
        return tuple(hunks)

    def _changed(self, lines: Sequence[str], kind: str) -> Signed:
        signed: list[tuple[str, str]] = []
        end = self._random.choice([*filter(None, map(line_end, lines)), "\n"])
        end = end if end.endswith("\n") else "\n"
        for line in lines:
            if self._chance(0.1):
                signed.append(("+", self._line() + end))
            if self._chance(0.15):
                signed.append(("-", line))
                signed += [("+", self._line() + end) for _ in range(self._below(2))]
            else:
                signed.append((" ", line))
        if self._chance(0.1) or not lines:
            signed.append(("+", self._line() + end))
        new = [at for at, (sign, _) in enumerate(signed) if sign != "-"]
        if kind == "unified" and new and self._chance(0.1) and signed[new[-1]][0] == "+":
            signed[new[-1]] = "+", signed[new[-1]][1].rstrip("\r\n")
        for at in reversed(new[:-1]):
            sign, line = signed[at]
            if not line.endswith("\n"):  # the last line of the file is not that any more
                signed[at : at + 1] = [("-", line), ("+", f"{line}\n")] if sign == " " else [("+", f"{line}\n")]
        return tuple(signed)

    def _drifted(self, data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        at = self._below(len(lines))
        lines[at : at + self._below(1)] = [self._line().encode() + b"\n" for _ in range(self._below(2))]
        return b"".join(lines)

    def _damaged(self, hunks: tuple[PlacedHunk, ...], damage: str, by: int) -> tuple[PlacedHunk, ...]:
        if damage == "order":
            return hunks[::-1]
        if not hunks or damage in ("", "file", "missing"):
            return hunks
        if damage == "shift":
            return tuple(
                replace(h, start=max(int(bool(h.old)), h.start + by)) if h.start is not None else h for h in hunks
            )
        at = self._below(len(hunks) - 1)
        signed = list(hunks[at].signed)
        if damage == "line":
            place = self._below(len(signed) - 1)
            sign, line = signed[place]
            signed[place] = sign, self._line() + (line_end(line) or "\n")
        elif signed[0][0] == " " and len(signed) > 1:
            del signed[0]
            if hunks[at].start is not None and not any(sign != "+" for sign, _ in signed):
                return hunks
        start = hunks[at].start
        start = start if start is None or len(signed) == len(hunks[at].signed) else start + 1
        return (*hunks[:at], replace(hunks[at], signed=tuple(signed), start=start), *hunks[at + 1 :])

    def _with_blanks(self, hunk: PlacedHunk) -> PlacedHunk:
        """The hunk as editors and models write it: blank lines without a sign, and others around it."""
        signed = [("", line) if sign == " " and line == "\n" else (sign, line) for sign, line in hunk.signed]
        if hunk.start is None and any(sign for sign, _ in signed):
            signed = [("", "\n")] * self._below(1) + signed + [("", "\n")] * self._below(2)
        return replace(hunk, signed=tuple(signed))

    def _envelope(self, change: _Change) -> str:
        if change.old is None:
            return f"*** Add File: {change.new}\n" + "".join(f"+{line}" for _, line in _all_signed(change))
        if change.new is None:
            return f"*** Delete File: {change.old}\n"
        text = f"*** Update File: {change.old}\n"
        if change.new != change.old:
            text += f"*** Move to: {change.new}\n"
        for number, hunk in enumerate(change.hunks):
            text += "".join(f"@@ {anchor}\n" for anchor in hunk.anchors)
            # An indented header looks like a line of context at the beginning of a hunk.
            may_omit = not number and not hunk.signed[0][1].startswith("@@")
            text += "" if hunk.anchors or (may_omit and self._chance(0.3)) else "@@\n"
            text += (
                "".join((sign or " " * bool(content(line))) + line for sign, line in hunk.signed)
                + "*** End of File\n" * hunk.at_end
            )
        return text

    def _mangled(self, text: str) -> str:
        for _ in range(self._random.randint(1, 3)):
            at, size = self._below(len(text)), self._below(3)
            piece = self._random.choice(("", "", "\n", " ", "+", "-", "@", "\r", "\\", self._line(), "*** "))
            text = text[:at] + piece + text[at + size :]
        return text

    # Edits.

    def _edit(self) -> FuzzCase:
        data = self._file()
        text = data.decode(errors="surrogateescape")
        start = self._below(len(text))
        old = text[start : start + self._random.choice((1, 3, 8, 20, 60))]
        if self._chance(0.4):  # whole lines
            lines = universal_lines(text)
            first = self._below(len(lines))
            old = "".join(lines[first : first + self._random.randint(1, 3)])
        if self._chance(0.6) or shown(old) != old:
            old = shown(re.sub("\r\n?", "\n", old))
        if self._chance(0.2):
            old = old.replace("\n", "\r\n").replace("\r\r", "\r")
        if self._chance(0.1):
            old = self._mangled(old)
        new = self._mangled(old) if self._chance(0.5) else self._text(self._random.choice(("\n", "\n", "\r\n", "")), 3)
        return FuzzCase("edit", {"f": data}, {"path": "f", "old": old or "x", "new": new}, None)


def _without_signs(hunk: PlacedHunk) -> PlacedHunk:
    signed = (
        ("", line) if sign == " " and not line.strip() and content(line) else (sign, line) for sign, line in hunk.signed
    )
    return replace(hunk, signed=tuple(signed))


def _byte_lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _all_signed(change: _Change) -> Signed:
    return tuple(pair for hunk in change.hunks for pair in hunk.signed)


def _enclosed(parts: Iterable[str]) -> str:
    return f"*** Begin Patch\n{''.join(parts)}*** End Patch\n"


def _unified(change: _Change, always_git: bool) -> str:
    """A change as git writes it; without always_git, with the line `diff --git` only where no other header says it."""
    old, new = change.old, change.new
    text = ""
    if always_git or old is None or new is None or old != new or not change.hunks:
        text = f"diff --git a/{old or new} b/{new or old}\n"
        text += "new file mode 100644\n" if old is None else "deleted file mode 100644\n" if new is None else ""
        text += f"rename from {old}\nrename to {new}\n" if old and new and old != new else ""
    if not change.hunks:
        return text
    # git ends a name with a blank in it by a tab.
    heads = [f"a/{old}" if old else "/dev/null", f"b/{new}" if new else "/dev/null"]
    heads = [f"{head}\t" if " " in head else head for head in heads]
    text += f"--- {heads[0]}\n+++ {heads[1]}\n"
    for hunk in change.hunks:
        start, sizes = hunk.start or 0, (len(hunk.old), len(hunk.new))
        shift = sum(len(other.new) - len(other.old) for other in change.hunks if (other.start or 0) < start)
        first = max(0, start + shift + (sizes[1] > 0) - (sizes[0] > 0))
        text += f"@@ -{start},{sizes[0]} +{first},{sizes[1]} @@\n"
        for sign, line in hunk.signed:
            text += f"{sign}{line}" if line.endswith("\n") else f"{sign}{line}\n\\ No newline at end of file\n"
    return text


def _patched(before: Mapping[str, bytes], changes: Sequence[_Change]) -> dict[str, bytes] | None:
    """The files after all changes; None if one of them has no place."""
    after = dict(before)
    for change in changes:
        if change.old is not None and change.old not in after:
            return None
        text = "" if change.old is None else after.pop(change.old).decode(errors="surrogateescape")
        try:
            result = apply_reference(text, change.hunks)
        except Refused:
            return None
        if change.new is not None:
            if shown(text) != text and (_new_characters(text, result) or result.count("\ufffd") > text.count("\ufffd")):
                return None
            after[change.new] = result.encode(errors="surrogateescape")
        elif change.hunks and result:
            return None
    return after


def _new_characters(text: str, result: str) -> set[str]:
    return {character for character in result if not character.isascii()} - set(text)


_STYLES: Mapping[str, Callable[[str], str]] = {
    "fence": lambda text: f"Here's the patch:\n```diff\n{text}```\n",
    "here-document": lambda text: f"apply_patch <<'EOF'\n{text}EOF\n",
    "word": lambda text: "apply_patch '" + text.replace("'", "'\\''") + "'",
    "JSON": lambda text: json.dumps({"input": text}),
    "array": lambda text: json.dumps(["bash", "-lc", f"apply_patch <<'EOF'\n{text}EOF\n"]),
    "mark": lambda text: BOM + text,
    "CR LF": lambda text: text.replace("\n", "\r\n"),
    "indentation": lambda text: "".join(f"    {line}" for line in _byte_lines(text)),
}
