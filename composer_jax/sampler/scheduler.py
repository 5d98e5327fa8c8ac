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
from collections import Counter
from collections.abc import Iterable, Sequence

from composer_jax.sampler.prefix_tree import PagePool, PrefixNode, PrefixTree
from composer_jax.sampler.sequence import NO_PAGE, CacheLease, Limits, PrefillChunk, SchedulerOutput, SequenceState
from composer_jax.sampler.waiting_queue import WaitingQueue

WEIGHTS_READ = 256
"""Tokens whose products take about as long as reading the weights once does: what a prefill call costs beside its
tokens, padding included. Operations per byte of 16-bit weights: 240 on a TPU v5e, 295 on an H100."""


class Scheduler:
    """Decides what runs next. The engine submits and cancels, carries out schedules, and reports what they computed."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pools = [PagePool(limits.n_pages) for _ in range(limits.shards)]
        self.trees = [PrefixTree(pool, limits.page_size, limits.window) for pool in self.pools]
        self.waiting = WaitingQueue(limits.shards)
        self.running: list[SequenceState] = []
        """In the order of admission."""
        self.preemptions = 0
        self._leases: list[dict[int, CacheLease]] = [{} for _ in range(limits.shards)]
        """Idle ones with pages by id, of each shard, the longest idle first."""
        self._n_running = [0] * limits.shards
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
        lease.tail, lease.n_skipped = sequence.pages[sequence.first_own : n_pages], sequence.n_skipped
        self.pools[shard].give_back(sequence.pages[n_pages:])
        lease.used = True
        self._leases[shard][id(lease)] = lease
        sequence.forget_pages()

    def drop(self, lease: CacheLease) -> None:
        """Ends what a lease keeps; the lease can be used again."""
        if lease.prefix is not None:
            self.trees[lease.shard].release(lease.prefix, lease.n_skipped)
            self.pools[lease.shard].give_back(lease.tail)
            self._leases[lease.shard].pop(id(lease), None)
            lease.prefix, lease.tail, lease.tokens, lease.shard, lease.n_skipped = None, [], [], -1, 0

    # -- weights -------------------------------------------------------------------------------------------------

    def keep_running(self) -> None:
        """Hides what is cached from new requests. Running sequences and leases go on with their own pages."""
        for tree in self.trees:
            tree.start_epoch()

    def recompute(self) -> None:
        """Makes all contexts compute again: running sequences return to the queue, nothing cached is found any more."""
        self.keep_running()
        for leases in self._leases:
            for lease in list(leases.values()):
                self.drop(lease)
        for sequence in self.running[::-1]:
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

    # -- schedules -----------------------------------------------------------------------------------------------

    def schedule(self, *, admit: bool = True) -> SchedulerOutput:
        """Admits waiting sequences if told to, and returns the next device calls, none where outstanding ones must end.

        `start` follows before the next schedule.
        """
        if admit:
            self._admit()
        if not self._take_pages():  # first, because it may preempt
            return SchedulerOutput(None, [], [])
        decode = [s for s in self.running if s.is_decoding and self._n_ahead(s) < s.budget]
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
        for sequence in schedule.decode:
            sequence.n_calls += 1

    def commit_decode(self, sequence: SequenceState, tokens: list[int]) -> None:
        """Appends what the oldest outstanding decode call of a running sequence sampled."""
        assert sequence.n_calls > 0, "no call of the sequence is outstanding"
        sequence.n_calls -= 1
        sequence.tokens += tokens
        sequence.budget -= len(tokens)
        sequence.computed += len(tokens)

    def truncate(self, sequence: SequenceState, length: int) -> None:
        """Drops the sampled tokens after the first `length` tokens, which are at least those of the context."""
        sequence.budget += len(sequence.tokens) - length
        del sequence.tokens[length:]
        sequence.computed = min(sequence.computed, length - 1)

    # -- admission -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Starts requests that wait while there are rows and pages."""
        while min(self._n_running) < self.limits.rows:
            sequence = self.waiting.first()
            if sequence is None:
                if not self._move_one():
                    return
            # One whose prefix is being computed waits for it, and delays nobody.
            elif (running := self.awaits_prefix(sequence)) is not None:
                self.waiting.park(sequence, running)
            elif not self._admit_one(sequence):
                return

    def _admit_one(self, sequence: SequenceState) -> bool:
        for shard in self._shards_by_preference(sequence):
            if self._n_running[shard] < self.limits.rows and self._allocate(sequence, shard):
                self.waiting.remove(sequence)
                self.running.append(sequence)
                self._n_running[shard] += 1
                self.waiting.count_running(sequence.group, 1)
                if self._n_running[shard] == self.limits.rows:
                    self.waiting.close(shard)
                return True
        return False

    def _shards_by_preference(self, sequence: SequenceState) -> list[int]:
        """The shards, first the one that has the most of the context.

        A session comes to a shard where sessions fit and have a row each, or that has no more than the mean, and one
        that leaves its shard to the one with the fewest, so that all shards have about as many.
        """
        lease, shards, limits = sequence.lease, range(self.limits.shards), self.limits
        room = max(min(limits.fitting, limits.rows), sum(map(self._n_sessions, shards)) // len(shards) + 1)

        def cost(shard: int) -> tuple[bool, int, int, int, int]:
            n_sessions = 0 if lease is None else self._n_sessions(shard)
            crowded = n_sessions if lease is not None and lease.shard >= 0 else n_sessions // room
            cached = len(self.trees[shard].match(sequence.tokens).path())
            own = lease is not None and lease.shard == shard
            return not own, crowded, -cached, self._n_running[shard], -self._n_available(shard)

        return sorted(shards, key=cost)

    def _move_one(self) -> bool:
        """Lets a request leave a shard without a free row for one with fewer sessions, where nobody else wants the row.

        The session computes its context again there, and stays. False where no move makes the shards more even.
        """
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
        resumes = (
            sequence.uses_cache
            and lease is not None
            and lease.prefix is not None
            and lease.shard == shard
            and len(lease.tokens) < n
            and sequence.tokens[: len(lease.tokens)] == lease.tokens
        )
        if resumes:
            assert lease is not None and lease.prefix is not None
            prefix, tail, computed = lease.prefix, lease.tail, len(lease.tokens)
        else:
            prefix, tail = tree.match(sequence.tokens[: n - 1]) if sequence.uses_cache else tree.root, []
            computed = len(prefix.path()) * self.limits.page_size
        n_skipped, path = self.limits.n_skipped(computed), prefix.path()
        tree.hold(prefix, n_skipped)
        if lease is not None and not resumes and lease.shard == shard:
            self.drop(lease)  # before those of others
        pages = [NO_PAGE] * n_skipped + _pages_of(path[n_skipped:]) + tail
        missing = self._n_prefilling(n, computed) - len(pages)
        # Each that runs and may grow keeps a page for that, so that the newcomer is not preempted at once.
        if not self._make_room(shard, missing + self._n_growing(shard), keep=lease if resumes else None):
            tree.release(prefix, n_skipped)
            return False
        if lease is not None:
            lease.tail = [] if resumes else lease.tail
            self.drop(lease)
        sequence.pages = pages + self.pools[shard].take(missing)
        sequence.shard, sequence.prefix, sequence.computed = shard, prefix, computed
        sequence.n_shared, sequence.n_skipped = len(path), n_skipped
        sequence.cached = computed if sequence.cached is None else sequence.cached
        return True

    def has_pages(self, sequence: SequenceState, shard: int) -> bool:
        """Whether a shard has the pages that a waiting sequence starts with, if idle leases give way; for reports."""
        computed = len(self.trees[shard].match(sequence.tokens[:-1]).path()) * self.limits.page_size
        needed = self._n_prefilling(len(sequence.tokens), computed) - self.limits.pages_for(computed)
        idle = sum(len(lease.tail) for lease in self._leases[shard].values())
        return needed + self._n_growing(shard) <= self._n_available(shard) + idle

    def _n_growing(self, shard: int) -> int:
        """Running sequences of a shard that have fewer pages than they may come to need."""
        most = self.limits.most_pages
        return sum(
            s.shard == shard and len(s.pages) - s.n_skipped < most(len(s.tokens) + s.budget) for s in self.running
        )

    def awaits_prefix(self, sequence: SequenceState) -> SequenceState | None:
        """Returns a running request whose prefill is about to compute a page of this context that is not cached yet."""
        size = self.limits.page_size
        if not sequence.uses_cache or all(s.is_decoding for s in self.running):
            return None
        cached = max(len(tree.match(sequence.tokens).path()) for tree in self.trees) * size
        if sequence.lease is not None:
            cached = max(cached, len(sequence.lease.tokens))
        end = (cached // size + 1) * size
        if end > len(sequence.tokens) - 1:
            return None
        computing = (s for s in self.running if s.computed < end < len(s.tokens))
        return next((s for s in computing if s.tokens[:end] == sequence.tokens[:end]), None)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _choose_prefill(self) -> tuple[tuple[int, int] | None, list[PrefillChunk]]:
        """Returns the shape of the next prefill call and its chunks; (None, []) where no context is incomplete."""
        pending = sorted((s for s in self.running if not s.is_decoding), key=lambda s: (-s.priority, s.arrival))
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
        soon = sum(not s.is_decoding and s.n_missing <= longest and id(s) not in taken for s in self.running)
        return soon > decoding

    def _take_pages(self) -> bool:
        """Gives each running sequence the pages of its next call; those without are preempted.

        False: sessions or requests would give up pages while calls are outstanding, after which fewer may be needed.
        """
        has_outstanding_calls = any(s.n_calls for s in self.running)
        for s in sorted(self.running, key=lambda s: (-s.priority, s.arrival)):
            if s.shard < 0:
                continue  # preempted for the sake of one before it
            self._skip_pages(s)
            needed = self._n_needed(s) - len(s.pages)
            if has_outstanding_calls and needed > self._n_available(s.shard):
                return False
            while s.shard >= 0 and not self._make_room(s.shard, needed):
                candidates = (other for other in self.running if other.shard == s.shard)
                self._preempt(
                    max(candidates, key=lambda other: (-other.priority, other.arrival))
                )  # the last of the least important
            if s.shard >= 0 and needed > 0:
                s.pages += self.pools[s.shard].take(needed)
        return True

    def _n_ahead(self, s: SequenceState) -> int:
        """Tokens that the outstanding calls of a sequence sample at most."""
        return min(s.n_calls * self.limits.decode_steps, s.budget)

    def _n_needed(self, s: SequenceState) -> int:
        """Length of `pages` for the next call of a running sequence."""
        if s.is_decoding:
            return self.limits.pages_for(s.computed + min((s.n_calls + 1) * self.limits.decode_steps, s.budget))
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
            sequence.pages[first:end] = _pages_of(sequence.prefix.path()[first:])
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
        sequence.pages[first:end] = [NO_PAGE] * (end - first)
        sequence.n_skipped = end

    def _stop(self, sequence: SequenceState) -> None:
        self._publish(sequence)
        self._leave(sequence)
        assert sequence.prefix is not None
        self.trees[sequence.shard].release(sequence.prefix, sequence.n_skipped)
        self.pools[sequence.shard].give_back(sequence.pages[sequence.first_own :])
        sequence.forget_pages()

    def _leave(self, sequence: SequenceState) -> None:
        """Frees the decode slot of a running sequence."""
        self.running.remove(sequence)
        self._n_running[sequence.shard] -= 1
        self.waiting.count_running(sequence.group, -1)
        self.waiting.open(sequence.shard)
        self.waiting.unpark(sequence)


def _pages_of(nodes: Iterable[PrefixNode]) -> list[int]:
    pages = [node.page for node in nodes]
    assert None not in pages, "a page was reused that a sequence needs"
    return [page for page in pages if page is not None]
