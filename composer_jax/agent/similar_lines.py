"""Hints for an edit whose old text is not in the file: the most similar lines of the file."""

import re

MAX_OCCURRENCES = 5
MAX_SHOWN = 12  # lines
MAX_LINE = 200  # characters
MAX_COMPARED = 10_000  # lines; each blocks the event loop for some microseconds
_WORD = re.compile(r"\w+|[^\w\s]")


def line_number(text: str, at: int) -> int:
    """The number of the line at an offset, as read_file counts: CR ends lines where the text has no LF."""
    return text.count("\n" if "\n" in text else "\r", 0, at) + 1


def line_numbers(text: str, part: str) -> list[int]:
    """The numbers of the lines on which the first MAX_OCCURRENCES + 1 occurrences of a part begin."""
    numbers, start = [], text.find(part)
    while start >= 0 and len(numbers) <= MAX_OCCURRENCES:
        numbers.append(line_number(text, start))
        start = text.find(part, start + 1)
    return numbers


def describe_similar_lines(text: str, part: str) -> str:
    """A clause, starting with a semicolon, on the lines of `text` that are similar to the missing `part`.

    They are those that differ in white space only, or the ones around the most similar of the first MAX_COMPARED
    lines; "" if there are none.
    """
    lines, target = text.split("\n"), [line.strip() for line in part.strip("\n").split("\n")]
    stripped = [line.strip() for line in lines]
    first = next((line for line in target if line), "")
    if not first:
        return ""
    size = len(target)
    whole = _as_lines(stripped)
    at = whole.find(_as_lines(target))
    if at >= 0:
        start = whole.count("\n", 0, at)
        return f"; these lines differ from it in white space only:\n{_number_lines(lines, start, start + size)}"
    best, near = 0.0, 0
    for number, line in enumerate(stripped[:MAX_COMPARED]):
        if (similarity := _similarity(line, first)) > best:
            best, near = similarity, number
    if best < 0.5:
        return ""
    return f"; the nearest to its first line is in\n{_number_lines(lines, max(0, near - 1), near + 4)}"


def _as_lines(lines: list[str]) -> str:
    return "\n".join(["", *lines, ""])


def _similarity(line: str, other: str) -> float:
    """The Jaccard index of the words and signs of two lines."""
    one, two = set(_WORD.findall(line[:MAX_LINE])), set(_WORD.findall(other[:MAX_LINE]))
    return len(one & two) / max(1, len(one | two))


def _number_lines(lines: list[str], start: int, end: int) -> str:
    shown = lines[start : min(end, start + MAX_SHOWN)]
    # repr shows the difference between tabs and spaces.
    return "\n".join(f"{n:6}\t{line[:MAX_LINE]!r}" for n, line in enumerate(shown, start + 1))
