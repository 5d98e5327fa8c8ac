"""The patch within what models and harnesses wrap around it: JSON, a quoted word of a shell command, indentation.

Text before and after a patch, such as a fence of Markdown or the lines of a here-document, is left to the parsers,
which know where a patch begins and ends.
"""

import json
import re

_MAX_DEPTH = 3  # of JSON in JSON, such as {"command": ["bash", "-c", "apply_patch '...'"]}
_OPEN_QUOTE = re.compile(
    r"""(?:[^'"\n]*[=( \t])?("{3}|'{3}|"|')(?=\s*(?:\*\*\*[ \t]*Begin|diff[ ]--git[ ]|---[ ]|\$\(cat))"""
    r"""|(?:\S*/)?(?:ba|da|z)?sh[ \t]+(?:-\w+[ \t]+)*-\w*c[ \t]+("|')"""
)
_HEADER = re.compile(
    r"^(?:[^\r\n]*\*\*\*[ \t]*Begin[ \t]+Patch[ \t*]*"
    r"|[ \t]*diff --git [^\r\n]*"
    r"|[ \t]*--- [^\r\n]*\r?\n[ \t]*\+\+\+ [^\r\n]*)(\r?)$",
    re.MULTILINE,
)


def unwrap(text: str, depth: int = _MAX_DEPTH) -> str:
    """The text of a patch without its wrapping, byte order mark and indentation; its lines end with LF.

    CR is taken from the ends of lines only where the patch's own headers have it, else it belongs to the lines of
    files. A text without a patch is returned as it is, but for these ends.
    """
    text = re.sub(r"^\s*\ufeff", "", text)
    if "\n" not in text:
        text = text.replace("\r", "\n")
    if depth and (inner := _json_patch(text) or _quoted_patch(text)):
        return unwrap(inner, depth - 1)
    header = _HEADER.search(text)
    if header is None:
        return text
    if header[1]:
        text = text.replace("\r\n", "\n")
    return _dedent(text[: header.start()], text[header.start() :])


def _dedent(before: str, patch: str) -> str:
    """The text without the indentation of the patch's first line, if all of its lines have it."""
    indent = patch[: len(patch) - len(patch.lstrip(" \t"))]
    lines = patch.rstrip("\n").split("\n")
    if indent and not lines[-1].startswith((indent[0], "+", "-", "*", "@", "\\")):  # the end of a here-document
        lines.pop()
    if indent and all(line.startswith(indent) for line in lines if line.strip()):
        return "\n".join(line[len(indent) :] for line in lines)
    return before + patch


def _json_patch(text: str) -> str | None:
    """The only string with a patch in a JSON value; None for other texts.

    The quotes around a value that is a string may be missing.
    """
    is_value = text.lstrip().startswith(("{", "[", '"'))
    if not is_value and ("\n" in text or "\\n" not in text):
        return None
    try:
        values = [json.loads(text if is_value else f'"{text}"')]
    except (ValueError, RecursionError):
        return None
    patches: list[str] = []
    while values:
        value = values.pop()
        if isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str) and _HEADER.search(value):
            patches.append(value)
    return patches[0] if len(patches) == 1 else None


def _quoted_patch(text: str) -> str | None:
    """The quoted last word of a command, such as `apply_patch '...'`, if it has a patch in it, else None."""
    text = text.strip()
    opening = _OPEN_QUOTE.match(text)
    if opening is None:
        return None
    quote, word = opening[1] or opening[2], text.removesuffix(")")
    if len(word) < opening.end() + len(quote) or not word.endswith(quote):
        return None
    word = word[opening.end() : -len(quote)]
    if quote == "'":
        word = word.replace("'\\''", "'")
    elif quote == '"' and not word.startswith("$("):  # where quotes have no effect on a here-document
        word = re.sub(r'\\([\\"$`])', r"\1", word)
    return word if _HEADER.search(word) else None
