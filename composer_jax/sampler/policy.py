"""Policy: what an episode samples from. An engine, a server's client or a script implements it; no JAX here."""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import numpy as np

from composer_jax.errors import UserError

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: float32 probabilities tell them from 0 no longer (vLLM has the same bound)."""

MOST_TOP_LOGPROBS = 20
"""As in OpenAI's API."""

HOTTEST = 1e6
"""Above it all tokens are equally likely in float32."""

FinishReason = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Parameters of one sampling request, named as in vLLM and OpenAI's API.

    The distribution is that of transformers: softmax(logits / temperature), cut to the `top_k` likeliest tokens, then
    to the likeliest tokens that together have the probability `top_p`, then to those of at least `min_p` times the
    probability of the likeliest one.

    Raises:
      UserError: a number out of range, or an empty stop string.
    """

    max_tokens: int
    """Most tokens to sample, the end token included."""
    temperature: float = 1.0
    """Divides the logits. 0 always takes the likeliest token (greedy), whatever top_p and top_k are."""
    top_p: float = 1.0
    """Keeps the smallest set of likeliest tokens whose probability, after temperature and top_k, is at least this."""
    top_k: int = 0
    """Number of likeliest tokens to sample from; tokens as likely as the last of them stay, too. 0 keeps all."""
    min_p: float = 0.0
    """Of the tokens that top_k and top_p keep, those with at least this fraction of the likeliest one's probability."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the message, besides the end tokens of the model. The message includes the id that ends it."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end the message. The message includes all of the token that completes the text."""
    top_logprobs: int = 0
    """Number of likeliest tokens, at every place of the message, whose log-probabilities the sample has."""
    prompt_logprobs: bool = False
    """Gives the log-probabilities of the context, too, with as many likeliest tokens. Nothing cached is used then."""
    return_routing: bool = False
    """Gives the experts that each token chose; needs a model with cache_routing."""

    def __post_init__(self) -> None:
        if isinstance(self.stop_strings, str):
            raise UserError(f"stop_strings is the text {self.stop_strings!r}; give a tuple of texts.")
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        if self.max_tokens < 1:
            raise UserError(f"max_tokens={self.max_tokens} leaves nothing to sample; use 1 or more.")
        if not 0 <= self.temperature <= HOTTEST:
            raise UserError(f"temperature={self.temperature} is no temperature; use 0 (greedy) to {HOTTEST:g}.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is not above 0 and at most 1; 1 keeps all tokens.")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p={self.min_p} is not between 0 and 1; 0 keeps all tokens.")
        if not 0 <= self.top_k < 2**31:
            reason = "negative" if self.top_k < 0 else "too large"
            raise UserError(f"top_k={self.top_k} is {reason}; 0 keeps all tokens.")
        if not 0 <= self.top_logprobs <= MOST_TOP_LOGPROBS:
            raise UserError(f"top_logprobs={self.top_logprobs} is not between 0 and {MOST_TOP_LOGPROBS}.")
        if not all(self.stop_strings):
            raise UserError("stop_strings has an empty text, which would end every message; leave it out.")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        return self.temperature < GREEDY_BELOW

    @property
    def unprocessed(self) -> bool:
        """Whether tokens come from the network's own distribution, as those of RL do, and nothing but them is asked."""
        own = self.temperature == 1 and self.top_p == 1 and self.top_k == 0 and self.min_p == 0
        return own and self.top_logprobs == 0


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
    """int16 [tokens of the context and of the sample - 1, expert layers, experts per token]: the experts that each
    token chose, best first. The last token has not been computed. None unless params.return_routing asks for it, and in
    cancelled samples."""
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

    capacity: int
    """Most tokens that a context can hold, the sampled ones included."""

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        """Samples a message that follows a context of at least one token.

        Sampling stops after an end token, after what `params` names as stops, or after params.max_tokens.

        Args:
          branch: number of the context's branch in its episode. A draw is a function of the session's seed, the branch
            and the token's position, so that branches draw differently.
        """
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
        """Returns a session.

        Args:
          seed: uint32; fixes all random choices of the session.
        """
        ...


class TrainablePolicy(Policy, Protocol):
    """A policy whose weights the learner replaces while it serves."""

    async def open(self, seed: int, *, ahead: bool = False) -> Session:
        """See Policy.open.

        ahead: whether the session opens before all others that wait for a slot.
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

        will_resume: True if the caller resumes as soon as it has used the devices, so that nobody need be warned.
        """
        ...

    def resume(self) -> None:
        """Goes on after `pause`."""
        ...
