"""Scheduler: which requests run, in which pages of the cache, and what the next device calls compute. No JAX.

A token is computed when its cache entries are in its sequence's pages. Prefill computes all tokens of a context but the
last, in chunks. Each decode step then computes the last token and samples the next one. So a conversation's next turn
prefills exactly the tokens that its context gained since. Between two calls the pages survive and, for a call that
starts before the host has read the one before it, the last token of every row (CarriedRows in decode.py).

A sequence's pages are, in order, those that the prefix tree owns (shared) and its own. Its full pages go to the tree as
soon as the prefill call that computes them has started, and when the sequence ends.

The next calls can be scheduled while others are outstanding: started, with tokens that the host has not read. Prefill
counts as computed when it is started, because calls run in the order of their starts. Of decode calls, a sequence knows
how many are outstanding (SequenceState.n_calls); its tokens, and what follows from them, are those before these calls.
One whose outstanding calls may exhaust its budget takes no further call. No request gives up its pages to another one
while calls are outstanding: what they sample would be lost.
A sequence that has ended leaves at once: calls that start later write into its pages after those that are outstanding.

Where every layer has a sliding window, a sequence gives up the pages before it and takes those of its next call, so it
holds a bounded number of pages at any length. A page holds the entries of all layers: where one layer attends to the
whole context, no page can be given up, and a sequence gets the pages of its whole context when it starts.
"""

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from composer_jax.sampler.prefix_index import IndexNode, PrefixIndex
from composer_jax.sampler.prefix_tree import PagePool, PrefixNode, PrefixTree
from composer_jax.sampler.sequence import (
    NO_PAGE,
    CacheLease,
    Limits,
    PrefillChunk,
    SchedulerOutput,
    SequenceState,
    token_array,
)
from composer_jax.sampler.waiting_queue import WaitingQueue

WEIGHTS_READ = 256
"""Tokens whose products take about as long as reading the weights once does: what a prefill call costs beside its
tokens, padding included. Operations per byte of 16-bit weights: 240 on a TPU v5e, 295 on an H100."""


