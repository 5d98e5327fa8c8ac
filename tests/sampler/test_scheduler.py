"""Random requests through the scheduler, with a cache of tokens instead of attention's entries: no page is lost or read
with another context's tokens, and every request ends. With a sliding window, no read leaves it.

Calls take effect in the order of their starts. What they sample is committed later, as the engine does: with one call
outstanding the next one starts, which may go on with a request that has ended."""

import dataclasses
import itertools
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from composer_jax.sampler.prefix_tree import PrefixNode
from composer_jax.sampler.scheduler import Scheduler
from composer_jax.sampler.sequence import CacheLease, Limits, SchedulerOutput, SequenceState
from tests.many import many

PAGE = 4
LIMITS = Limits(PAGE, n_pages=10, shards=2, rows=3, prefill_shapes=((3, 2), (2, 6)), decode_steps=3)
WINDOW = dataclasses.replace(LIMITS, window=6, prefill_shapes=((3, 2), (2, 3)), most_ahead=1)
"""A context of any length holds 4 of the 10 pages at most: those of its window and of two decode calls."""


class FakeCache:
    """What a device would hold: for every page and offset the whole context that led there."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.entries: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self.ends: dict[SequenceState, tuple[list[int], int]] = {}
        """Contexts and budgets after the last decode call, of its sequences."""

    def write(self, s: SequenceState, tokens: list[int], position: int) -> None:
        """Computes one token of a context, which reads those before it in the window."""
        for earlier in range(0 if self.window is None else max(0, position - self.window + 1), position):
            page = s.shard, s.pages[earlier // PAGE], earlier % PAGE
            assert self.entries[page] == tuple(tokens[: earlier + 1]), "a page has another context's entries"
        self.entries[s.shard, s.pages[position // PAGE], position % PAGE] = tuple(tokens[: position + 1])

    def decode(self, s: SequenceState, sample, end: int | None) -> list[int]:
        """Samples in a call, up to its end token if that is the token of number `end`."""
        tokens, budget = self.ends[s] if s.n_calls else (list(s.tokens), s.budget)
        steps, n = min(LIMITS.decode_steps, budget), len(tokens)
        assert steps > 0 or s.n_calls, "a call has a row that ended before"
        for _ in range(steps if end is None else min(end, steps)):
            self.write(s, tokens, len(tokens) - 1)
            tokens = [*tokens, sample()]
        self.ends[s] = tokens, budget - steps if end is None else 0
        return tokens[n:]


@dataclasses.dataclass
class Row:
    """A row of a decode call that has started."""

    sequence: SequenceState
    tokens: list[int]
    kept: int | None
    """Tokens up to where the message ends; None: it goes on."""


def start(scheduler: Scheduler, cache: FakeCache, schedule: SchedulerOutput, sample, stops) -> list[Row]:
    """Starts a schedule.

    sample: () -> token. stops: () -> (how many tokens a row keeps if it ends in this call, else None; whether the
    device knows that it ends).
    """
    counts: dict[tuple[int, str], int] = {}
    for chunk in schedule.prefill:
        rows, length = schedule.prefill_shape
        key = chunk.sequence.shard, "prefill"
        counts[key] = counts.get(key, 0) + 1
        assert 0 < chunk.count <= length and counts[key] <= rows
        for position in range(chunk.start, chunk.start + chunk.count):
            cache.write(chunk.sequence, chunk.sequence.tokens, position)
    rows = []
    for s in schedule.decode:
        assert sum(other.shard == s.shard for other in schedule.decode) <= LIMITS.rows
        kept, is_known = stops()
        tokens = cache.decode(s, sample, kept if is_known else None)
        rows.append(Row(s, tokens, kept if kept is None else min(kept, len(tokens))))
    cache.ends = {s: cache.ends[s] for s in schedule.decode}
    scheduler.start(schedule)
    return rows


def commit(scheduler: Scheduler, rows: list[Row]) -> list[SequenceState]:
    """Commits what a call sampled; returns the sequences that ended, which nobody runs any more."""
    ended = []
    for row in rows:
        s, length = row.sequence, len(row.sequence.tokens)
        if s.shard < 0:
            continue  # it ended in the call before, or was cancelled
        scheduler.commit_decode(s, row.tokens)
        if row.kept is not None:
            scheduler.truncate(s, length + row.kept)
        if row.kept is not None or not s.budget:
            scheduler.finish(s)
            ended.append(s)
    return ended


def goes_on() -> tuple[int | None, bool]:
    return None, False


def run(scheduler: Scheduler, cache: FakeCache) -> list[SequenceState]:
    """Carries out the next schedule at once; returns the sequences that ended."""
    return commit(scheduler, start(scheduler, cache, scheduler.schedule(), lambda: 1, goes_on))


def fits(limits: Limits, n_tokens: int) -> bool:
    """Whether the cache has the pages that a sequence of this many tokens holds at once."""
    return limits.most_pages(n_tokens) <= limits.n_pages


def check_pages(scheduler: Scheduler) -> None:
    """Asserts that every page has exactly one owner, and every hold a holder."""
    for shard, (pool, tree) in enumerate(zip(scheduler.pools, scheduler.trees, strict=True)):
        running = [s for s in scheduler.running if s.shard == shard]
        leases = list(scheduler._leases[shard].values())
        private = [page for s in running for page in s.pages[s.first_own :]]
        private += [page for lease in leases for page in lease.tail]
        holders = [node for h in (*running, *leases) if h.prefix for node in h.prefix.path()[h.n_skipped :]]
        holds = Counter(id(node) for node in holders)
        nodes = {id(n): n for n in (*holders, *descendants(tree.root))}
        assert all(n.held == holds[id(n)] for n in nodes.values()), f"shard {shard} miscounts the holders of a page"
        assert all(n.page is not None or n.children for n in nodes.values()), f"shard {shard} has an empty leaf"
        owned = private + [n.page for n in nodes.values() if n.page is not None]
        assert len(owned) == len(set(owned)), f"a page of shard {shard} has two owners"
        assert len(owned) + pool.n_free == pool.n_pages, f"shard {shard} lost pages"
        assert len(owned) - len(private) - len(holds) == tree.n_reclaimable, (
            f"shard {shard} miscounts the pages that nobody holds"
        )


def descendants(root: PrefixNode) -> Iterator[PrefixNode]:
    for child in root.children.values():
        yield child
        yield from descendants(child)


def preferred_shards(scheduler: Scheduler, s: SequenceState, matched: list[int]) -> list[int]:
    """The shards with a free row in their order, from a scan of all of them."""
    limits, shards = scheduler.limits, range(scheduler.limits.shards)
    n_sessions = [len(scheduler._leases[n]) + sum(s.shard == n for s in scheduler.running) for n in shards]
    room = max(min(limits.fitting, limits.rows), sum(n_sessions) // limits.shards + 1)

    def cost(shard):
        n = 0 if s.lease is None else n_sessions[shard]
        crowded = n if s.lease is not None and s.lease.shard >= 0 else n // room
        own = s.lease is not None and s.lease.shard == shard
        available = scheduler.pools[shard].n_free + scheduler.trees[shard].n_reclaimable
        return not own, crowded, -matched[shard], scheduler._n_running[shard], -available

    return [shard for shard in sorted(shards, key=cost) if scheduler._n_running[shard] < limits.rows]


def computing_request(scheduler: Scheduler, s: SequenceState, n_cached: int) -> SequenceState | None:
    """The first running request that computes the next page of a waiting one, where others will find it."""
    end = (max(n_cached, len(s.lease.tokens) // PAGE if s.lease else 0) + 1) * PAGE
    if not s.uses_cache or end > len(s.tokens) - 1:
        return None
    shared = (r for r in scheduler.running if scheduler.trees[r.shard].is_current(r.prefix))
    return next((r for r in shared if r.computed < end < len(r.tokens) and r.tokens[:end] == s.tokens[:end]), None)


class Requests(RuleBasedStateMachine):
    leases = Bundle("leases")
    limits = LIMITS

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[Row]] = []
        self.open: list[SequenceState] = []
        self.turns: dict[CacheLease, array[int]] = {}
        self.numbers = itertools.count()

    @initialize(most_ahead=st.integers(0, 1))
    def start_serving(self, most_ahead):
        self.limits = dataclasses.replace(self.limits, most_ahead=most_ahead)
        self.scheduler, self.cache = Scheduler(self.limits), FakeCache(self.limits.window)

    @rule(target=leases)
    def open_lease(self):
        return CacheLease()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        budget=st.integers(1, 12),
        priority=st.integers(0, 1),
    )
    def submit(self, prompt, budget, priority):
        self.add(SequenceState(prompt, budget, priority, group=prompt[0]))

    @rule(lease=leases, delta=st.lists(st.integers(0, 1), min_size=1, max_size=7), budget=st.integers(1, 5))
    def next_turn(self, lease, delta, budget):
        if all(s.lease is not lease for s in self.open):
            context = [*self.turns.get(lease, []), *delta]
            context = context if fits(self.limits, len(context) + budget) else delta
            self.add(SequenceState(context, budget, lease=lease))

    def add(self, sequence):
        self.scheduler.submit(sequence)
        self.open.append(sequence)

    @rule(lease=consumes(leases))
    def close_lease(self, lease):
        if all(s.lease is not lease for s in self.open):
            self.scheduler.drop(lease)

    @rule(data=st.data(), steps=st.integers(1, 4))
    def step(self, data, steps):
        def stops():
            if data.draw(st.integers(0, 4)):
                return goes_on()
            return data.draw(st.integers(1, LIMITS.decode_steps)), data.draw(st.booleans())

        for _ in range(steps):
            self.run_once(lambda: data.draw(st.integers(0, 1)), stops)

    def run_once(self, sample, stops=goes_on):
        """Starts the next calls, or commits the oldest if none can start."""
        is_full = len(self.calls) > self.limits.most_ahead
        if not is_full and (schedule := self.scheduler.schedule()):
            self.calls.append(start(self.scheduler, self.cache, schedule, sample, stops))
        elif self.calls:
            self.finish_call()

    @precondition(lambda self: self.calls)
    @rule()
    def finish_call(self):
        for s in commit(self.scheduler, self.calls.pop(0)):
            self.open.remove(s)
            if s.lease:
                self.turns[s.lease] = s.tokens

    def finish_calls(self):
        while self.calls:
            self.finish_call()

    @rule(data=st.data())
    def cancel(self, data):
        if self.open:
            sequence = data.draw(st.sampled_from(self.open))
            self.scheduler.cancel(sequence)
            self.open.remove(sequence)

    @rule()
    def replace_weights(self):
        self.finish_calls()
        self.scheduler.recompute()
        self.cache.entries.clear()

    @rule()
    def keep_running(self):
        self.finish_calls()
        self.scheduler.keep_running()

    @invariant()
    def every_page_has_one_owner(self):
        check_pages(self.scheduler)

    @invariant()
    def the_tree_has_the_entries_of_its_prefixes(self):
        for shard, tree in enumerate(self.scheduler.trees):
            for node in descendants(tree.root):
                prefix = tuple(array("i", b"".join(parent.key for parent in node.path())))
                for offset in range(PAGE if node.page is not None else 0):
                    entry = self.cache.entries[shard, node.page, offset]
                    assert entry == prefix[: len(prefix) - PAGE + offset + 1]

    @invariant()
    def the_running_are_counted(self):
        counts = Counter(s.shard for s in self.scheduler.running)
        assert self.scheduler._n_running == [counts[shard] for shard in range(self.limits.shards)]

    @invariant()
    def counters_say_what_a_scan_of_all_shards_and_requests_finds(self):
        scheduler, most = self.scheduler, self.limits.most_pages
        for s in scheduler.waiting:
            path = scheduler._index.path(s.tokens)
            cached = scheduler._index.n_pages(path)
            matched = [len(tree.match(s.tokens).path()) for tree in scheduler.trees]
            assert [cached.get(shard, 0) for shard in range(self.limits.shards)] == matched
            assert list(scheduler._shards_by_preference(s, cached)) == preferred_shards(scheduler, s, matched)
            assert scheduler.awaits_prefix(s) is computing_request(scheduler, s, max(matched))
        growing = [s.shard for s in scheduler.running if len(s.pages) - s.n_skipped < most(len(s.tokens) + s.budget)]
        assert scheduler._n_growing == [growing.count(shard) for shard in range(self.limits.shards)]
        assert scheduler._n_leases == sum(map(len, scheduler._leases))
        assert scheduler._n_full == scheduler._n_running.count(self.limits.rows)
        assert list(scheduler._prefilling) == [s for s in scheduler.running if not s.is_decoding]

    @invariant()
    def a_sequence_holds_no_more_pages_than_it_needs_at_once(self):
        for s in self.scheduler.running:
            assert len(s.pages) - s.n_skipped <= self.limits.most_pages(len(s.tokens) + s.budget)
        assert 0 <= self.scheduler.n_live_tokens <= self.scheduler.n_held_pages * PAGE

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(800):
            if not self.open and not self.calls:
                break
            self.run_once(lambda: next(self.numbers) % 2)
            check_pages(self.scheduler)
        assert not self.open and not self.scheduler.waiting and not self.scheduler.running
        for lease in self.turns:
            self.scheduler.drop(lease)
        self.scheduler.recompute()
        assert all(pool.n_free == pool.n_pages for pool in self.scheduler.pools)


class WindowedRequests(Requests):
    """Contexts are often longer than the cache."""

    limits = WINDOW

    @rule(turns=st.integers(2, 6))
    def long_conversation(self, turns):
        lease = CacheLease()
        for _ in range(turns):
            self.next_turn(lease, [0, 1, 1, 0, 1, 0, 0], 5)
            self.run_once(lambda: next(self.numbers) % 2)

    @rule(budget=st.integers(30, 60))
    def long_message(self, budget):
        self.add(SequenceState([1, 0, 1], budget))


SETTINGS = settings(max_examples=many(200), stateful_step_count=40, deadline=None)
Requests.TestCase.settings = WindowedRequests.TestCase.settings = SETTINGS
TestRequests, TestWindowedRequests = Requests.TestCase, WindowedRequests.TestCase


def run_alone(scheduler: Scheduler, cache: FakeCache, sequence: SequenceState) -> int:
    """Runs a sequence to its end; returns the most pages that it held."""
    scheduler.submit(sequence)
    most = 0
    while not run(scheduler, cache):
        check_pages(scheduler)
        most = max(most, scheduler.n_held_pages)
    return most


def test_a_context_longer_than_the_cache_runs_in_the_pages_of_its_window():
    scheduler, cache = Scheduler(WINDOW), FakeCache(WINDOW.window)
    prompt = [n % 5 for n in range(200)]
    assert len(prompt) + 100 > WINDOW.n_pages * PAGE
    assert run_alone(scheduler, cache, SequenceState(prompt, 100)) <= WINDOW.most_pages(300) == 4
    assert not fits(LIMITS, 300)


def test_a_prefix_is_found_by_the_pages_of_its_last_window():
    """The first pages of a prefix were reused, those in the window were not."""
    scheduler, cache = Scheduler(dataclasses.replace(WINDOW, shards=1)), FakeCache(WINDOW.window)
    prompt = [n % 5 for n in range(36)]
    run_alone(scheduler, cache, SequenceState(list(prompt), 3))
    run_alone(scheduler, cache, SequenceState([6] * 12, 1))
    assert scheduler.trees[0].root.children[array("i", prompt[:PAGE]).tobytes()].page is None
    again = SequenceState(list(prompt), 1)
    run_alone(scheduler, cache, again)
    assert again.cached == 32, "all full pages before the last token"


def test_a_lease_keeps_the_pages_of_its_window():
    scheduler, cache, lease = Scheduler(WINDOW), FakeCache(WINDOW.window), CacheLease()
    first = SequenceState(list(range(30)), 3, lease=lease)
    run_alone(scheduler, cache, first)
    assert scheduler.n_held_pages == 2 and first.computed == 0 and lease.tokens == first.tokens[:-1]
    again = SequenceState([*first.tokens, 1, 2, 3], 3, lease=lease)
    run_alone(scheduler, cache, again)
    assert again.cached == 32


def test_a_lease_keeps_its_window_where_a_stop_is_found_behind_the_next_call():
    """The tokens that the call sampled after the stop would have left a page that the lease still needs."""
    limits = dataclasses.replace(WINDOW, shards=1)
    scheduler, cache, lease = Scheduler(limits), FakeCache(limits.window), CacheLease()
    first = SequenceState([n % 5 for n in range(31)], 9, lease=lease)
    scheduler.submit(first)
    while not first.is_decoding:
        run(scheduler, cache)
    assert limits.n_skipped(first.computed) < limits.n_skipped(first.computed + limits.decode_steps)
    calls = [start(scheduler, cache, scheduler.schedule(), lambda: 1, lambda: (1, False)) for _ in range(2)]
    assert [len(rows) for rows in calls] == [1, 1] and [commit(scheduler, rows) for rows in calls] == [[first], []]
    check_pages(scheduler)
    run_alone(scheduler, cache, SequenceState([6] * 60, 3))  # reuses all pages that nobody holds
    again = SequenceState([*first.tokens, 2, 3], 3, lease=lease)
    run_alone(scheduler, cache, again)
    assert again.cached == 31


def test_calls_that_are_outstanding_end_before_a_request_gives_up_its_pages():
    limits = dataclasses.replace(LIMITS, shards=1, most_ahead=1)
    scheduler = Scheduler(limits)
    for number in range(2):
        scheduler.submit(SequenceState([number] * 15, 12))
    while not all(s.is_decoding for s in scheduler.running) or len(scheduler.running) < 2:
        scheduler.start(scheduler.schedule())
    calls = []
    while schedule := scheduler.schedule():
        calls.append(schedule)
        scheduler.start(schedule)
        assert len(calls) < 9
    assert len(calls) > 1 and scheduler.preemptions == 0, "calls are outstanding"
    for s in list(scheduler.running):
        for _ in calls:
            scheduler.commit_decode(s, [1] * limits.decode_steps)
    assert scheduler.schedule() and scheduler.preemptions == 1


def test_the_session_that_is_idle_longest_gives_up_its_pages_and_not_the_one_that_goes_on():
    scheduler, cache = Scheduler(dataclasses.replace(LIMITS, shards=1)), FakeCache(None)
    leases = [CacheLease() for _ in range(3)]
    firsts = [SequenceState([n] * 9, 2, lease=lease) for n, lease in enumerate(leases)]
    for first in firsts:
        run_alone(scheduler, cache, first)
    assert scheduler.n_held_pages == 9  # of 10
    run_alone(scheduler, cache, SequenceState([*firsts[0].tokens, *[0] * 10], 2, lease=leases[0]))
    assert [len(lease.tokens) for lease in leases] == [22, 0, 10]
    run_alone(scheduler, cache, SequenceState([7] * 12, 2))
    assert [len(lease.tokens) for lease in leases] == [22, 0, 0]


def fitting_sessions(n: int) -> tuple[Scheduler, FakeCache, list[CacheLease]]:
    """So many idle sessions with 30 tokens, all in 8 pages of their own, and no other page."""
    limits = Limits(PAGE, n_pages=8 * n, shards=1, rows=n, prefill_shapes=((n, 32),), decode_steps=4, fitting=n)
    scheduler, cache, leases = Scheduler(limits), FakeCache(None), [CacheLease() for _ in range(n)]
    for number, lease in enumerate(leases):
        run_alone(scheduler, cache, SequenceState([number] * 28, 3, lease=lease))
    assert [len(lease.tokens) for lease in leases] == [30] * n and scheduler.n_held_pages == limits.n_pages
    return scheduler, cache, leases


def test_sessions_that_fit_keep_their_pages_whoever_runs_at_once():
    """Contexts in their last page leave none for others to grow, and need none."""
    scheduler, _, leases = fitting_sessions(4)
    for lease in leases[:3]:
        scheduler.submit(SequenceState([*lease.tokens, 5], 1, lease=lease))
        scheduler.schedule()
    assert [s.cached for s in scheduler.running] == [30] * 3 and len(leases[3].tokens) == 30


def test_a_session_that_starts_another_context_gives_up_its_own_pages_before_those_of_others():
    scheduler, _, leases = fitting_sessions(2)
    scheduler.submit(SequenceState([7] * 28, 4, lease=leases[1]))
    scheduler.schedule()
    assert [len(lease.tokens) for lease in leases] == [30, 0] and len(scheduler.running) == 1


def test_conversations_that_have_begun_get_slots_before_new_ones():
    scheduler, cache = Scheduler(dataclasses.replace(LIMITS, shards=1, rows=1)), FakeCache(None)
    old = CacheLease()
    first = SequenceState([1, 2], 1, lease=old)
    run_alone(scheduler, cache, first)
    new, begun = SequenceState([3], 1, lease=CacheLease()), SequenceState([*first.tokens, 4], 1, lease=old)
    alone = SequenceState([5], 1)
    for sequence in (new, begun, alone):
        scheduler.submit(sequence)
    ended = []
    while len(ended) < 3:
        ended += run(scheduler, cache)
    assert ended == [begun, alone, new]


# -- sessions and shards ---------------------------------------------------------------------------------------------


def spread_sessions(n: int) -> tuple[Scheduler, list[tuple[CacheLease, SequenceState]]]:
    """A scheduler of two shards with three rows each, and so many idle sessions with their last requests."""
    scheduler, sessions = Scheduler(dataclasses.replace(LIMITS, n_pages=40)), []
    for number in range(n):
        sessions.append((CacheLease(), SequenceState([number] * 5, 1)))
        lease, request = sessions[-1]
        request.lease = lease
        run_alone(scheduler, FakeCache(None), request)
    return scheduler, sessions


def ask_again(scheduler: Scheduler, sessions, shard: int) -> list[SequenceState]:
    """The next requests of all sessions of a shard."""
    again = [SequenceState([*s.tokens, 7], 3, lease=lease) for lease, s in sessions if lease.shard == shard]
    for request in again:
        scheduler.submit(request)
    scheduler.schedule()
    return again


def test_a_session_waits_for_a_row_of_its_shard_where_the_others_have_as_many_sessions():
    scheduler, sessions = spread_sessions(8)
    assert Counter(lease.shard for lease, _ in sessions) == {0: 4, 1: 4}
    again = ask_again(scheduler, sessions, shard=0)
    assert [s.shard for s in again] == [0, 0, 0, -1] and again[3].computed == 0
    scheduler.cancel(again[0])
    scheduler.schedule()
    assert again[3].shard == 0 and again[3].cached == 5


def test_a_session_moves_to_a_shard_with_a_free_row_and_fewer_sessions_if_nobody_else_wants_the_row():
    scheduler, sessions = spread_sessions(8)
    there = [(lease, s) for lease, s in sessions if lease.shard == 1]
    for lease, _ in there[:3]:
        scheduler.drop(lease)
    again = ask_again(scheduler, sessions, shard=0)
    assert [s.shard for s in again] == [0, 0, 0, 1] and again[3].computed == 0
    assert [scheduler._n_sessions(shard) for shard in (0, 1)] == [3, 2]


def test_new_sessions_go_where_sessions_fit_even_if_another_shard_has_their_prompt():
    scheduler, cache = Scheduler(dataclasses.replace(LIMITS, n_pages=40, fitting=2)), FakeCache(None)
    leases = [CacheLease() for _ in range(5)]
    for lease in leases:
        run_alone(scheduler, cache, SequenceState([1] * 9, 1, lease=lease))
    assert [lease.shard for lease in leases] == [0, 0, 1, 1, 0], "two fit into each shard, then the mean decides"


def test_new_sessions_come_to_a_shard_no_more_than_have_rows_there():
    """However many fit: else one of them would move where all ask at once, and only then."""
    scheduler, cache = Scheduler(dataclasses.replace(LIMITS, n_pages=40, fitting=8)), FakeCache(None)
    leases = [CacheLease() for _ in range(6)]
    for lease in leases:
        run_alone(scheduler, cache, SequenceState([1] * 9, 1, lease=lease))
    assert [lease.shard for lease in leases] == [0, 0, 0, 1, 1, 1]


def chunks_of(shapes: tuple[tuple[int, int], ...], lengths: Sequence[int], window: int | None = None):
    """Returns the shape of the first prefill call of contexts that lack so many tokens, and (context, start, count)."""
    limits = Limits(PAGE, n_pages=400, shards=1, rows=8, prefill_shapes=shapes, decode_steps=4, window=window)
    scheduler = Scheduler(limits)
    sequences = [SequenceState([number] * (length + 1), 1) for number, length in enumerate(lengths)]
    for sequence in sequences:
        scheduler.submit(sequence)
    schedule = scheduler.schedule()
    return schedule.prefill_shape, [(sequences.index(c.sequence), c.start, c.count) for c in schedule.prefill]


def test_every_context_has_a_row_and_long_ones_the_rows_that_are_left():
    _, alone = chunks_of(((3, 4),), [30])
    assert alone == [(0, 0, 4), (0, 4, 4), (0, 8, 4)]
    _, shared = chunks_of(((3, 4),), [30, 6])
    assert shared == [(0, 0, 4), (1, 0, 4), (0, 4, 4)]
    _, all_of_it = chunks_of(((4, 4),), [5, 3])
    assert all_of_it == [(0, 0, 4), (1, 0, 3), (0, 4, 1)]


def test_with_a_window_a_context_has_one_row_of_a_call():
    _, chunks = chunks_of(((3, 4),), [30], window=6)
    assert chunks == [(0, 0, 4)]


def test_the_shape_that_computes_most_per_second_is_chosen():
    """Few tokens fill the small call; of many, the large one reads the weights for more of them."""
    shapes = (4, 64), (8, 128)
    assert chunks_of(shapes, [60])[0] == (4, 64)
    assert chunks_of(shapes, [125] * 8)[0] == (8, 128)
    shapes = (16, 32), (4, 128)
    assert chunks_of(shapes, [100] * 5)[0] == (16, 32)  # 484 tokens; the other has 400
    assert chunks_of(shapes, [100] * 3)[0] == (4, 128)  # 300 tokens in both
