"""What a patch or an edit makes of a text, said line by line: the reference of benchmarks/fuzz_patches.py.

It shares no code with composer_jax: lists of lines are compared at every place of the file, and nothing is parsed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Signed = tuple[tuple[str, str], ...]
BOM = "\ufeff"
_UNIVERSAL = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


@dataclass(frozen=True)
class PlacedHunk:
    """A hunk as it is meant. signed: (sign, line), where blank lines at its ends may have no sign."""

    signed: Signed
    start: int | None = None
    anchors: tuple[str, ...] = ()
    at_end: bool = False

    @property
    def old(self) -> list[str]:
        return [line for sign, line in self.signed if sign != "+"]

    @property
    def new(self) -> list[str]:
        return [line for sign, line in self.signed if sign != "-"]

    def trimmed(self) -> "PlacedHunk":
        """The hunk without unsigned lines at its ends."""
        signed = list(self.signed)
        while signed and not signed[-1][0]:
            signed.pop()
        while signed and not signed[0][0]:
            del signed[0]
        return PlacedHunk(tuple(signed), self.start, self.anchors, self.at_end)


class Refused(Exception):
    """A hunk has no place in the text, or several."""


def universal_lines(text: str) -> list[str]:
    """The lines of a text that end with LF, CR LF or CR."""
    return _UNIVERSAL.findall(text)


def shown(text: str) -> str:
    """The text as read_file shows it."""
    return "".join("\ufffd" if "\udc80" <= character <= "\udcff" else character for character in text)


def content(line: str) -> str:
    return shown(line).rstrip("\r\n")


def line_end(line: str) -> str:
    return line[len(line.rstrip("\r\n")) :]


def apply_reference(text: str, hunks: Sequence[PlacedHunk]) -> str:
    """The text after all hunks. Raises Refused."""
    if hunks and text.startswith(BOM) and not any(line.startswith(BOM) for hunk in hunks for line in hunk.old):
        after = apply_reference_lines(text[1:], hunks)
        return BOM + after if after else ""
    return apply_reference_lines(text, hunks)


def apply_reference_lines(text: str, hunks: Sequence[PlacedHunk]) -> str:
    pieces, done = [], 0
    starts = [hunk.start for hunk in hunks if hunk.start is not None]
    if len(starts) == len(hunks):
        hunks = [hunks[at] for _, at in sorted((start, at) for at, start in enumerate(starts))]
    for hunk in hunks:
        for one in (hunk, hunk.trimmed()):
            if place := (_replacement(text, done, one) if one.old else _insertion(text, done, one)):
                break
        else:
            raise Refused
        start, end, new = place
        pieces += [text[done:start], new]
        done = end
    return "".join([*pieces, text[done:]])


def _replacement(text: str, done: int, hunk: PlacedHunk) -> tuple[int, int, str] | None:
    old = hunk.old
    place = _find(re.findall(r"[^\n]*\n|[^\n]+", text), done, old, hunk)
    if place is not None:
        return *place, "".join(hunk.new)
    lines = universal_lines(text)
    signed = [(sign, part) for sign, line in hunk.signed for part in universal_lines(line)]
    place = _find(lines, done, [content(line) for sign, line in signed if sign != "+"], hunk, content)
    if place is None:
        return None
    start, end = place
    first = text[:start] and universal_lines(text[:start])[-1]
    above = line_end(first) or line_end(lines[0]) or "\n"
    new_lines = _fit(universal_lines(text[start:end]), signed, above)
    if new_lines and end == len(text) and not line_end(lines[-1]):
        new_lines[-1] = new_lines[-1].rstrip("\r\n")
    new = "".join(new_lines)
    if new == text[start:end] and hunk.old != hunk.new:
        raise Refused  # it changes line ends that the file does not have
    return start, end, new


def _fit(lines: Sequence[str], signed: Sequence[tuple[str, str]], above: str) -> list[str]:
    """The new lines: context as in the file, and others with the line ends of what they replace."""
    result, queue, at = [], [], 0
    for sign, line in signed:
        if sign == "+":
            replaced = queue.pop(0) if queue else ""
            above = line_end(replaced) or above
            unknown = [character for character in replaced if shown(character) == "\ufffd"]
            text = content(line)
            if len(unknown) == text.count("\ufffd"):
                text = "".join(unknown.pop(0) if character == "\ufffd" else character for character in text)
            result.append(text + above)
        elif sign == "-":
            queue.append(lines[at])
            at += 1
        else:
            queue = []
            above = line_end(lines[at]) or above
            result.append(lines[at].rstrip("\r\n") + above)
            at += 1
    for at in range(len(result) - 1):
        if result[at].endswith("\r") and result[at + 1] == "\n":  # together they would be one line end
            result[at] = result[at][:-1] + "\n"
    return result


def _find(
    lines: Sequence[str], done: int, old: Sequence[str], hunk: PlacedHunk, read: Callable[[str], str] = str
) -> tuple[int, int] | None:
    """(start, end) of the lines that read as `old`, as offsets. Raises Refused if there are several."""
    starts = [0, *accumulate(map(len, lines))]
    texts = [read(line) for line in lines]
    low = _below_anchors(texts, starts, done, hunk.anchors)
    if low is None:
        return None
    places = [at for at in range(low, len(lines) - len(old) + 1) if texts[at : at + len(old)] == old]
    if hunk.at_end:
        places = [at for at in places if at + len(old) == len(lines)]
    elif hunk.anchors and not hunk.trimmed().old:
        places = [at for at in places if at == low]
    elif hunk.start is not None and hunk.start - 1 in places:
        places = [hunk.start - 1]
    elif hunk.anchors:
        places = places[:1]
    if len(places) > 1:
        raise Refused
    return (starts[places[0]], starts[places[0] + len(old)]) if places else None


def _below_anchors(lines: Sequence[str], starts: Sequence[int], done: int, anchors: Sequence[str]) -> int | None:
    at = next(at for at, start in enumerate(starts) if start >= done)
    for anchor in anchors:
        while at < len(lines) and not lines[at].strip().startswith(anchor):
            at += 1
        if at == len(lines):
            return None
        at += 1
    return at


def _insertion(text: str, done: int, hunk: PlacedHunk) -> tuple[int, int, str] | None:
    lines = universal_lines(text)
    starts = [0, *accumulate(map(len, lines))]
    new = "".join(hunk.new)
    low = _below_anchors([*map(content, lines)], starts, done, hunk.anchors)
    if low is None:
        return None
    if hunk.start is not None:
        byte_starts = [0, *accumulate(map(len, re.findall(r"[^\n]*\n|[^\n]+", text)))]
        if hunk.start >= len(byte_starts) or byte_starts[hunk.start] < done:
            raise Refused
        at = byte_starts[hunk.start]
    elif hunk.anchors:
        at = starts[low]
    elif hunk.at_end or not text:
        at = len(text)
    else:
        raise Refused
    above = (line_end(universal_lines(text[:at])[-1]) if at else "") or (line_end(lines[0]) if lines else "")
    if "\r" not in new and above:
        new = new.replace("\n", above)
    if text and at == len(text) and not line_end(lines[-1]):
        above = above or "\n"
        return at, at, above + (new[: -len(above)] if new.endswith(above) else new)
    return at, at, new


def edit_problem(text: str, old: str, new: str, after: str | None) -> str | None:
    """What is wrong with the text after an edit, or with its refusal (None)."""
    places, is_exact = _edit_places(text, old)
    is_utf8 = shown(text) == text
    if after is None:
        changes_ends_only = not is_exact and _normal(old).rstrip("\n") == _normal(new).rstrip("\n")
        return "refused" if len(places) == 1 and is_utf8 and old != new and not changes_ends_only else None
    if len(places) != 1 or old == new:
        return f"applied, though old is there {len(places)} times"
    start, end = places[0]
    size = len(after) - len(text) + end - start
    inserted = after[start : start + size]
    if text[:start] + inserted + text[end:] != after:
        return "changed outside of old"
    if is_exact and ("\n" in old or "\r" in old):
        return None if shown(inserted) == new else "new was changed"
    expected, normal = _normal(new), _normal(shown(inserted))
    if end == len(text) and not line_end(text) and _normal(old).endswith("\n"):
        expected = expected.removesuffix("\n")
    if normal != expected and "\r\r\n" not in new:
        return f"inserted {inserted!r}"
    ends = {line_end(line) for line in universal_lines(text)} - {""}
    has_new_ends = {line_end(line) for line in universal_lines(inserted)} - {""} - ends
    return "has other line ends than before" if len(ends) == 1 and has_new_ends and "\r" not in new else None


def _normal(text: str) -> str:
    return re.sub("\r\n?", "\n", text)


def _edit_places(text: str, old: str) -> tuple[list[tuple[int, int]], bool]:
    """(every (start, end) of a text that reads as `old`, whether as it is written, not as read_file shows it)."""
    read = shown(text)
    exact = [(at, at + len(old)) for at in range(len(text)) if read[at : at + len(old)] == old]
    if len(exact) > 1 or exact and not any(at and text[at - 1 : at + 1] == "\r\n" for at in exact[0]):
        return exact, True
    characters: list[tuple[int, str, int]] = []  # (start, the character as shown, end)
    start = 0
    for line in universal_lines(text):
        text_of_line = content(line)
        characters += [(start + at, character, start + at + 1) for at, character in enumerate(text_of_line)]
        characters.append((start + len(text_of_line), "\n", start + len(line)))
        start += len(line)
    target, places = _normal(old), []
    for at in range(len(characters) - len(target) + 1):
        part = characters[at : at + len(target)]
        if "".join(character for _, character, _ in part) == target:
            places.append((part[0][0], part[-1][2]))
    return places, False
