"""Drafts for speculative decoding: guesses at the next tokens of a context, which one device call verifies.

Drafts come from the context (PromptLookup) or from the network's MTP module (sampler/mtp_decode.py).
A draft never changes what is sampled. The call draws every token from the network's distribution by the same random
number as a decode step would, and keeps the drawn tokens up to the first that differs from the draft. (Leviathan et al.
2023, arXiv 2211.17192, accept by a second random number; here draft and draw share one.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from composer_jax.sampler.sequence import Sequence as Row

LONGEST, SHORTEST = 4, 2
"""Tokens of the longest and of the shortest context's end that prompt lookup searches for."""
RETRY = 64
"""Calls after which drafts that did not pay are tried again."""
KEPT = 0.9
"""Weight of the past in running means."""


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


class Drafted(Protocol):
    """A request that is drafted for (sampler/request.py: RequestHandle)."""

    sequence: Row
    lookup: PromptLookup
    drafts: list[int]
    """Those of the MTP module, from the call before."""


class Verified(Protocol):
    """What a call sampled in one row (sampler/runner.py: NewTokens)."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def drafted(self) -> Sequence[int]: ...
    @property
    def accepted(self) -> Sequence[int]: ...


class Speculation:
    """Drafts for decode calls, where verifying them is faster than decoding step by step."""

    def __init__(self, kind: str, most: int) -> None:
        """kind: SamplerConfig.drafts. most: tokens of a draft."""
        self._kind, self._most = kind, most
        self._speeds: dict[int, _Speeds] = {}  # by the number of rows
        self._rows = 0
        self.drafted, self.accepted = [0] * most, [0] * most
        """Counts by the place of a token in its draft."""

    def draft(self, handles: Sequence[Drafted]) -> list[list[int]] | None:
        """Returns a draft for each row of a call; None if the call should decode step by step."""
        self._rows = len(handles)
        if not self._speeds.setdefault(self._rows, _Speeds()).should_verify():
            return None
        if self._kind == "mtp":
            return [h.drafts[: h.sequence.budget - 1] for h in handles]  # the call drafts more
        drafts = [h.lookup.draft(h.sequence.tokens, min(self._most, h.sequence.budget - 1)) for h in handles]
        return drafts if any(drafts) else None

    def note(self, is_verified: bool, sampled: Sequence[Verified], seconds: float) -> None:
        """Notes how long a call took, and what it sampled in each row.

        is_verified: whether the call had drafts, as `draft` returned them.
        """
        speeds, lengths = self._speeds[self._rows], [len(new.tokens) for new in sampled]
        if not is_verified:
            speeds.note_decode(seconds, max(lengths))
            return
        speeds.note_verify(seconds, sum(lengths) / len(lengths))
        for new in sampled:
            for place, (drafted, accepted) in enumerate(zip(new.drafted, new.accepted, strict=True)):
                self.drafted[place] += int(drafted)
                self.accepted[place] += int(accepted)


class _Speeds:
    """Running means for calls of one number of rows."""

    def __init__(self) -> None:
        self._step_seconds: float | None = None
        self._verify_seconds: float | None = None
        self._tokens_per_row = 0.0  # that a verifying call gives
        self._skipped = 0

    def should_verify(self) -> bool:
        """Whether drafts paid lately. While they do not, every RETRY-th call tries again."""
        if self._step_seconds is None:
            return False
        if self._verify_seconds is None or self._tokens_per_row * self._step_seconds >= self._verify_seconds:
            return True
        self._skipped += 1
        return self._skipped % RETRY == 0

    def note_decode(self, seconds: float, steps: int) -> None:
        self._step_seconds = _mean(self._step_seconds, seconds / steps)

    def note_verify(self, seconds: float, tokens_per_row: float) -> None:
        self._verify_seconds = _mean(self._verify_seconds, seconds)
        self._tokens_per_row = _mean(self._tokens_per_row or None, tokens_per_row)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else KEPT * old + (1 - KEPT) * new
