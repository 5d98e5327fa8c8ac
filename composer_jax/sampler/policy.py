"""Policy: what an episode samples from. An engine, a server's client or a script implements it; no JAX here."""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Parameters of one sampling request."""

    max_tokens: int
    """Most tokens to sample, the end token included."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sampled message."""

    tokens: list[int]
    """Token ids, including the end token if the model produced it."""
    logprobs: list[float]
    """log p of each token under the policy that sampled it."""
    versions: list[int]
    """Weight version that produced each token."""
    finish_reason: Literal["stop", "length"]
    trained: bool = True
    """False for tokens that are context and never a target, such as a scripted expert's deliberate mistake."""


class Session(Protocol):
    """One context: the tokens appended and sampled since the last reset."""

    length: int
    """Tokens in the context."""
    capacity: int
    """Most tokens that the context can hold."""

    async def sample(self, delta: Sequence[int], params: SamplingParams) -> Sample:
        """Appends `delta` to the context, samples a message and appends that too.

        Sampling stops after the end token or after params.max_tokens.
        """
        ...

    def reset(self) -> None:
        """Empties the context: the next delta starts a new branch."""
        ...

    def close(self) -> None:
        """Releases the session's resources. A closed session refuses further calls."""
        ...


class Policy(Protocol):
    """Opens sessions while it serves, and counts its work."""

    @property
    def busy_seconds(self) -> float:
        """Seconds spent computing since the policy was made; 0 where that is unknown."""
        ...

    @property
    def decoded_tokens(self) -> int:
        """Tokens sampled since the policy was made."""
        ...

    def serving(self) -> AbstractAsyncContextManager[object]:
        """A context manager; sessions can be opened and used inside it."""
        ...

    async def open(self, seed: int) -> Session:
        """Returns a session with an empty context, after waiting for a free slot where slots are limited.

        Args:
          seed: uint32; fixes all random choices of the session.
        """
        ...


class TrainablePolicy(Policy, Protocol):
    """A policy whose weights the learner replaces."""

    def update(self, params: Any, router_bias: Any, version: int) -> None:
        """Installs weights (models/model_def.py: Params); tokens sampled afterwards carry `version`."""
        ...
