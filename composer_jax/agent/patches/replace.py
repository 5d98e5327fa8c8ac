"""Replacement of a text that occurs once in a file.

The file keeps its line ends and its bytes that are not UTF-8.
"""

import re

from composer_jax.agent.patches.file_text import (
    ShownLines,
    fit_lines,
    is_undecoded,
    line_end,
    line_end_near,
    normal_line,
    shown_text,
    with_bytes_of,
    with_line_ends,
)
from composer_jax.agent.similar_lines import MAX_OCCURRENCES, describe_similar_lines, line_number, line_numbers
from composer_jax.tasks.patches import PatchError, diff_lines, split_lines

_MAX_COMPARED = 40_000  # pairs of lines; diff_lines is more than quadratic where lines are repeated


def replace_once(path: str, text: str, old: str, new: str) -> tuple[str, int]:
    """(text with `new` in place of `old`, the number of the first line of `new`).

    `old` is looked for as it is written, then as read_file shows the file: without the kind of line ends, and with a
    last line that ends. Raises PatchError, which names `path`, if it is not in the text exactly once.
    """
    start = _find_once(path, shown_text(text), old)
    if start is not None and not _splits_line_end(text, start) and not _splits_line_end(text, start + len(old)):
        end = start + len(old)
        if "\n" not in old and "\r" not in old:  # it does not tell which line ends it is written with
            new = with_line_ends(new, line_end_near(text, start))
        inserted = with_bytes_of(new, text[start:end])
    else:
        shown = ShownLines(text)
        normal = re.sub(r"\r\n?", "\n", old)
        at = _find_once(path, shown.text, normal)
        if at is None:
            similar = describe_similar_lines(shown.text, normal) or "; copy it from the file"
            raise PatchError(f"old is not in {path}{similar}")
        start, end = shown.to_file(at), shown.to_file(at + len(normal))
        open_end = end == len(text) and normal.endswith("\n") and not line_end(text)
        inserted = _fit(text[start:end], new, normal, shown.line_end_at(at) or "\n", open_end)
    if inserted == text[start:end]:
        raise PatchError("old and new differ in line ends only, which stay those of the file; change them with shell")
    _refuse_half_characters(path, text, start, end, inserted)
    return text[:start] + inserted + text[end:], line_number(text, start)


def _find_once(path: str, text: str, old: str) -> int | None:
    numbers = line_numbers(text, old)
    if len(numbers) > 1:
        *shown, last = map(str, numbers)
        is_all = len(numbers) <= MAX_OCCURRENCES
        raise PatchError(
            f"old is {len(numbers) if is_all else f'more than {len(shown)}'} times in {path}, at lines "
            f"{', '.join([*shown, last] if is_all else shown)}; make it longer, so that it is there once"
        )
    return text.find(old) if numbers else None


def _splits_line_end(text: str, at: int) -> bool:
    return text[at - 1 : at + 1] == "\r\n" if at else False


def _fit(replaced: str, new: str, old: str, above: str, open_end: bool) -> str:
    """`new` with the line ends and undecodable bytes of the replaced text. old: that text as shown."""
    old_lines, new_lines = split_lines(replaced), split_lines(new)
    old_rest = "" if old.endswith("\n") else old_lines.pop()
    new_rest = new_lines.pop() if new_lines and not line_end(new_lines[-1]) else ""
    lines = fit_lines(old_lines, new_lines, _align(old_lines, new_lines), above, open_end and not new_rest)
    return lines + with_bytes_of(new_rest, old_rest)


def _align(old: list[str], new: list[str]) -> str:
    """The signs of the hunk that turns the lines `old` into `new`.

    Where there are too many lines to compare, all of `old` are removed and all of `new` added.
    """
    if len(old) * len(new) > _MAX_COMPARED:
        return "-" * len(old) + "+" * len(new)
    signs, done = "", 0
    shown = [normal_line(shown_text(line)) for line in old]
    for hunk in diff_lines(shown, [*map(normal_line, new)]):
        start, end = hunk.old_range
        signs += " " * (start - done) + "-" * (end - start) + "+" * len(hunk.new)
        done = end
    return signs + " " * (len(old) - done)


def _refuse_half_characters(path: str, text: str, start: int, end: int, new: str) -> None:
    """Raises PatchError where an edit may begin or end within a character of an encoding that is not UTF-8."""
    begins = start > 0 and is_undecoded(text[start - 1])
    ends = (
        is_undecoded(text[end - 1]) and text[end : end + 1] not in ("", "\r", "\n") and not new.endswith(text[end - 1])
    )
    if begins or ends:
        raise PatchError(
            f"old {'begins' if begins else 'ends'} at a byte of {path} that is not UTF-8 and may be half of a "
            "character; let it begin and end with whole lines, as read_file shows them"
        )
