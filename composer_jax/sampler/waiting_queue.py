"""WaitingQueue: the requests that wait for a decode slot, in the order in which they get one. No JAX.

The order is: larger priority, group with fewer running requests, conversation that has begun already, earlier arrival.
A request whose session has pages on a shard waits in the lane of that shard (SequenceState.home), and the others in one
lane for all shards. Lanes of shards without a free row are closed, and nobody looks at them.

The first request and every change cost the logarithm of the number that wait. Heaps do this although the second
criterion changes as requests start and stop: every change of a group adds an entry to the heap of heads, and entries
that no longer hold are dropped when they come to the top, or together when they are as many as those that do.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator

from composer_jax.sampler.sequence import SequenceState

Entry = tuple[int, bool, int]
"""-priority, whether the conversation is new, arrival."""
SLACK = 64
"""Entries that no longer hold which are too few to be looked for."""


class WaitingQueue:
    """Waiting requests by their arrival numbers, which are unique."""

    def __init__(self, shards: int = 1) -> None:
        self._waiting: dict[int, SequenceState] = {}
        self._parked: dict[int, list[SequenceState]] = {}
        """By the arrival of the running request that they wait for; these are in no heap."""
        self._lanes: list[dict[Hashable, list[Entry]]] = [{} for _ in range(shards + 1)]
        """By shard, the last for all shards: group -> heap."""
        self._homes: dict[Hashable, dict[int, None]] = {}
        """Group -> the lanes that have it."""
        self._n_heaps = 0
        """Of all lanes."""
        self._is_open = [True] * (shards + 1)
        self._heads: list[tuple[int, int, bool, int]] = []
        """Heap of (-priority, running requests of the group, whether it is new, arrival) of the first of each group in
        each open lane, and of what was the first before."""
        self._n_dead = 0
        """At least the entries of `_lanes` that no longer hold."""
        self._running: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[SequenceState]:
        """Yields all that wait, in no particular order."""
        return iter(self._waiting.values())

    def add(self, sequence: SequenceState) -> None:
        """Queues a request in the lane of its home. One that was preempted keeps its arrival."""
        self._waiting[sequence.arrival] = sequence
        self._insert(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Takes a request out."""
        del self._waiting[sequence.arrival]
        heap = self._lanes[sequence.home].get(sequence.group)
        if heap and heap[0][-1] == sequence.arrival:
            self._pop(sequence)
            return
        self._n_dead += 1
        if self._n_dead > len(self._waiting) + SLACK:
            self._forget_dead()

    def first(self) -> SequenceState | None:
        """Returns the request that comes next, without those that are parked or in closed lanes."""
        while self._heads:
            _, n_running, _, arrival = self._heads[0]
            sequence = self._waiting.get(arrival)
            if sequence is not None and self._is_open[sequence.home] and n_running == self._running[sequence.group]:
                heap = self._lanes[sequence.home].get(sequence.group)
                if heap and heap[0][-1] == arrival:
                    return sequence
            heapq.heappop(self._heads)
        return None

    def count_running(self, group: Hashable, change: int) -> None:
        """Notes that a request of a group has started (1) or stopped (-1)."""
        self._running[group] += change
        if not self._running[group]:
            del self._running[group]
        for home in self._homes.get(group, ()):
            self._show_head(home, group)

    # -- requests that wait for another one ----------------------------------------------------------------------

    def park(self, sequence: SequenceState, running: SequenceState) -> None:
        """Leaves out the first request, whose prefix `running` computes, until `unpark` of it."""
        self._pop(sequence)
        self._parked.setdefault(running.arrival, []).append(sequence)

    def unpark(self, running: SequenceState) -> None:
        """Queues again what waited for a running request, which has computed more or has stopped."""
        for sequence in self._parked.pop(running.arrival, ()):
            if sequence.arrival in self._waiting:
                self._insert(sequence)

    # -- lanes ---------------------------------------------------------------------------------------------------

    def close(self, shard: int) -> None:
        """Notes that a shard has no free row."""
        self._is_open[shard] = False

    def open(self, shard: int) -> None:
        """Notes that a shard has a free row."""
        if not self._is_open[shard]:
            self._is_open[shard] = True
            for group in list(self._lanes[shard]):
                self._show_head(shard, group)

    def has_lane(self, shard: int) -> bool:
        """Whether a request waits in the lane of a shard and is not parked."""
        return bool(self._lanes[shard])

    def leave_lane(self, shard: int) -> None:
        """Lets the first request of a shard's lane run on any shard."""
        lane = self._lanes[shard]
        group = min(lane, key=lambda group: self._head(shard, group))
        sequence = self._waiting[lane[group][0][-1]]
        self._pop(sequence)
        sequence.home = -1
        self._insert(sequence)

    # -- heaps ---------------------------------------------------------------------------------------------------

    def _insert(self, sequence: SequenceState) -> None:
        lane, group = self._lanes[sequence.home], sequence.group
        if group not in lane:
            lane[group] = []
            self._homes.setdefault(group, {})[sequence.home % len(self._lanes)] = None
            self._n_heaps += 1
        heapq.heappush(lane[group], (-sequence.priority, sequence.is_new, sequence.arrival))
        self._show_head(sequence.home, sequence.group)

    def _pop(self, sequence: SequenceState) -> None:
        """Takes the first of its lane and group out of the heap, and those that have left behind it."""
        lane, group = self._lanes[sequence.home], sequence.group
        heapq.heappop(lane[group])
        while lane[group] and lane[group][0][-1] not in self._waiting:
            heapq.heappop(lane[group])
            self._n_dead -= 1
        if lane[group]:
            self._show_head(sequence.home, group)
        else:
            self._drop_heap(sequence.home, group)

    def _drop_heap(self, home: int, group: Hashable) -> None:
        del self._lanes[home][group]
        del self._homes[group][home % len(self._lanes)]
        if not self._homes[group]:
            del self._homes[group]
        self._n_heaps -= 1

    def _forget_dead(self) -> None:
        for home, lane in enumerate(self._lanes):
            for group, heap in list(lane.items()):
                heap[:] = [entry for entry in heap if entry[-1] in self._waiting]
                heapq.heapify(heap)
                if not heap:
                    self._drop_heap(home, group)
                elif self._is_open[home]:
                    heapq.heappush(self._heads, self._head(home, group))
        self._n_dead = 0

    def _show_head(self, home: int, group: Hashable) -> None:
        """Puts the first of a group in an open lane among the heads."""
        if not self._is_open[home]:
            return
        heapq.heappush(self._heads, self._head(home, group))
        if len(self._heads) > SLACK and len(self._heads) > 4 * self._n_heaps + SLACK:
            homes = (home for home, is_open in enumerate(self._is_open) if is_open)
            self._heads = [self._head(home, group) for home in homes for group in self._lanes[home]]
            heapq.heapify(self._heads)

    def _head(self, home: int, group: Hashable) -> tuple[int, int, bool, int]:
        priority, is_new, arrival = self._lanes[home][group][0]
        return priority, self._running[group], is_new, arrival
