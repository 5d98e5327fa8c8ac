"""ContentReader: finds the content of a message (AssistantMessage.content) while the message is sampled."""

from collections.abc import Callable, Sequence
from typing import Protocol

from composer_jax.data.chat.messages import THINKING
from composer_jax.data.text_tokenizer import TextTokenizer


class ContentReader(Protocol):
    """Reads one message."""

    def add(self, token: int) -> tuple[str, list[int]]:
        """Returns what the next sampled id adds: text, then ids; what comes before the text is complete."""
        ...


class TextReader:
    """Content is all ids before the end of the message, or before the first call outside thinking."""

    def __init__(self, tok: TextTokenizer, end_tokens: Sequence[int], is_thinking: Callable[[], bool]) -> None:
        self._tokenizer, self._end_tokens, self._is_thinking = tok, end_tokens, is_thinking
        self._open = True

    def add(self, token: int) -> tuple[str, list[int]]:
        """See ContentReader.add."""
        if self._open and self._tokenizer.is_control(token) and self._tokenizer.decode([token]) not in THINKING:
            # The end, or the beginning of a call; inside thinking a call is only mentioned.
            self._open = token not in self._end_tokens and self._is_thinking()
        return "", [token] if self._open else []
