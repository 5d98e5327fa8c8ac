"""SessionGate: how many sessions of an engine are open at once. The memory of its cache decides, not the decode slots.

A session holds pages between its requests and a decode slot only while one of them runs. So more sessions than slots
can be open, and those whose tools run leave the slots to others.

A session opens while fewer are open than there are slots, or while the open ones and it need at most SOFT_LIMIT of the
cache (HARD_LIMIT where it goes ahead). A session needs the pages of its longest context so far, and at least what those
that have ended needed: their moving mean, over about as many as there are slots.

Where contexts grow beyond HARD_LIMIT of the cache all the same, and so do the pages in use (shared ones once), the
sessions that opened last are held back: their next requests wait until others have closed, or until nobody has asked
for anything for PATIENCE_S, so that nobody waits for ever. Their pages go to the others meanwhile, so the first
sessions need not give up theirs. As many as fit into the cache however long they grow never wait.
"""

import asyncio
import dataclasses
import math
from collections.abc import Callable

from absl import logging

from composer_jax.sampler.sequence import Limits

SOFT_LIMIT, HARD_LIMIT = 0.8, 0.9
"""Shares of the cache (prime-rl stops new episodes at 80 % and cancels at 90 %, its pull request 3307)."""
PATIENCE_S = 60.0
"""Seconds without any request after which a session that is held back goes on."""


@dataclasses.dataclass(eq=False)
class Place:
    """An open session, as the gate knows it."""

    ahead: bool
    needed: float
    """Pages that it will need, by what was known at its last request."""
    pages: int = 0
    """Of its longest context so far."""
    turn: asyncio.Future[None] | None = None
    """Of its request that waits because the session is held back."""
    give_up_pages: Callable[[], None] = lambda: None
    """Lets others have the pages that the session holds between its requests."""


