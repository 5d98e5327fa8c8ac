"""The text of a file that is edited: bytes and line ends that the edit does not change stay as they are."""

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from composer_jax.tasks.patches import PatchError, split_lines

BOM = "\ufeff"
UNKNOWN = "\ufffd"
"""What read_file shows for a byte that is not UTF-8."""
_LINE_END = re.compile(r"\r\n?|\n")
_UNDECODED = re.compile("[\udc80-\udcff]")


def decode_text(path: str, data: bytes) -> str:
    """The text of a file; bytes that are not UTF-8 are surrogate escapes. Raises PatchError for binary data."""
    text = data.decode(errors="surrogateescape")
    if "\0" in text and _UNDECODED.search(text):
        raise PatchError(f"{path} is not UTF-8 text; change it with shell")
    return text


def encode_text(path: str, text: str, before: str) -> bytes:
    """The bytes of an edited text. Raises PatchError for characters that a file in another encoding cannot take.

    before: the text of the file before the edit, from `decode_text`.
    """
    if _UNDECODED.search(before):
        added = {character for character in text if not character.isascii()} - set(before)
        if text.count(UNKNOWN) > before.count(UNKNOWN):
            added.add(UNKNOWN)
        if added:
            shown = "".join(sorted(added))[:20]
            raise PatchError(f"{path} is not UTF-8 text, so {shown!r} cannot be written into it; use ASCII, or shell")
    return text.encode(errors="surrogateescape")


def shown_text(text: str) -> str:
    """The text as read_file shows it: UNKNOWN for each byte that is not UTF-8. It has the same length."""
    return _UNDECODED.sub(UNKNOWN, text)


def is_undecoded(character: str) -> bool:
    """Whether a character of `decode_text` stands for a byte that is not UTF-8."""
    return _UNDECODED.fullmatch(character) is not None


class ShownLines:
    """A text as read_file shows it: every line ends with LF, and UNKNOWN stands for each byte that is not UTF-8.

    text: the shown text. lines: the lines of the file. Offsets in one are those in the other up to the line ends.
    """

    def __init__(self, text: str) -> None:
        self.lines = split_lines(text)
        shown = [normal_line(line) for line in split_lines(shown_text(text))]
        self.text = "".join(shown)
        self._starts = [0, *accumulate(map(len, shown))]
        self._file_starts = [0, *accumulate(map(len, self.lines))]

    def to_file(self, at: int) -> int:
        """The offset in the file of an offset in the shown text."""
        line = bisect_right(self._starts, at) - 1
        return self._file_starts[line] + at - self._starts[line]

    def from_file(self, at: int) -> int:
        """The offset in the shown text of an offset in the file that is not within a line end."""
        line = bisect_right(self._file_starts, at) - 1
        return self._starts[line] + at - self._file_starts[line]

    def line_end_at(self, at: int) -> str:
        """The end of the line before an offset of the shown text.

        Where that line has none, it is that of the first line, and "" if that has none either.
        """
        line = bisect_right(self._starts, at) - 1
        near = self.lines[max(0, line - 1) : line] + self.lines[:1]
        return next((end for end in map(line_end, near) if end), "")


def line_end(line: str) -> str:
    """The line end of a line: CR LF, LF, CR or nothing."""
    return line[len(line.rstrip("\r\n")) :]


def normal_line(line: str) -> str:
    """A line with LF for its line end."""
    return line.rstrip("\r\n") + "\n"


def line_end_near(text: str, at: int) -> str:
    """The first line end at an offset or behind it.

    Where there is none, it is the first of the text, and "" if the text has none.
    """
    end = _LINE_END.search(text, at) or _LINE_END.search(text)
    return end[0] if end else ""


def with_line_ends(text: str, end: str) -> str:
    """A text whose lines end with `end`; "" leaves them."""
    return re.sub(r"\r*\n", end, text) if end else text


def fit_lines(file_lines: Sequence[str], new_lines: Sequence[str], signs: str, above: str, open_end: bool) -> str:
    """The text of new lines in place of lines of a file, whose line ends and undecodable bytes they take.

    A context line stays as it is in the file; an added line ends as the line that it replaces, or as the one above.

    Args:
      file_lines: the lines of the file that are replaced. new_lines: the lines of the patch.
      signs: see Hunk.
      above: the line end where no line is replaced.
      open_end: whether the last of `file_lines` is the last of the file and has no line end, nor gets the last new one.
    """
    lines: list[str] = []
    removed: deque[str] = deque()
    old, new, end = iter(file_lines), iter(new_lines), above
    for sign in signs:
        if sign == "-":
            removed.append(next(old))
            continue
        line = next(new)
        replaced = removed.popleft() if sign == "+" and removed else ""
        if sign == " ":
            removed.clear()
            line = replaced = next(old)
        end = line_end(replaced) or end
        line = with_bytes_of(line, replaced).rstrip("\r\n") + end
        if line == "\n" and lines and lines[-1].endswith("\r"):  # they would be one line end
            lines[-1] = f"{lines[-1][:-1]}\n"
        lines.append(line)
    if lines and open_end:
        lines[-1] = lines[-1].rstrip("\r\n")
    return "".join(lines)


def with_bytes_of(text: str, replaced: str) -> str:
    """`text` with the undecodable bytes of the text that it replaces for its UNKNOWN, if it has as many."""
    characters = re.findall(f"[\udc80-\udcff{UNKNOWN}]", replaced)
    if len(characters) != text.count(UNKNOWN):
        return text
    rest = iter(characters)
    return re.sub(UNKNOWN, lambda _: next(rest), text)
