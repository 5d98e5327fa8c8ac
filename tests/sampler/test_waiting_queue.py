"""The order of waiting requests, and what admitting one costs the host however many sessions are open."""

import asyncio
import sys
import types
from unittest.mock import Mock

from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.device_calls import BusyTime, DeviceCalls
from composer_jax.sampler.request import Request, RequestHandle
from composer_jax.sampler.request_table import RequestTable
from composer_jax.sampler.scheduler import Scheduler
from composer_jax.sampler.sequence import CacheLease, Limits, SequenceState
from composer_jax.sampler.session_gate import SessionGate
from composer_jax.sampler.session_queue import SessionQueue
from composer_jax.sampler.waiting_queue import WaitingQueue
from tests.many import many


@settings(max_examples=many(200), deadline=None)
@given(data=st.data())
def test_the_first_is_that_of_a_sorted_list(data):
    shards = 2
    queue, waiting, running, parked, closed = WaitingQueue(shards), [], [], {}, set()

    def place(s):
        return -s.priority, sum(r.group == s.group for r in running), s.is_new, s.arrival

    def release(s):
        queue.unpark(s)
        for name in [name for name, by in parked.items() if by is s]:
            del parked[name]

    actions = ["submit", "submit", "start", "start", "stop", "preempt", "cancel", "park", "close", "open", "leave"]
    for arrival in range(data.draw(st.integers(1, 60))):
        action, shard = data.draw(st.sampled_from(actions)), data.draw(st.integers(0, shards - 1))
        unparked = sorted((s for s in waiting if s.arrival not in parked), key=place)
        candidates = [s for s in unparked if s.home not in closed]
        first = queue.first()
        assert first is (candidates[0] if candidates else None)
        assert queue.has_lane(shard) == any(s.home == shard for s in unparked)
        if action == "submit":
            lease = data.draw(st.sampled_from([None, CacheLease(), CacheLease()]))
            if lease is not None:
                lease.used = data.draw(st.booleans())
            priority, group = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 3))
            waiting.append(SequenceState([1], 1, priority, group, lease, arrival=arrival))
            waiting[-1].home = data.draw(st.integers(-1, shards - 1))
            queue.add(waiting[-1])
        elif action == "start" and first:
            waiting.remove(first)
            running.append(first)
            first.cached = 0
            queue.remove(first)
            queue.count_running(first.group, 1)
        elif action in ("stop", "preempt") and running:
            s = running.pop(data.draw(st.integers(0, len(running) - 1)))
            queue.count_running(s.group, -1)
            release(s)
            if action == "preempt":
                s.home = -1
                waiting.append(s)
                queue.add(s)
        elif action == "cancel" and waiting:
            s = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            parked.pop(s.arrival, None)
            queue.remove(s)
        elif action == "park" and first and running:
            parked[first.arrival] = running[-1]
            queue.park(first, running[-1])
        elif action == "close":
            closed.add(shard)
            queue.close(shard)
        elif action == "open":
            closed.discard(shard)
            queue.open(shard)
        elif action == "leave" and (lane := [s for s in unparked if s.home == shard]):
            queue.leave_lane(shard)
            assert lane[0].home == -1
        assert len(queue) == len(waiting) and set(map(id, queue)) == set(map(id, waiting))


def test_what_no_longer_holds_does_not_pile_up():
    queue = WaitingQueue()
    for arrival in range(5000):
        queue.add(SequenceState([1], 1, arrival=arrival))
        queue.count_running(None, 1)
        queue.count_running(None, -1)
        if arrival >= 10:
            oldest = queue.first()
            assert oldest is not None
            queue.remove(oldest)
    assert len(queue._heads) <= 100 and len(queue._lanes[-1][None]) == 10


def test_requests_that_are_cancelled_behind_the_first_do_not_pile_up():
    queue = WaitingQueue()
    queue.add(SequenceState([1], 1, arrival=0))
    for arrival in range(1, 5000):
        cancelled = SequenceState([1], 1, arrival=arrival)
        queue.add(cancelled)
        queue.remove(cancelled)
    assert len(queue._lanes[-1][None]) <= 100 and queue.first().arrival == 0


