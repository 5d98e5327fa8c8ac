"""Why a text is not where a model thought: what the file holds instead, in a few lines for the model."""

import re

MAX_OCCURRENCES = 5
MAX_SHOWN = 12  # lines
MAX_LINE = 200  # characters
MAX_COMPARED = 10_000  # lines: each takes some microseconds in which nothing else runs
_WORD = re.compile(r"\w+|[^\w\s]")


def line_numbers(text: str, part: str) -> str:
    """The numbers of the lines on which the occurrences of a part begin."""
    numbers, start = [], text.find(part)
    while start >= 0 and len(numbers) <= MAX_OCCURRENCES:
        numbers.append(text.count("\n", 0, start) + 1)
        start = text.find(part, start + len(part))
    return ", ".join(map(str, numbers[:MAX_OCCURRENCES])) + (" and more" if len(numbers) > MAX_OCCURRENCES else "")


def describe_similar_lines(text: str, part: str) -> str:
    """What to say of a part that is not in a text: lines that differ in white space only, or the most similar of the
    first MAX_COMPARED lines.

    Starts with a semicolon or a line break; empty if nothing comes near.
    """
    lines, wanted = text.split("\n"), [line.strip() for line in part.strip("\n").split("\n")]
    stripped = [line.strip() for line in lines]
    first = next((line for line in wanted if line), "")
    if not first:
        return ""
    size = len(wanted)
    whole = _as_lines(stripped)
    at = whole.find(_as_lines(wanted))
    if at >= 0:
        start = whole.count("\n", 0, at)
        return f"; these lines differ from it in white space only:\n{_shown(lines, start, start + size)}"
    best, near = 0.0, 0
    for number, line in enumerate(stripped[:MAX_COMPARED]):
        if (likeness := _likeness(line, first)) > best:
            best, near = likeness, number
    if best < 0.5:
        return ""
    return f"; the nearest to its first line is in\n{_shown(lines, max(0, near - 1), near + 4)}"


def _as_lines(lines: list[str]) -> str:
    return "\n".join(["", *lines, ""])


def _likeness(line: str, other: str) -> float:
    """Share of words and signs that two lines have in common."""
    one, two = set(_WORD.findall(line[:MAX_LINE])), set(_WORD.findall(other[:MAX_LINE]))
    return len(one & two) / max(1, len(one | two))


def _shown(lines: list[str], start: int, end: int) -> str:
    shown = lines[start : min(end, start + MAX_SHOWN)]
    # White space is what differs, so it is kept, and tabs are told from spaces.
    return "\n".join(f"{n:6}\t{line[:MAX_LINE]!r}" for n, line in enumerate(shown, start + 1))
