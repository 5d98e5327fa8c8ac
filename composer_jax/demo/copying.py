"""The copy curriculum: rows in which every predictable token repeats an earlier one.

An agent's tool calls repeat text that it has read, and a small model does not learn to copy from source code alone.
These rows teach only that: random segments over a random alphabet, some new, some repeats of earlier ones. Only the
repeats carry loss weight; the rest is noise that no model could predict.
"""

from collections.abc import Mapping

import grain
import numpy as np

from composer_jax.data.token_source import IN_MEMORY, SourceInputs
from composer_jax.data.tokenizer import SPECIAL

ALPHABET = (8, 256)
"""Least and most distinct token ids in a row, drawn from all ids but the control tokens."""

COMMON = 10
"""Letters that make up half of the text in every other row, as digits and punctuation do in code: the letter after
one of them depends on the letters before it."""

SEGMENT = (8, 40)
"""Least and most tokens in a segment; the most is at most half a row, to leave room for a repeat."""


class CopyCurriculum:
    """The copy curriculum as a source of pretraining rows (data/sources.py)."""

    def __init__(self, vocab_size: int) -> None:
        """vocab_size: letters are drawn from all ordinary ids below this."""
        self._vocab_size = vocab_size

    def rows(self, *, seq_len: int, batch_size: int, seed: int) -> grain.IterDataset:
        """See TokenSource.rows."""

        def row(index: int) -> dict[str, np.ndarray]:
            tokens, weights = copy_row(seed, index, seq_len=seq_len, vocab_size=self._vocab_size)
            return {"tokens": tokens, "segments": np.ones(seq_len, np.int32), "weights": weights}

        return grain.MapDataset.range(2**40).map(row).to_iter_dataset(IN_MEMORY)

    def identity(self) -> Mapping[str, int]:
        """See TokenSource.identity."""
        return {"vocab_size": self._vocab_size}


def copy_curriculum(inputs: SourceInputs) -> CopyCurriculum:
    """Returns the copy curriculum over the vocabulary of the run's tokenizer."""
    return CopyCurriculum(inputs.tokenizer.vocab_size)


def copy_row(seed: int, index: int, *, seq_len: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns row `index` of the endless curriculum `seed`: (tokens int32[S], weights float32[S]).

    A repeat's first token has weight 0 (nothing predicts which segment comes next), the others weight 1. The row is a
    function of the arguments, the same on every machine.
    """
    rng = np.random.default_rng((seed, index))
    first = len(SPECIAL)
    # Uniform in the logarithm: small alphabets, where one token of context does not suffice, are harder.
    low, high = (min(size, vocab_size - first) for size in ALPHABET)
    size = int(np.clip(np.exp(rng.uniform(np.log(low), np.log(high + 1))), low, high))
    letters = first + rng.choice(vocab_size - first, size=size, replace=False)
    share = np.full(size, 1 / size)
    if index % 2 and size > COMMON:
        share = np.repeat([0.5 / COMMON, 0.5 / (size - COMMON)], [COMMON, size - COMMON])

    longest = max(1, min(SEGMENT[1], seq_len // 2))
    shortest = min(SEGMENT[0], longest)
    tokens = np.zeros(seq_len, np.int32)
    weights = np.zeros(seq_len, np.float32)
    seen: list[np.ndarray] = []
    end = 0
    while end < seq_len:
        # The second segment repeats the first, so that no row is without a repeat.
        repeats = bool(seen) and (end == len(seen[0]) or rng.random() < 0.6)
        if repeats:
            part = seen[rng.integers(len(seen))]
        else:
            part = rng.choice(letters, size=rng.integers(shortest, longest + 1), p=share)
            seen.append(part)
        part = part[: seq_len - end]
        tokens[end : end + len(part)] = part
        if repeats:
            weights[end + 1 : end + len(part)] = 1.0
        end += len(part)
    return tokens, weights
