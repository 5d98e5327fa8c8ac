"""The completions that GRPO trains on, here and in google-tunix: prompts, reward and figures."""

import statistics
from collections.abc import Sequence

import numpy as np

PROMPTS, GROUP = 8, 8
"""Prompts of a step, and completions of a prompt."""
PROMPT_TOKENS, MAX_TOKENS = 256, 128
"""Tokens of a prompt, and most tokens of a completion."""
ENDS = tuple(range(1, 1024, 64))
"""Ids that end a completion: a policy with random weights samples one after 64 tokens in the mean."""
UNTIMED = 3
"""Steps at the beginning, which compile."""


def prompt(number: int, vocab_size: int) -> list[int]:
    """Returns the ids of a prompt; 0 is none of them, which google-tunix pads with."""
    return np.random.default_rng(number).integers(1, vocab_size, PROMPT_TOKENS).tolist()


def reward(tokens: Sequence[int]) -> float:
    """Returns the fraction of even ids."""
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))


def figures(seconds: Sequence[float]) -> dict[str, object]:
    """Returns what is printed of the seconds of all steps."""
    timed = list(seconds[UNTIMED:])
    rate = 60 * PROMPTS * GROUP / statistics.median(timed)
    return {"episodes_per_minute": round(rate, 1), "step_s": [round(s, 4) for s in timed]}
