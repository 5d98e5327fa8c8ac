"""SamplingParams: how one request is sampled, for an engine, a server or a script."""

import dataclasses

from composer_jax.errors import UserError

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: float32 probabilities tell them from 0 no longer (vLLM has the same bound)."""

MOST_TOP_LOGPROBS = 20
"""As in OpenAI's API."""

HOTTEST = 1e6
"""Above it all tokens are equally likely in float32."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Parameters of one sampling request, named as in vLLM and OpenAI's API.

    The distribution is that of transformers: softmax(logits / temperature), cut to the `top_k` likeliest tokens, then
    to the likeliest tokens that together have the probability `top_p`, then to those of at least `min_p` times the
    probability of the likeliest one.

    Raises UserError for a number out of range, or an empty stop string.
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
    routing_start: int = 0
    """Tokens of the context whose experts the caller has already; those of later tokens come."""

    def __post_init__(self) -> None:
        if isinstance(self.stop_strings, str):
            raise UserError(f"stop_strings is the text {self.stop_strings!r}; give a tuple of texts.")
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        if self.max_tokens < 1:
            raise UserError(f"max_tokens={self.max_tokens} leaves nothing to sample; use 1 or more.")
        if not 0 <= self.temperature <= HOTTEST:
            raise UserError(f"temperature={self.temperature} is not a temperature; use 0 (greedy) to {HOTTEST:g}.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is not above 0 and at most 1; 1 keeps all tokens.")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p={self.min_p} is not between 0 and 1; 0 keeps all tokens.")
        if not 0 <= self.top_k < 2**31:
            reason = "negative" if self.top_k < 0 else "too large"
            raise UserError(f"top_k={self.top_k} is {reason}; 0 keeps all tokens.")
        if not 0 <= self.top_logprobs <= MOST_TOP_LOGPROBS:
            raise UserError(f"top_logprobs={self.top_logprobs} is not between 0 and {MOST_TOP_LOGPROBS}.")
        if self.routing_start < 0:
            raise UserError(f"routing_start={self.routing_start} is negative; 0 gives the experts of all tokens.")
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
