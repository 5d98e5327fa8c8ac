"""ServedEpisode: the trainer's end of an episode that a worker plays: its sessions of the policy."""

import asyncio
import contextlib
import itertools
from array import array
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.policy import Policy, Sample, Session


@dataclass
class _ServedSession:
    session: Session
    shared: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """The tokens that the worker may leave out of its next context (remote_policy.py)."""


class ServedEpisode:
    """The sessions of one episode. `close` ends them all, whatever the worker does.

    Attributes:
      failure: a future of the exception with which the policy failed. It is not a failure of the episode or the worker.
    """

    def __init__(self, policy: Policy):
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._policy = policy
        self._numbers = itertools.count()
        self._sessions: dict[int, _ServedSession] = {}
        self._requests: set[asyncio.Task] = set()

    async def open(self, seed: int, **options: bool) -> tuple[int, int]:
        """Opens a session and returns its number and its max_model_len.

        options: of `open` of the policy, such as `ahead` of a TrainablePolicy.
        """
        with self._request():
            open_session: Callable[..., Awaitable[Session]] = self._policy.open
            session, number = await open_session(seed, **options), next(self._numbers)
            self._sessions[number] = _ServedSession(session)
            return number, session.max_model_len

    async def sample(self, number: int, start: int, tail: np.ndarray, params: SamplingParams, branch: int) -> Sample:
        """Samples after a context: the first `start` shared tokens, then int32 `tail`.

        Raises LookupError if there is no such session, or it shares fewer tokens. Errors of the policy are raised, too,
        and are the result of `failure`.
        """
        served = self._sessions[number]
        if not 0 <= start <= len(served.shared):
            raise LookupError(f"session {number} shares {len(served.shared)} tokens, not {start}")
        context = served.shared = np.concatenate([served.shared[:start], tail])
        with self._request():
            sample = await served.session.sample(array("i", context.tobytes()), params, branch=branch)
        if served.shared is context:
            served.shared = np.concatenate([context, np.asarray(sample.tokens, np.int32)])
        return sample

    def close_session(self, number: int) -> None:
        """Closes a session; does nothing if that has happened already."""
        if served := self._sessions.pop(number, None):
            served.session.close()

    async def close(self) -> None:
        """Cancels what is asked of the policy and closes all sessions."""
        requests = list(self._requests)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        for number in list(self._sessions):
            self.close_session(number)

    @contextlib.contextmanager
    def _request(self) -> Iterator[None]:
        """Remembers the current task, which asks the policy for something, and how the policy fails."""
        task = asyncio.current_task()
        assert task is not None, "handlers of a channel are tasks"
        self._requests.add(task)
        try:
            yield
        except Exception as error:
            if not self.failure.done():
                self.failure.set_result(error)
            raise
        finally:
            self._requests.discard(task)
