"""TurnRequest and FinishedTurn: a request whose answers are written, and one of its answers, as the server has them."""

import dataclasses
from collections.abc import Sequence

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.policy import Sample
from composer_jax.serve.traffic.records import Consent, SessionRecord, TurnKind

BYTES_PER_TOKEN = 40
"""Of a Python list with its integers or floats."""

OwnedSession = tuple[str, str]
"""A session's id as one API key uses it, and the hash of that key: another key may send requests under the same id."""


@dataclasses.dataclass(frozen=True, eq=False)
class TurnRequest:
    """A request whose answers are written. Equal only to itself; it lives as long as an answer to it may be written."""

    record: SessionRecord
    consent: Consent
    kind: TurnKind
    answer: str
    tools: str
    """Fingerprint of the declared tools."""
    started: float
    """Seconds of time.perf_counter, or of the writer's clock where that is not time.time."""

    @property
    def owned_session(self) -> OwnedSession:
        """Its session and its key."""
        return self.record.session, self.record.owner


@dataclasses.dataclass(frozen=True)
class FinishedTurn:
    """An answer that has ended."""

    request: TurnRequest
    choice: int
    prompt: Sequence[int]
    sample: Sample
    """With the tokens that the user was sent, and the finish reason "cancelled" if they are not all."""
    params: SamplingParams
    seed: int
    time: float
    seconds: float

    @property
    def session(self) -> str:
        """X-Session-ID."""
        return self.request.record.session

    @property
    def nbytes(self) -> int:
        """About the bytes that it takes in memory."""
        routing = self.sample.routing
        tokens = len(self.prompt) + 4 * len(self.sample.tokens)
        return 1000 + BYTES_PER_TOKEN * tokens + (0 if routing is None else routing.nbytes)
