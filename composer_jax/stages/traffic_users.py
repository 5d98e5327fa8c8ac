"""TrafficUsers: the interface of simulated people who use the served model, and of what they do afterwards.

A config names them by import path (traffic.users); demo/users.py has some. stages/simulated_traffic.py plays their
sessions with a server of this process and sends their reactions as a client does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.sampler.policy import Sample
from composer_jax.serve.traffic.records import Consent, EventKind

if TYPE_CHECKING:  # the packages of the server are optional
    from composer_jax.stages.served_session import ServedSession


@dataclasses.dataclass(frozen=True)
class SessionOpening:
    """Who opens a session, as the headers of its requests say."""

    key: str
    """The API key of an organisation."""
    user: str
    repository: str
    consent: Consent
    place: float
    """When it opens: from 0, the beginning of its cycle's collection, to 1, the end."""


@dataclasses.dataclass(frozen=True)
class Reaction:
    """An event (serve/traffic/records.py) that a user's client sends."""

    id: str
    kind: EventKind
    turn: str
    """Id of the answer; empty for an event of the whole session."""
    time: float
    """Unix seconds of the simulated clock at which it happens."""
    arrival: float
    """At which the server gets it; not before `time`."""
    payload: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class PlayedSession:
    """What became of a session."""

    truth: Mapping[str, Any]
    """JSON values that nobody in production knows; `TrafficUsers.summarize` reads them."""
    reactions: Sequence[Reaction]


class SessionTime:
    """The simulated clock of one session.

    Attributes:
      now: Unix seconds. answered: when each answer ended.
    """

    def __init__(self, now: float) -> None:
        self.now, self.answered = now, list[float]()

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds

    def answer(self, seconds: float) -> None:
        """Lets the agent answer for some seconds."""
        self.advance(seconds)
        self.answered.append(self.now)


class TrafficUsers(Protocol):
    """Simulated people, constructed as kind(seed, **traffic.users_options).

    A session is a function of the seed, its cycle, its number and the weights that answer.
    """

    @property
    def shown(self) -> Sequence[str]:
        """The columns of `summarize` that the progress shows."""
        ...

    @property
    def organisations(self) -> Mapping[str, str]:
        """Name -> API key of each organisation."""
        ...

    def opening(self, cycle: int, number: int) -> SessionOpening:
        """Returns who opens a session. cycle: from 1. number: in the cycle, from 0."""
        ...

    def answer_seconds(self, sample: Sample) -> float:
        """Returns how long the user waits for an answer."""
        ...

    async def play(
        self, cycle: int, number: int, name: str, session: ServedSession, context: EpisodeContext, time: SessionTime
    ) -> PlayedSession:
        """Plays a session. name: its X-Session-ID."""
        ...

    def summarize(self, truths: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
        """Returns the measures of sessions, by their truths, as numbers for the columns of metrics/users.jsonl."""
        ...
