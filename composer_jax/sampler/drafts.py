"""Drafts for speculative decoding: guesses at the next tokens of a context, which one device call verifies.

Drafts come from the context (PromptLookup) or from the network's MTP module (sampler/mtp_decode.py).
A draft never changes what is sampled. The call draws every token from the network's distribution by the same random
number as a decode step would, and keeps the drawn tokens up to the first that differs from the draft. (Leviathan et al.
2023, arXiv 2211.17192, accept by a second random number; here draft and draw share one.)
"""

import statistics
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a request has a PromptLookup, and there is no JAX here
    from composer_jax.sampler.request import RequestHandle
    from composer_jax.sampler.runner import NewTokens

LONGEST, SHORTEST = 4, 2
"""Tokens of the longest and of the shortest context's end that prompt lookup searches for."""
RETRY = 64
"""Calls after which the slower way is tried again."""
FEWEST, KEPT = 3, 9
"""Calls of each way that are timed before the two are compared, and those that are remembered."""


class PromptLookup:
    """Drafts what followed the last earlier occurrence of the context's end (Saxena 2023, prompt lookup decoding).

    An agent copies names, paths and lines of files into its calls, so such drafts are often right.
    """

    def __init__(self) -> None:
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(LONGEST + 1)]
        self._indexed = 0

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Returns at most `most` tokens that may follow `tokens`, which begin with those of the call before."""
        n = len(tokens)
        # Places before the end only: the end itself is what is searched for.
        for end in range(max(self._indexed, SHORTEST), n):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._after[size][tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, n)
        for size in range(min(LONGEST, n), SHORTEST - 1, -1):
            start = self._after[size].get(tuple(tokens[n - size :]))
            if start is not None:
                return list(tokens[start : start + most])
        return []


class Speculation:
    """Drafts for decode calls, where verifying them is faster than decoding step by step."""

    def __init__(self, kind: str, most: int) -> None:
        """kind: SamplerConfig.drafts. most: tokens of a draft."""
        self._kind, self._most = kind, most
        self._speeds: dict[int, _Speeds] = {}  # by the rows of the program
        self._rows = 0
        self._waits = False  # for a prefill call, whose time is none of decoding
        self.drafted, self.accepted = [0] * most, [0] * most
        """Counts by the place of a token in its draft."""

    def draft(self, handles: "Sequence[RequestHandle]", rows: int) -> list[list[int]] | None:
        """Returns a draft for each row of a call; None if the call should decode step by step.

        rows: those of the program that runs, padding included, on which its time depends.
        """
        self._rows = rows
        if not self._speeds.setdefault(self._rows, _Speeds()).should_verify():
            return None
        if self._kind == "mtp":
            return [h.drafts[: h.sequence.budget - 1] for h in handles]  # the call drafts more
        drafts = [h.lookup.draft(h.sequence.tokens, min(self._most, h.sequence.budget - 1)) for h in handles]
        return drafts if any(drafts) else None

    def note_prefill(self) -> None:
        """Notes that a prefill call runs, which the next decode call waits for."""
        self._waits = True

    def note(self, is_verified: bool, sampled: "Sequence[NewTokens]", seconds: float) -> None:
        """Notes how long a call took, and what it sampled in each row.

        is_verified: whether the call had drafts, as `draft` returned them.
        """
        lengths = [len(new.tokens) for new in sampled]
        if not self._waits and is_verified:
            self._speeds[self._rows].verify.append(seconds / (sum(lengths) / len(lengths)))
        elif not self._waits:
            self._speeds[self._rows].decode.append(seconds / max(lengths))
        self._waits = False
        for new in sampled:
            for place, (drafted, accepted) in enumerate(zip(new.drafted, new.accepted, strict=True)):
                self.drafted[place] += int(drafted)
                self.accepted[place] += int(accepted)


class _Speeds:
    """Seconds per token of a row, of the last calls of both kinds, for calls of one number of rows.

    Medians of several calls: the first of a kind may compile, and others may wait for the processor.
    """

    def __init__(self) -> None:
        self.decode: deque[float] = deque(maxlen=KEPT)
        self.verify: deque[float] = deque(maxlen=KEPT)
        self._calls = 0

    def should_verify(self) -> bool:
        """Whether drafts paid lately. Every RETRY-th call does the other thing, which may have become faster."""
        self._calls += 1
        if len(self.decode) < FEWEST:
            return False
        if len(self.verify) < FEWEST:
            return True
        pays = statistics.median(self.verify) <= statistics.median(self.decode)
        return pays != (self._calls % RETRY == 0)