class Scheduler:
    """Decides what runs next. The engine submits and cancels, carries out schedules, and reports what they computed."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self._steps = limits, limits.decode_steps
        self.pools = [PagePool(limits.n_pages) for _ in range(limits.shards)]
        self._index: PrefixIndex[SequenceState] = PrefixIndex(limits.page_size, limits.window)
        self.trees = [PrefixTree(pool, self._index, shard) for shard, pool in enumerate(self.pools)]
        self.waiting = WaitingQueue(limits.shards)
        self.running: dict[SequenceState, None] = {}
        """In the order of admission."""
        self.preemptions = 0
        self._leases: list[dict[int, CacheLease]] = [{} for _ in range(limits.shards)]
        """Idle ones with pages by id, of each shard, the longest idle first."""
        self._n_leases = 0
        """Of all shards."""
        self._n_running = [0] * limits.shards
        self._n_full = 0
        """Shards without a free row."""
        self._n_growing = [0] * limits.shards
        """Running sequences of each shard that have fewer pages than they may come to need."""
        self._prefilling: dict[SequenceState, None] = {}
        """Running sequences whose contexts are incomplete, in the order of admission."""
        self._arrivals = itertools.count()

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, sequence: SequenceState) -> None:
        """Queues a sequence of at least one token; the cache fits it and its budget."""
        assert sequence.tokens and sequence.budget > 0, "a sequence needs a token and a budget"
        most = self.limits.most_pages(len(sequence.tokens) + sequence.budget)
        assert most <= self.limits.n_pages, "the sequence is longer than the cache"
        sequence.arrival = next(self._arrivals)
        self._wait(sequence)

    def cancel(self, sequence: SequenceState) -> None:
        """Forgets a sequence and frees what only it uses."""
        if sequence.shard < 0:
            self.waiting.remove(sequence)
        else:
            self._stop(sequence)

    def finish(self, sequence: SequenceState) -> None:
        """Ends a running sequence. Its lease keeps its pages."""
        lease, shard, tokens = sequence.lease, sequence.shard, sequence.tokens[: sequence.computed]
        if lease is None:
            self._stop(sequence)
            return
        self._publish(sequence)
        self._skip_pages(sequence)
        self._leave(sequence)
        self.drop(lease)
        n_pages = self.limits.pages_for(sequence.computed)
        lease.shard, lease.tokens, lease.prefix = shard, tokens, sequence.prefix
        lease.pages, lease.n_skipped = sequence.pages[:n_pages], sequence.n_skipped
        self.pools[shard].give_back(sequence.pages[n_pages:])
        lease.used = True
        self._leases[shard][id(lease)] = lease
        self._n_leases += 1
        sequence.forget_pages()

    def drop(self, lease: CacheLease) -> None:
        """Ends what a lease keeps; the lease can be used again."""
        if lease.prefix is not None:
            self.trees[lease.shard].release(lease.prefix, lease.n_skipped)
            self.pools[lease.shard].give_back(lease.tail)
            self._clear(lease)

    def _clear(self, lease: CacheLease) -> None:
        """Forgets what a lease keeps, which somebody else holds or nobody any more."""
        del self._leases[lease.shard][id(lease)]
        self._n_leases -= 1
        lease.prefix, lease.pages, lease.tokens, lease.shard, lease.n_skipped = None, [], token_array(), -1, 0

    # -- weights -------------------------------------------------------------------------------------------------

    def keep_running(self) -> None:
        """Hides what is cached from new requests. Running sequences and leases go on with their own pages."""
        self._index.start_epoch()
        for tree in self.trees:
            tree.start_epoch()

    def recompute(self) -> None:
        """Makes all contexts compute again: running sequences return to the queue, nothing cached is found any more."""
        self.keep_running()
        for leases in self._leases:
            for lease in list(leases.values()):
                self.drop(lease)
        for sequence in list(self.running)[::-1]:
            self._preempt(sequence)

    # -- numbers -------------------------------------------------------------------------------------------------

    @property
    def n_held_pages(self) -> int:
        """Pages of running sequences and leases, shared ones once."""
        return sum(
            pool.n_pages - pool.n_free - tree.n_reclaimable for pool, tree in zip(self.pools, self.trees, strict=True)
        )

    @property
    def n_live_tokens(self) -> int:
        """Tokens of running sequences and leases, those in shared pages once."""
        size = self.limits.page_size
        private = sum(min(len(s.tokens), len(s.pages) * size) - s.first_own * size for s in self.running)
        private_pages = sum(len(s.pages) - s.first_own for s in self.running)
        for lease in itertools.chain.from_iterable(leases.values() for leases in self._leases):
            private += len(lease.tokens) - (self.limits.pages_for(len(lease.tokens)) - len(lease.tail)) * size
            private_pages += len(lease.tail)
        return private + (self.n_held_pages - private_pages) * size

    def n_cached(self, tokens: "array[int]") -> int:
        """Returns how many tokens of a context are cached, on the shard that has most of them."""
        return max(self._index.n_pages(self._index.path(tokens)).values(), default=0) * self.limits.page_size

    # -- schedules -----------------------------------------------------------------------------------------------

    def schedule(self, *, admit: bool = True) -> SchedulerOutput:
        """Admits waiting sequences if told to, and returns the next device calls, none where outstanding ones must end.

        `start` follows before the next schedule.
        """
        if admit:
            self._admit()
        if not self._take_pages():  # first, because it may preempt
            return SchedulerOutput(None, [], [])
        decode = [s for s in self.running if self._n_ahead(s) < s.budget and s.is_decoding]
        shape, chunks = self._choose_prefill()
        return SchedulerOutput(shape, chunks, [] if self._should_fill(chunks, len(decode)) else decode)

    def start(self, schedule: SchedulerOutput) -> None:
        """Notes that the calls of a schedule have started; what they prefill is shared from now on, in full pages."""
        for chunk in schedule.prefill:
            sequence = chunk.sequence
            assert sequence.computed == chunk.start, "a chunk was started out of order"
            sequence.computed += chunk.count
            self._publish(sequence)
            self.waiting.unpark(sequence)
            if sequence.is_decoding:
                self._end_prefill(sequence)
        for sequence in schedule.decode:
            sequence.n_calls += 1

    def commit_decode(self, sequence: SequenceState, tokens: list[int]) -> None:
        """Appends what the oldest outstanding decode call of a running sequence sampled."""
        assert sequence.n_calls > 0, "no call of the sequence is outstanding"
        sequence.n_calls -= 1
        sequence.tokens.extend(tokens)
        sequence.budget -= len(tokens)
        sequence.computed += len(tokens)

    def truncate(self, sequence: SequenceState, length: int) -> None:
        """Drops the sampled tokens after the first `length` tokens, which are at least those of the context."""
        sequence.budget += len(sequence.tokens) - length
        del sequence.tokens[length:]
        sequence.computed = min(sequence.computed, length - 1)

    # -- admission -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Starts requests that wait while there are rows and pages.

        One walk over a request's context says what every shard has of it; the rest of the time is that of `min` over
        the shards' counters, and a request that goes on where its session is does without.
        """
        while self._n_full < self.limits.shards:
            sequence = self.waiting.first()
            if sequence is None:
                if not self._move_one():
                    return
                continue
            path = self._path(sequence)
            cached = self._index.n_pages(path)
            # One whose prefix is being computed waits for it, and delays nobody.
            if (running := self._find_computing(sequence, path, cached)) is not None:
                self.waiting.park(sequence, running)
            elif not self._admit_one(sequence, cached):
                return

    def _admit_one(self, sequence: SequenceState, cached: Mapping[int, int]) -> bool:
        """cached: pages of the context on the shards that have any."""
        for shard in self._shards_by_preference(sequence, cached):
            if self._allocate(sequence, shard):
                self.waiting.remove(sequence)
                self._run(sequence)
                return True
        return False

    def _run(self, sequence: SequenceState) -> None:
        """Gives a decode slot to a sequence that has its pages."""
        shard = sequence.shard
        self.running[sequence] = None
        self._n_running[shard] += 1
        self.waiting.count_running(sequence.group, 1)
        if self._n_running[shard] == self.limits.rows:
            self.waiting.close(shard)
            self._n_full += 1
        self._note_growth(sequence)
        if not sequence.is_decoding:
            self._prefilling[sequence] = None
            assert sequence.prefix is not None
            if self.trees[shard].is_current(sequence.prefix):  # else nobody will find what it computes
                ahead = sequence.tokens[sequence.n_shared * self.limits.page_size : -1]
                self._index.add_computing(sequence, sequence.prefix.entry, ahead)

    def _end_prefill(self, sequence: SequenceState) -> None:
        """Notes that a running sequence has no token to prefill, or runs no more."""
        if sequence in self._prefilling:
            del self._prefilling[sequence]
            self._index.remove_computing(sequence)

    def _shards_by_preference(self, sequence: SequenceState, cached: Mapping[int, int]) -> Iterator[int]:
        """Yields the shards with a free row, first the one that has the most of the context.

        A session comes to a shard where sessions fit and have a row each, or that has no more than the mean, and one
        that leaves its shard to the one with the fewest, so that all shards have about as many.
        """
        lease, limits, rows = sequence.lease, self.limits, self.limits.rows
        own = -1 if lease is None else lease.shard
        if own >= 0 and self._n_running[own] < rows:
            yield own
        n_sessions = self._n_leases + len(self.running)
        room = max(min(limits.fitting, rows), n_sessions // limits.shards + 1)

        def cost(shard: int) -> tuple[int, int, int, int]:
            n_sessions = 0 if lease is None else self._n_sessions(shard)
            crowded = n_sessions if own >= 0 else n_sessions // room
            return crowded, -cached.get(shard, 0), self._n_running[shard], -self._n_available(shard)

        others = [shard for shard, n in enumerate(self._n_running) if n < rows and shard != own]
        if others:
            best = min(others, key=cost)
            yield best
            yield from sorted((shard for shard in others if shard != best), key=cost)

    def _move_one(self) -> bool:
        """Lets a request leave a shard without a free row for one with fewer sessions, where nobody else wants the row.

        The session computes its context again there, and stays. False where no move makes the shards more even.
        """
        if not self.waiting:
            return False
        shards, rows = range(self.limits.shards), self.limits.rows
        fewest = min(self._n_sessions(shard) for shard in shards if self._n_running[shard] < rows)
        full = [shard for shard in shards if self._n_running[shard] == rows and self.waiting.has_lane(shard)]
        crowded = max(full, key=self._n_sessions, default=None)
        if crowded is None or self._n_sessions(crowded) < fewest + 2:
            return False
        self.waiting.leave_lane(crowded)
        return True

    def _n_sessions(self, shard: int) -> int:
        """Sessions with pages on a shard, and requests without a session that run there."""
        return len(self._leases[shard]) + self._n_running[shard]

    def _wait(self, sequence: SequenceState) -> None:
        """Queues a request."""
        sequence.home = -1 if sequence.lease is None else sequence.lease.shard
        self.waiting.add(sequence)

    def _allocate(self, sequence: SequenceState, shard: int) -> bool:
        """Gives a waiting sequence what is cached of its context and pages for the rest, if there are enough."""
        tree, lease = self.trees[shard], sequence.lease
        n = len(sequence.tokens)
        resumes = sequence.uses_cache and lease is not None and lease.shard == shard and lease.is_prefix_of(sequence)
        if resumes:
            assert lease is not None and lease.prefix is not None
            prefix, pages, computed, n_skipped = lease.prefix, lease.pages, len(lease.tokens), lease.n_skipped
        else:
            prefix = tree.match(sequence.tokens[: n - 1]) if sequence.uses_cache else tree.root
            computed = prefix.depth * self.limits.page_size
            n_skipped = self.limits.n_skipped(computed)
            tree.hold(prefix, n_skipped)
            if lease is not None and lease.shard == shard:
                self.drop(lease)  # before those of others
            pages = [NO_PAGE] * n_skipped + _pages_of(prefix.path()[n_skipped:])
        missing = self._n_prefilling(n, computed) - len(pages)
        # Each that runs and may grow keeps a page for that, so that the newcomer is not preempted at once.
        if not self._make_room(shard, missing + self._n_growing[shard], keep=lease if resumes else None):
            if not resumes:
                tree.release(prefix, n_skipped)
            return False
        if resumes:
            assert lease is not None
            self._clear(lease)
        elif lease is not None:
            self.drop(lease)
        sequence.pages = pages + self.pools[shard].take(missing)
        sequence.shard, sequence.prefix, sequence.computed = shard, prefix, computed
        sequence.n_shared, sequence.n_skipped = prefix.depth, n_skipped
        sequence.cached = computed if sequence.cached is None else sequence.cached
        return True

    def has_pages(self, sequence: SequenceState, shard: int) -> bool:
        """Whether a shard has the pages that a waiting sequence starts with, if idle leases give way; for reports."""
        computed = self.trees[shard].match(sequence.tokens[:-1]).depth * self.limits.page_size
        needed = self._n_prefilling(len(sequence.tokens), computed) - self.limits.pages_for(computed)
        idle = sum(len(lease.tail) for lease in self._leases[shard].values())
        return needed + self._n_growing[shard] <= self._n_available(shard) + idle

    def _note_growth(self, sequence: SequenceState) -> None:
        """Counts a sequence whose pages have changed among those of its shard that may come to need more."""
        most = self.limits.most_pages(len(sequence.tokens) + sequence.budget)
        may_grow = len(sequence.pages) - sequence.n_skipped < most
        self._n_growing[sequence.shard] += may_grow - sequence.may_grow
        sequence.may_grow = may_grow

    def awaits_prefix(self, sequence: SequenceState) -> SequenceState | None:
        """Returns a running request whose prefill is about to compute a page of this context that is not cached yet."""
        path = self._path(sequence)
        return self._find_computing(sequence, path, self._index.n_pages(path))

    def _path(self, sequence: SequenceState) -> list[IndexNode[SequenceState]]:
        """The path of a waiting sequence's context in the index, without a walk over what its session has."""
        lease, known = sequence.lease, None
        if lease is not None and lease.is_prefix_of(sequence):
            assert lease.prefix is not None
            known = lease.prefix.entry if self.trees[lease.shard].is_current(lease.prefix) else None
        return self._index.path(sequence.tokens, known)

    def _find_computing(
        self, sequence: SequenceState, path: Sequence[IndexNode[SequenceState]], cached: Mapping[int, int]
    ) -> SequenceState | None:
        """path, cached: of the context, from the index."""
        if not sequence.uses_cache:
            return None
        size, n_pages = self.limits.page_size, max(cached.values(), default=0)
        if sequence.lease is not None:
            n_pages = max(n_pages, len(sequence.lease.tokens) // size)
        end = (n_pages + 1) * size
        if end > len(sequence.tokens) - 1 or n_pages >= len(path):
            return None
        return next((s for s in path[n_pages].computing if s.computed < end), None)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _choose_prefill(self) -> tuple[tuple[int, int] | None, list[PrefillChunk]]:
        """Returns the shape of the next prefill call and its chunks; (None, []) where no context is incomplete."""
        pending = sorted(self._prefilling, key=lambda s: (-s.priority, s.arrival))
        if not pending:
            return None, []
        filled = [(shape, self._fill(shape, pending)) for shape in self.limits.prefill_shapes]

        def speed(call: tuple[tuple[int, int], list[PrefillChunk]]) -> tuple[float, int]:
            # Of calls that are equally fast, the one with the longest rows: every row reads its context once.
            (rows, length), chunks = call
            return sum(chunk.count for chunk in chunks) / (rows * length + WEIGHTS_READ), length

        return max(filled, key=speed)

    def _fill(self, shape: tuple[int, int], pending: Sequence[SequenceState]) -> list[PrefillChunk]:
        """Returns the chunks of a call: first one row for each sequence, then further rows for those that lack more.

        The rows of one sequence follow each other in its context. A layer writes the entries of all rows before it
        reads any, so a row attends to those before it in the same call. With a sliding window a sequence has one row,
        because its pages reach no further.
        """
        rows, length = shape
        taken: Counter[int] = Counter()
        chunks: list[PrefillChunk] = []
        starts = {id(s): s.computed for s in pending}
        while pending:
            open_ = [s for s in pending if taken[s.shard] < rows]
            for s in open_:
                start = starts[id(s)]
                if taken[s.shard] < rows and (missing := s.computed + s.n_missing - start):
                    taken[s.shard] += 1
                    chunks.append(PrefillChunk(s, start, min(length, missing)))
                    starts[id(s)] += chunks[-1].count
            has_more = self.limits.window is None
            pending = [s for s in open_ if has_more and starts[id(s)] < s.computed + s.n_missing]
        return chunks

    def _should_fill(self, chunks: list[PrefillChunk], decoding: int) -> bool:
        """Whether decoding waits for one more prefill call, so that it has more rows.

        It does while more sequences than decode lack a single chunk after this call. Long prompts do not count: they
        delay nobody by more than a chunk.
        """
        taken = {id(chunk.sequence) for chunk in chunks}
        longest = self.limits.prefill_shapes[-1][1]
        soon = sum(s.n_missing <= longest and id(s) not in taken for s in self._prefilling)
        return soon > decoding

    def _take_pages(self) -> bool:
        """Gives each running sequence the pages of its next call; those without are preempted.

        False: sessions or requests would give up pages while calls are outstanding, after which fewer may be needed.
        """
        has_outstanding_calls = any(s.n_calls for s in self.running)
        if self.limits.window is not None:
            for s in self.running:
                self._skip_pages(s)
        lacking = [s for s in self.running if self._n_needed(s) > len(s.pages)]
        for s in sorted(lacking, key=lambda s: (-s.priority, s.arrival)):
            if s.shard < 0:
                continue  # preempted for the sake of one before it
            needed = self._n_needed(s) - len(s.pages)
            if has_outstanding_calls and needed > self._n_available(s.shard):
                return False
            while s.shard >= 0 and not self._make_room(s.shard, needed):
                candidates = (other for other in self.running if other.shard == s.shard)
                self._preempt(
                    max(candidates, key=lambda other: (-other.priority, other.arrival))
                )  # the last of the least important
            if s.shard >= 0:
                s.pages += self.pools[s.shard].take(needed)
                self._note_growth(s)
        return True

    def _n_ahead(self, s: SequenceState) -> int:
        """Tokens that the outstanding calls of a sequence sample at most."""
        return min(s.n_calls * self._steps, s.budget)

    def _n_needed(self, s: SequenceState) -> int:
        """Length of `pages` for the next call of a running sequence."""
        if s.is_decoding:
            return self.limits.pages_for(s.computed + min((s.n_calls + 1) * self._steps, s.budget))
        return self._n_prefilling(len(s.tokens), s.computed)

    def _n_prefilling(self, n_tokens: int, computed: int) -> int:
        """Length of `pages` while a context of n_tokens is prefilled; any chunk after `computed` tokens fits."""
        n_skipped = self.limits.n_skipped(computed)
        return min(self.limits.pages_for(n_tokens), n_skipped + self.limits.most_pages(n_tokens))

    def _preempt(self, sequence: SequenceState) -> None:
        """Returns a running sequence to the queue. It keeps what it sampled, and what it computed stays cached."""
        self._stop(sequence)
        self._wait(sequence)
        self.preemptions += 1

    # -- pages ---------------------------------------------------------------------------------------------------

    def _n_available(self, shard: int) -> int:
        return self.pools[shard].n_free + self.trees[shard].n_reclaimable

    def _make_room(self, shard: int, n: int, keep: CacheLease | None = None) -> bool:
        """Frees cached contexts, then idle leases but `keep`, until n pages are free; False if that is not enough."""
        pool, tree = self.pools[shard], self.trees[shard]
        while n > self._n_available(shard):
            lease = next((lease for lease in self._leases[shard].values() if lease is not keep), None)
            if lease is None:
                return False
            self.drop(lease)
        tree.reclaim(max(0, n - pool.n_free))
        return True

    def _publish(self, sequence: SequenceState) -> None:
        """Hands the full computed pages to the tree."""
        assert sequence.prefix is not None
        tree, size = self.trees[sequence.shard], self.limits.page_size
        first, end = sequence.n_shared, sequence.computed // size
        if first < end and tree.is_current(sequence.prefix):
            tokens, pages = sequence.tokens[first * size : end * size], sequence.pages[first:end]
            sequence.prefix = tree.insert(sequence.prefix, tokens, pages)
            if (shared := _pages_of(sequence.prefix.last(end - first))) != pages:
                sequence.pages = [*sequence.pages[:first], *shared, *sequence.pages[end:]]
            sequence.n_shared = end

    def _skip_pages(self, sequence: SequenceState) -> None:
        """Ends the hold of pages that the sliding window has left."""
        first, end = sequence.n_skipped, self.limits.n_skipped(sequence.computed)
        if first >= end:
            return
        self._publish(sequence)  # then the tree has the pages, and keeps them until they are needed
        assert sequence.prefix is not None
        self.trees[sequence.shard].release(sequence.prefix, first, end)
        self.pools[sequence.shard].give_back(sequence.pages[max(first, sequence.n_shared) : end])
        sequence.pages = [*[NO_PAGE] * end, *sequence.pages[end:]]
        sequence.n_skipped = end
        self._note_growth(sequence)

    def _stop(self, sequence: SequenceState) -> None:
        self._publish(sequence)
        self._leave(sequence)
        assert sequence.prefix is not None
        self.trees[sequence.shard].release(sequence.prefix, sequence.n_skipped)
        self.pools[sequence.shard].give_back(sequence.pages[sequence.first_own :])
        sequence.forget_pages()

    def _leave(self, sequence: SequenceState) -> None:
        """Frees the decode slot of a running sequence."""
        shard = sequence.shard
        del self.running[sequence]
        self._end_prefill(sequence)
        self._n_growing[shard] -= sequence.may_grow
        sequence.may_grow = False
        self._n_full -= self._n_running[shard] == self.limits.rows
        self._n_running[shard] -= 1
        self.waiting.count_running(sequence.group, -1)
        self.waiting.open(shard)
        self.waiting.unpark(sequence)


def _pages_of(nodes: Iterable[PrefixNode]) -> list[int]:
    pages = [node.page for node in nodes]
    assert None not in pages, "a page was reused that a sequence needs"
    return [page for page in pages if page is not None]
