"""IncrementalDetokenizer: the text of a stream of token ids, in pieces that never split a character."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, with U+FFFD for broken UTF-8."""

_BROKEN = "\ufffd"


class IncrementalDetokenizer:
    """Decodes ids as they arrive. The pieces, joined, are the text of all ids.

    The bytes of a character can be divided over tokens, and some decoders write a token differently at the start of a
    text. So ids are decoded together with those of the piece before, and broken UTF-8 at the end waits for more ids.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []  # those of the piece before, then the newer ones
        self._before = 0  # number of the former
        self._shown = 0  # characters of the text of `_ids` that were returned

    def add(self, ids: Sequence[int]) -> str:
        """Returns the text that these ids complete."""
        self._ids += ids
        text = self._decode(self._ids)
        whole = text.rstrip(_BROKEN)
        piece = text[self._shown : len(whole)]
        self._shown = max(self._shown, len(whole))
        if piece and whole == text:
            self._ids = self._ids[self._before :]
            self._before, self._shown = len(self._ids), len(self._decode(self._ids))
        return piece

    def finish(self) -> str:
        """Returns what is left, with U+FFFD for a character that was never finished."""
        return self._decode(self._ids)[self._shown :]
