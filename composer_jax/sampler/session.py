"""What an agent sees of a sampler: a session that holds one context. Knows nothing of devices."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sampled message."""

    tokens: list[int]
    """Includes the closing <|end|> when the model produced it."""
    logprobs: list[float]
    """log p of each token under the policy that sampled it."""
    versions: list[int]
    """Weight version that produced each token."""
    stop: Literal["end", "length"]
    trained: bool = True
    """False for what is context only and never a target: a mistake that a scripted expert made on purpose."""


class Session(Protocol):
    """One context: what was appended and sampled since the last reset."""

    length: int
    """Tokens in the context now."""
    capacity: int
    """Most tokens that the context can hold."""

    async def sample(self, delta: Sequence[int], *, max_tokens: int) -> Sample:
        """Appends delta to the context, then samples until <|end|> or max_tokens; what is sampled is appended too."""

    def reset(self) -> None:
        """Empties the context: the next delta starts a new branch."""

    def close(self) -> None:
        """Gives the slot back. A closed session refuses further calls."""
