"""SessionGate: how many sessions of a Sampler are open at once. The memory of the cache decides, not the decode slots.

A session holds pages between its requests and a decode slot only while one of them runs. So more sessions than slots
can be open, and those whose tools run leave the slots to others.

A session opens while the open ones and it, at the tokens that a session needs, fill at most a share of the cache, and
while no more than this share is held: SOFT_LIMIT of it for most sessions, HARD_LIMIT for those that go ahead. What a
session needs is learned from those that have ended: the moving mean, over about as many sessions as there are slots, of
the tokens of their longest contexts. Before, as many sessions as slots may open. Sessions that fit into the cache
however long they grow always open. When the guess was too low, idle sessions give up pages and compute them again
(scheduler.py), so no session has to end.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from absl import logging

from composer_jax.sampler.sequence import Limits

SOFT_LIMIT, HARD_LIMIT = 0.8, 0.9
"""Shares of the cache (prime-rl stops new episodes at 80 % and cancels at 90 %, its pull request 3307)."""

T = TypeVar("T")


def most_sessions(share: float, cache: float, needed: float, fitting: int) -> int:
    """Returns how many sessions may be open at once.

    Args:
      share: of the cache that they fill.
      cache, needed: size of the cache, and what a session needs of it, in the same unit.
      fitting: sessions that fit into the cache at their longest.
    """
    return max(fitting, int(share * cache / needed + 1e-9))  # a quotient may be a rounding below a whole number


class SessionGate:
    """Counts the open sessions of one serving and lets others wait, the first that waits first."""

    def __init__(
        self,
        limits: Limits,
        max_model_len: int,
        held_pages: Callable[[], int],
        raise_if_ended: Callable[[], None],
    ) -> None:
        """
        Args:
          max_model_len: tokens of the longest context.
          held_pages: returns how many pages running requests and open sessions hold.
          raise_if_ended: raises what ended the serving.
        """
        self._limits, self._held_pages, self._raise_if_ended = limits, held_pages, raise_if_ended
        self._slots, self._pages = limits.rows * limits.shards, limits.n_pages * limits.shards
        self._n_fitting = limits.shards * (limits.n_pages // limits.most_pages(max_model_len))
        self._needed_pages = SOFT_LIMIT * self._pages / self._slots  # of one session
        self._waiting: tuple[deque[asyncio.Future[None]], ...] = deque(), deque()  # those that go ahead; the others
        self.n_open, self._n_ended, self._was_full = 0, 0, False

    async def open(self, make: Callable[[], T], *, ahead: bool) -> T:
        """Returns make() as soon as there is room for a session.

        ahead: opens before those that wait without it.
        """
        self._raise_if_ended()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[0 if ahead else 1].append(turn)
        self.admit()
        if not turn.done() and not self._was_full:
            self._was_full = True
            self._log()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self.admit()  # those behind it may have room
            elif turn.exception() is None:
                self.close(0)  # the caller had got its place
            raise
        return make()

    def close(self, tokens: int) -> None:
        """Makes room for another session.

        tokens: of the longest context of the session that closes; 0 where it sampled nothing.
        """
        self.n_open -= 1
        if tokens:
            self._needed_pages += (self._limits.most_pages(tokens) - self._needed_pages) / self._slots
            self._n_ended += 1
        self.admit()
        if tokens and self._n_ended == self._slots and any(self._waiting):
            self._log()

    def admit(self) -> None:
        """Opens sessions that wait while there is room; call it again when pages were freed."""
        for waiting, share in zip(self._waiting, (HARD_LIMIT, SOFT_LIMIT), strict=True):
            while waiting:
                if waiting[0].done():
                    waiting.popleft()  # cancelled
                elif self._has_room(share):
                    self.n_open += 1
                    waiting.popleft().set_result(None)
                else:
                    return

    def end(self, reason: Exception) -> None:
        """Raises what ended the serving in all that wait."""
        for waiting in self._waiting:
            while waiting:
                if not (turn := waiting.popleft()).done():
                    turn.set_exception(reason)

    def _log(self) -> None:
        needed, tokens = (round(pages * self._limits.page_size) for pages in (self._needed_pages, self._pages))
        logging.info(
            "Sessions wait: %d are open, and one needs about %d of the %d tokens of the cache (%s), which sessions "
            "fill to %.0f %%; a larger sampler.cache_tokens opens more.",
            self.n_open,
            needed,
            tokens,
            f"learned from {self._n_ended}" if self._n_ended else "a guess until sessions end",
            100 * SOFT_LIMIT,
        )

    def _has_room(self, share: float) -> bool:
        if self.n_open < self._n_fitting:
            return True
        most = most_sessions(share, self._pages, self._needed_pages, self._n_fitting)
        return self.n_open < most and self._held_pages() <= share * self._pages
