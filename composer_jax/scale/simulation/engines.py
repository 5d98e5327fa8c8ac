"""DecodePool: conversations that decode at once and share the engines evenly (processor sharing), exactly and fast.

All conversations get tokens at one rate, which depends on how many there are. So the tokens that one conversation would
have got since the beginning are a clock of their own, on which each conversation ends at a fixed time: when that clock
has advanced by its tokens. A change of the rate moves no end in the heap.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Any


class DecodePool:
    """The conversations that decode now.

    Attributes:
      running: how many there are.
      now: seconds; the pool's state is that of this time.
      sampled: tokens that all conversations have got.
    """

    def __init__(self, rates: Sequence[float]):
        """rates[n]: tokens per second of each of n conversations."""
        self._rates = rates
        self._clock, self._ends, self._entries = 0.0, [], 0
        self.running, self.now, self.sampled, self.is_paused = 0, 0.0, 0.0, False

    def advance(self, now: float) -> None:
        """Decodes until `now`; no conversation ends before."""
        if self.running and not self.is_paused:
            tokens = (now - self.now) * self._rates[self.running]
            self._clock += tokens
            self.sampled += tokens * self.running
        self.now = now

    def add(self, tokens: float, item: Any) -> None:
        """Starts a conversation that ends after `tokens` more tokens."""
        self._entries += 1
        heapq.heappush(self._ends, (self._clock + tokens, self._entries, item))
        self.running += 1

    def next_end(self) -> float:
        """Returns the time at which the next conversation ends if nothing changes; inf if none does.

        A conversation that was withdrawn still has an end.
        """
        if not self._ends or self.is_paused:
            return math.inf
        if not self.running:  # only withdrawn conversations are in the heap
            return self.now
        return self.now + max(0.0, self._ends[0][0] - self._clock) / self._rates[self.running]

    def pop(self) -> Any:
        """Returns the item of the next conversation; `end` or an earlier `withdraw` counts it as ended."""
        return heapq.heappop(self._ends)[2]

    def end(self) -> None:
        """Counts the conversation of the last `pop` as ended."""
        self.running -= 1

    def withdraw(self, conversations: int) -> None:
        """Takes conversations out before their end; the caller ignores their items when `pop` returns them."""
        self.running -= conversations
