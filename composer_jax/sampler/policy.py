"""Policy: what an episode samples from. An engine, a server's client or a script implements it; no JAX here."""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import numpy as np

from composer_jax.data.chat.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled"]


TopLogprobs = dict[int, float]
"""Token id -> its log p at temperature 1, the likeliest first."""


@dataclasses.dataclass(frozen=True)
class PromptLogprobs:
    """What the network says about the tokens of a context. The first has no distribution: None and {}."""

    logprobs: list[float | None]
    """log p of each token at temperature 1."""
    top_logprobs: list[TopLogprobs]
    """The likeliest tokens in its place, as many as params.top_logprobs says."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sampled message."""

    tokens: list[int]
    """Token ids, including the end token if the model produced it."""
    logprobs: list[float]
    """log p of each token under the distribution that it was drawn from: after temperature, top_k and top_p (vLLM:
    processed logprobs). A greedy request has no such distribution; its tokens have log p at temperature 1."""
    versions: list[int]
    """Weight version that produced each token."""
    finish_reason: FinishReason
    """"stop": an end token, a stop id or a stop string; "length": max_tokens or the end of the context; "cancelled":
    the engine ended the request, as when it is paused."""
    raw_logprobs: list[float] | None = None
    """log p of each token at temperature 1, without top_p and the like (vLLM: raw logprobs); None where unknown."""
    cached: int = 0
    """Tokens of the context that were in the cache already."""
    top_logprobs: list[TopLogprobs] | None = None
    """For each token, the likeliest ones in its place; None unless params.top_logprobs asks for them."""
    prompt: PromptLogprobs | None = None
    """Of the context; None unless params.prompt_logprobs asks for it."""
    routing: np.ndarray | None = None
    """[tokens of the context and of the sample - 1 - routing_start, expert layers, experts per token]: the experts that
    each token chose, best first; uint8 where the network has at most 256 experts, else uint16. The last token has not
    been computed. None unless params.return_routing asks for it, and in cancelled samples."""
    routing_start: int = 0
    """The token of the context with which `routing` begins: params.routing_start, or an earlier one."""
    trained: bool = True
    """False for tokens that are context and never a target, such as a scripted expert's deliberate mistake."""


@dataclasses.dataclass(frozen=True)
class SampleChunk:
    """Part of a message that is streamed: what one decode call sampled. The fields are those of Sample."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason | None
    """None in all chunks but the last."""
    raw_logprobs: list[float]
    top_logprobs: list[TopLogprobs] | None = None


class Session(Protocol):
    """What one episode samples from. Every call has the whole context; what is remembered between calls is a cache."""

    max_model_len: int
    """Most tokens that a context can hold, the sampled ones included."""

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        """Samples a message that follows a context of at least one token.

        Sampling stops after an end token, after what `params` names as stops, or after params.max_tokens.

        branch: number of the context's branch in its episode. A draw is a function of the session's seed, the branch
        and the token's position, so that branches draw differently.
        """
        ...

    def close(self) -> None:
        """Releases the session's resources. A closed session refuses further calls."""
        ...


class Policy(Protocol):
    """Opens sessions: all that playing an episode needs."""

    async def open(self, seed: int) -> Session:
        """Returns a session.

        seed: uint32; fixes all random choices of the session.
        """
        ...


class ServingPolicy(Policy, Protocol):
    """A policy that is started and ended."""

    def serving(self) -> AbstractAsyncContextManager[object]:
        """A context manager; sessions can be opened and used inside it."""
        ...


class TrainablePolicy(ServingPolicy, Protocol):
    """A policy whose weights the learner replaces while it serves."""

    @property
    def busy_seconds(self) -> float:
        """Seconds spent computing since the policy was made; 0 where that is unknown."""
        ...

    async def open(self, seed: int, *, ahead: bool = False) -> Session:
        """See Policy.open.

        ahead: whether the session opens before all others that wait.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Forgets all that is cached, so that later tokens are computed as if nothing had been sampled before."""
        ...

    async def update_serving(
        self,
        params: Any,
        router_bias: Any,
        version: int,
        *,
        mode: Literal["recompute", "keep", "drain"],
        checksums: Any = None,
    ) -> None:
        """Installs weights (models/model_def.py: Params); tokens sampled afterwards carry `version`.

        checksums: WeightChecksums of that version, which the installed weights must have (Sampler.update_serving).
        """
        ...

    async def pause(self, *, will_resume: bool) -> None:
        """Stops computing until `resume`; returns when the devices are idle.

        will_resume: True if the caller resumes as soon as it has used the devices, so no stall is logged.
        """
        ...

    def resume(self) -> None:
        """Goes on after `pause`."""
        ...
