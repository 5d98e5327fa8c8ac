"""The control tokens with which published models are trained to fill in the middle of a text."""

from __future__ import annotations

from typing import NamedTuple


class FimTokens(NamedTuple):
    """What comes before the prefix, before the suffix and before the middle: texts of tokens, or their ids."""

    prefix: str
    suffix: str
    middle: str


FIM_TOKENS = (
    FimTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Qwen3, CodeGemma
    FimTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM2
    FimTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder, DeepSeek-V3
    FimTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FimTokens("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),  # Codestral
)
"""The first three that a tokenizer has are used."""

FIM_TEXTS = frozenset(text for tokens in FIM_TOKENS for text in tokens)
"""All of their texts, to which no file may encode."""
