"""Application of hunks to a text: the old lines must match exactly, their position may differ from the patch's."""

from collections.abc import Sequence

from composer_jax.agent.similar_lines import describe_similar_lines
from composer_jax.tasks.patches import Hunk, PatchError


def apply_hunks(text: str, hunks: Sequence[Hunk]) -> str:
    """The text with all hunks applied.

    A hunk is applied at its line number if its old lines are there, else at the only place behind the previous hunk
    where they are. Raises PatchError, which starts with "hunk N", if there is no such place or several.
    """
    done, pieces = 0, []
    for number, hunk in enumerate(hunks, 1):
        start, end, new = _locate(text, done, hunk, f"hunk {number}")
        pieces += [text[done:start], new]
        done = end
    return "".join([*pieces, text[done:]])


def _locate(text: str, done: int, hunk: Hunk, name: str) -> tuple[int, int, str]:
    """(start, end) of the replaced text, and the new text."""
    old, new = "".join(hunk.old), "".join(hunk.new)
    low = _skip_anchors(text, done, hunk, name)
    if not old:
        at = _find_insertion(text, low, hunk, name)
        return at, at, new
    start = _find_old(text, low, old, hunk, name)
    if start is not None:
        return start, start + len(old), new
    if text and not text.endswith("\n"):  # models rarely mark a last line without a line break
        start = _find_old(f"{text}\n", low, old, hunk, name)
        if start is not None and start + len(old) > len(text):
            return start, len(text), new.removesuffix("\n")
    where = f" behind line {_count_lines(text, low)}" if low else ""
    similar = describe_similar_lines(text[low:], old)
    raise PatchError(f"{name} does not fit: its old lines are not in the file{where}{similar}")


def _find_old(text: str, low: int, old: str, hunk: Hunk, name: str) -> int | None:
    """The offset of the old lines, at `low` or behind it; None if they are not there."""
    if hunk.at_end:
        start = len(text) - len(old)
        return start if start >= low and text.endswith(old) and _starts_line(text, start) else None
    if hunk.start is not None:
        start = _offset(text, hunk.start - 1)
        if start is not None and start >= low and text.startswith(old, start) and _ends_line(text, start + len(old)):
            return start
    starts: list[int] = []
    start = text.find(old, low)
    while start >= 0 and len(starts) < 2:
        if _starts_line(text, start) and _ends_line(text, start + len(old)):
            starts.append(start)
            if hunk.anchors:  # the first place below the anchors counts
                break
        start = text.find(old, start + 1)
    if len(starts) > 1:
        lines = " and ".join(str(_count_lines(text, start) + 1) for start in starts)
        raise PatchError(f"{name} fits in several places, such as lines {lines}; give it more lines of context")
    return starts[0] if starts else None


def _find_insertion(text: str, low: int, hunk: Hunk, name: str) -> int:
    """The offset at which a hunk without old lines inserts."""
    if hunk.start is not None:
        at = _offset(text, hunk.start)
        if at is not None and at >= low and _starts_line(text, at):
            return at
        raise PatchError(f"{name} does not fit: the file has no end of line {hunk.start} behind the hunk before it")
    if hunk.anchors:
        return low
    if (hunk.at_end or not text) and _starts_line(text, len(text)):
        return len(text)
    raise PatchError(f"{name} only adds lines and does not say where; give it a line of context")


def _skip_anchors(text: str, low: int, hunk: Hunk, name: str) -> int:
    """The offset of the line below the anchors, which are beginnings of lines in this order."""
    for anchor in hunk.anchors:
        while low < len(text):
            end = text.find("\n", low) + 1 or len(text)
            line, low = text[low:end].strip(), end
            if line.startswith(anchor):
                break
        else:
            raise PatchError(f"{name} does not fit: no line starts with its @@ {anchor[:80]!r}")
    return low


def _starts_line(text: str, at: int) -> bool:
    return at == 0 or text[at - 1] == "\n"


def _ends_line(text: str, at: int) -> bool:
    return at == len(text) or text[at - 1] == "\n"


def _count_lines(text: str, at: int) -> int:
    return text.count("\n", 0, at)


def _offset(text: str, lines: int) -> int | None:
    """The offset after `lines` lines; None if there are fewer."""
    at = 0
    for _ in range(lines):
        at = text.find("\n", at) + 1
        if not at:
            return None
    return at if lines >= 0 else None