class SessionGate:
    """The open sessions of an engine in one serving. Those that wait to open are in the SessionQueue of its sampler."""

    def __init__(
        self,
        limits: Limits,
        is_busy: Callable[[], bool],
        pages_in_use: Callable[[], int],
        *,
        only_fitting: bool = False,
    ) -> None:
        """
        Args:
          is_busy: whether a request runs or waits for a slot.
          pages_in_use: those of running requests and open sessions, shared ones once.
          only_fitting: opens no more sessions than there are slots, and none that may not fit into the cache.
        """
        self.on_change: Callable[[], object] = lambda: None
        """Called when there may be room for another session."""
        self._limits = limits
        self._is_busy, self._pages_in_use = is_busy, pages_in_use
        self._slots, self._pages = limits.rows * limits.shards, limits.n_pages * limits.shards
        self._n_fitting = limits.fitting * limits.shards
        self._most = min(self._slots, self._n_fitting) if only_fitting else math.inf
        self._need = SOFT_LIMIT * self._pages / self._slots  # pages of a session
        self._active: dict[Place, None] = {}
        """Open sessions that are not held back, in the order of their opening."""
        self._held_back: list[Place] = []
        """The last that opened, the first of them at the end."""
        self._demand, self._grown = 0.0, 0  # pages that the open ones need; pages of the active ones so far
        self._n_ended, self._n_notes, self._logged = 0, 0, set[str]()

    @property
    def n_open(self) -> int:
        """Open sessions."""
        return len(self._active) + len(self._held_back)

    def has_room(self, *, ahead: bool) -> bool:
        """Whether another session can open. ahead: it opens before those that wait without it."""
        if self.n_open >= self._most:
            return False
        if self.n_open < max(self._slots, self._n_fitting):
            return True  # also while others are held back, whose owner may need this one as well
        if self._held_back and not ahead:
            return False
        share = HARD_LIMIT if ahead else SOFT_LIMIT
        return self._demand + self._need <= share * self._pages + 1e-6  # sums of rounded means

    def open(self, *, ahead: bool) -> Place:
        """Returns the place of another session. ahead: it is never held back."""
        place = Place(ahead, self._need)
        self._active[place] = None
        self._demand += place.needed
        return place

    def close(self, place: Place) -> None:
        """Makes room for another session; learns what this one needed, if it asked for anything."""
        if place in self._active:
            del self._active[place]
            self._grown -= place.pages
        else:
            self._held_back.remove(place)
        self._demand = self._demand - place.needed if self.n_open else 0.0
        if place.turn is not None:
            place.turn.cancel()
        if place.pages:
            self._need += (place.pages - self._need) / self._slots
            self._n_ended += 1
        self._resume()
        self.on_change()

    def note(self, place: Place, tokens: int) -> None:
        """Notes the length of a context of an open session."""
        self._n_notes += 1
        pages = max(place.pages, self._limits.most_pages(tokens))
        grown, place.pages = pages - place.pages, pages
        needed = max(self._need, pages)
        self._demand += needed - place.needed
        place.needed = needed
        if place in self._active:
            self._grown += grown
            self._hold_back()
        else:
            place.give_up_pages()
        self.on_change()

    async def wait_for_turn(self, place: Place) -> None:
        """Returns when a request of an open session may run. A wait that another one of the session follows ends."""
        if place.turn is not None:
            place.turn.cancel()
        if place in self._active:
            return
        turn = place.turn = asyncio.get_running_loop().create_future()
        self._log_once("held back")
        try:
            while True:
                n_notes = self._n_notes
                await asyncio.wait([turn], timeout=PATIENCE_S)
                if turn.done():
                    return turn.result()
                if n_notes == self._n_notes and not self._is_busy():
                    return  # its request, which follows at once, lets the others wait on
        finally:
            if place.turn is turn:
                place.turn = None

    def end(self, reason: Exception) -> None:
        """Raises what ended the serving in the requests that wait."""
        for place in self._held_back:
            if place.turn is not None and not place.turn.done():
                place.turn.set_exception(reason)

    # -- who may run ---------------------------------------------------------------------------------------------

    def _n_used(self) -> int:
        """Pages of the active sessions, at most; what they share counts once where the scheduler has it."""
        return min(self._grown, self._pages_in_use())

    def _hold_back(self) -> None:
        most = HARD_LIMIT * self._pages
        if self._grown <= most:
            return  # without the look at all shards
        used = self._n_used()
        while used > most and len(self._active) > self._n_fitting:
            last = next((place for place in reversed(self._active) if not place.ahead), None)
            if last is None:
                return
            del self._active[last]
            self._grown -= last.pages
            used -= last.pages
            self._held_back.append(last)
            last.give_up_pages()

    def _resume(self) -> None:
        """Lets sessions that are held back go on while there is room."""
        if not self._held_back:
            return
        used, most = self._n_used(), HARD_LIMIT * self._pages
        while self._held_back and (len(self._active) < self._n_fitting or used + self._held_back[-1].pages <= most):
            place = self._held_back.pop()
            self._active[place] = None
            self._grown += place.pages
            used += place.pages
            if place.turn is not None and not place.turn.done():
                place.turn.set_result(None)

    # -- what is said --------------------------------------------------------------------------------------------

    def log_waiting(self, engines: int) -> None:
        """Says once that sessions wait to open and why, and once more when it is known what sessions need.

        engines: of the sampler, which are about as full.
        """
        where = "" if engines == 1 else f" on an engine, of {engines},"
        self._log_once("wait" if self._n_ended < self._slots else "learned", where)

    def _log_once(self, what: str, where: str = "") -> None:
        """Says why sessions wait: before and after it is known what they need, and when they are held back."""
        if what in self._logged or (what != "held back" and ("learned" in self._logged or self.n_open >= self._most)):
            return
        self._logged.add(what)
        need, tokens = (round(pages * self._limits.page_size) for pages in (self._need, self._pages))
        if what == "held back":
            logging.info(
                "Sessions wait: the contexts of %d open sessions have grown beyond %.0f %% of the %d tokens of the "
                "cache, so the last %d of them go on when others have closed; a larger sampler.cache_tokens lets more "
                "run.",
                self.n_open,
                100 * HARD_LIMIT,
                tokens,
                len(self._held_back),
            )
            return
        logging.info(
            "Sessions wait: %d are open%s and one needs about %d of the %d tokens of the cache (%s), which sessions "
            "fill to %.0f %%; a larger sampler.cache_tokens opens more.",
            self.n_open,
            where or ",",
            need,
            tokens,
            f"learned from {self._n_ended}" if self._n_ended else "a guess until sessions end",
            100 * SOFT_LIMIT,
        )
