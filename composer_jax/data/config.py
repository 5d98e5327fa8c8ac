"""The data section of a run's config."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from composer_jax.data.chat.formats import chat_format_kind
from composer_jax.data.chat.tool_prompt import check_tool_prompt
from composer_jax.errors import UserError


@dataclass(frozen=True)
class TokenizerTextConfig:
    """Texts that the tokenizer is trained on beside source code."""

    kind: str
    """Import path of a function (seed, count) -> iterator of texts."""
    count: int = 0
    """Passed to the function: how many items its texts are made from."""


@dataclass(frozen=True)
class DataConfig:
    """Source code for pretraining and the tokenizer that is trained on it."""

    source: str = ""
    """Folder of source code, or its URL (gs://...); empty means the standard library of the running Python."""
    extensions: tuple[str, ...] = (".py",)
    """Endings of the files that are read."""
    max_bytes: int = 4_000_000
    """Bytes of training source that are read."""
    max_heldout_bytes: int = 60_000
    """Bytes of held-out source that are read."""
    tokenizer_bytes: int = 2_000_000
    """Bytes of training source that the tokenizer is trained on."""
    tokenizer_texts: Mapping[str, TokenizerTextConfig] = field(default_factory=dict)
    """Name -> further texts for the tokenizer, such as tool calls, whose JSON source code does not show."""
    chat_format: str = ""
    """How conversations become token ids: a name in data/chat/formats.py, or the import path of a class Tokenizer ->
    ChatFormat. Empty is the base's own format, and compact in a run without a base."""

    tool_prompt: str = ""
    """Text that declares the tools to a base whose chat template knows none; {tools} or {signatures} in it stands for
    them. Empty is TOOL_PROMPT of data/chat/tool_prompt.py, which also has a short one."""

    def __post_init__(self) -> None:
        if self.tool_prompt:
            check_tool_prompt(self.tool_prompt, "data.tool_prompt")
        if self.chat_format:
            chat_format_kind(self.chat_format)
        for name in ("max_bytes", "max_heldout_bytes", "tokenizer_bytes"):
            if getattr(self, name) < 1:
                raise UserError(f"data.{name}={getattr(self, name)}; it must be at least 1 byte.")
        if not self.extensions:
            raise UserError('data.extensions is empty; name the endings of source files, e.g. (".py",).')