def run_round(scheduler: Scheduler) -> list[SequenceState]:
    """Carries out a schedule of requests that sample one token; returns those that ended."""
    schedule = scheduler.schedule()
    scheduler.start(schedule)
    for s in schedule.decode:
        scheduler.commit_decode(s, [1])
        scheduler.finish(s)
    return schedule.decode


def count_lines(work) -> int:
    """Returns how many lines of Python ran in work()."""
    lines = 0

    def trace(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


LIMITS = Limits(4, n_pages=4000, shards=2, rows=4, prefill_shapes=((4, 8),), decode_steps=4)


def lines_of_rounds(sessions: int) -> int:
    """Returns the lines of 20 rounds in which requests of 8 slots end and others start, while all sessions want to run.

    The cache holds a part of the sessions, so idle ones give up their pages for those that start.
    """
    scheduler = Scheduler(LIMITS)
    leases = [CacheLease() for _ in range(sessions)]
    for n, lease in enumerate(leases):
        scheduler.submit(SequenceState([n % 97, n // 97, *range(9)], 1, lease=lease))
    ended = 0
    while ended < sessions:
        ended += len(run_round(scheduler))
    assert sessions < 3000 or not all(lease.tokens for lease in leases)
    for n, lease in enumerate(leases):
        scheduler.submit(SequenceState([n % 97, n // 97, *range(12)], 1, lease=lease))
    run_round(scheduler)
    return count_lines(lambda: [run_round(scheduler) for _ in range(20)])


def test_a_round_takes_as_long_with_ten_thousand_sessions_as_with_two_hundred():
    """But for the logarithm of those that wait, and for pages that change their owners."""
    assert lines_of_rounds(10_000) <= 1.5 * lines_of_rounds(200)


def test_a_round_does_not_look_at_the_requests_that_wait():
    async def lines(waiting):
        table = RequestTable(Scheduler(LIMITS), runner=Mock(), calls=DeviceCalls(1, BusyTime()))
        futures = [asyncio.get_running_loop().create_future() for _ in range(waiting)]
        for future in futures:
            table.add(RequestHandle(Request([1], SamplingParams(1)), 1, (), None, future))
        for future in futures[:5]:
            future.cancel()
        await asyncio.sleep(0)
        count = count_lines(table.free_done)
        assert len(table._handles) == len(table._scheduler.waiting) == waiting - 5
        table.end_all()
        assert not table._handles and not table._scheduler.waiting
        return count

    assert asyncio.run(lines(5000)) == asyncio.run(lines(50))


def test_the_pages_of_a_request_that_was_cancelled_are_free_before_the_next_call():
    """Even if the event loop has not yet reported the end of its future."""

    async def main():
        table = RequestTable(Scheduler(LIMITS), runner=Mock(), calls=DeviceCalls(1, BusyTime()))
        handle = RequestHandle(Request([1], SamplingParams(1)), 1, (), None, asyncio.get_running_loop().create_future())
        table.add(handle)
        handle.cancel()
        table.free_done()
        assert not table._scheduler.waiting
        await asyncio.sleep(0)
        table.free_done()

    asyncio.run(main())


def test_a_session_that_opens_wakes_no_other():
    async def lines(waiting):
        gate = SessionGate(LIMITS, lambda: False, lambda: 0)
        queue = SessionQueue([types.SimpleNamespace(gate=gate, load=0)])
        tasks = [asyncio.create_task(queue.open(ahead=False)) for _ in range(waiting)]
        for _ in range(2):
            await asyncio.sleep(0)
        n_open = gate.n_open
        places = [task.result()[1] for task in tasks[:5]]
        count = count_lines(lambda: [gate.close(place) for place in places])
        await asyncio.sleep(0)
        assert gate.n_open == n_open and sum(task.done() for task in tasks) == n_open + 5
        queue.end(RuntimeError("ended"))
        await asyncio.gather(*tasks, return_exceptions=True)
        return count

    assert asyncio.run(lines(10_000)) == asyncio.run(lines(2000))
