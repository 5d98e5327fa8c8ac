"""WaitingQueue: the requests that wait for a decode slot, in the order in which they get one. No JAX.

The order is: larger priority, group with fewer running requests, conversation that has begun already, earlier arrival.
The first request and every change cost the logarithm of the number that wait. Heaps do this although the second
criterion changes as requests start and stop: every change of a group adds an entry to the heap of groups, and entries
that no longer hold are dropped when they come to the top.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator

from composer_jax.sampler.sequence import SequenceState


class WaitingQueue:
    """Waiting requests by their arrival numbers, which are unique."""

    def __init__(self) -> None:
        self._waiting: dict[int, SequenceState] = {}
        self._parked: dict[int, list[SequenceState]] = {}
        """By the arrival of the running request that they wait for; these are in no heap."""
        self._groups: dict[Hashable, list[tuple[int, bool, int]]] = {}
        """Group -> heap of (-priority, whether the conversation is new, arrival)."""
        self._heads: list[tuple[int, int, bool, int]] = []
        """Heap of (-priority, running requests of the group, whether it is new, arrival) of the first of each group,
        and of what was the first before."""
        self._running: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[SequenceState]:
        """Yields all that wait, in no particular order."""
        return iter(self._waiting.values())

    def add(self, sequence: SequenceState) -> None:
        """Queues a request. One that was preempted keeps its arrival."""
        self._waiting[sequence.arrival] = sequence
        self._insert(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Takes a request out."""
        del self._waiting[sequence.arrival]
        self._show_head(sequence.group)

    def first(self) -> SequenceState | None:
        """Returns the request that comes next, without those that are parked."""
        while self._heads:
            _, n_running, _, arrival = self._heads[0]
            sequence = self._waiting.get(arrival)
            if sequence is not None and n_running == self._running[sequence.group]:
                heap = self._groups.get(sequence.group)
                if heap and heap[0][-1] == arrival:
                    return sequence
            heapq.heappop(self._heads)
        return None

    def park(self, sequence: SequenceState, running: SequenceState) -> None:
        """Leaves out the first request, whose prefix `running` computes, until `unpark` of it."""
        heapq.heappop(self._groups[sequence.group])
        self._show_head(sequence.group)
        self._parked.setdefault(running.arrival, []).append(sequence)

    def unpark(self, running: SequenceState) -> None:
        """Queues again what waited for a running request, which has computed more or has stopped."""
        for sequence in self._parked.pop(running.arrival, ()):
            if sequence.arrival in self._waiting:
                self._insert(sequence)

    def count_running(self, group: Hashable, change: int) -> None:
        """Notes that a request of a group has started (1) or stopped (-1)."""
        self._running[group] += change
        if not self._running[group]:
            del self._running[group]
        self._show_head(group)

    def _insert(self, sequence: SequenceState) -> None:
        heap = self._groups.setdefault(sequence.group, [])
        heapq.heappush(heap, (-sequence.priority, sequence.is_new, sequence.arrival))
        self._show_head(sequence.group)

    def _show_head(self, group: Hashable) -> None:
        """Puts the first of a group among the heads, or forgets a group of which none waits in a heap."""
        if (heap := self._groups.get(group)) is None:
            return
        while heap and heap[0][-1] not in self._waiting:
            heapq.heappop(heap)
        if not heap:
            del self._groups[group]
            return
        heapq.heappush(self._heads, self._head(group))
        if len(self._heads) > 4 * len(self._groups) + 64:  # most are out of date
            self._heads = [self._head(name) for name in self._groups]
            heapq.heapify(self._heads)

    def _head(self, group: Hashable) -> tuple[int, int, bool, int]:
        priority, is_new, arrival = self._groups[group][0]
        return priority, self._running[group], is_new, arrival
