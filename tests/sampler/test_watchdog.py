"""A sampler that makes no progress says who waits for what."""

import asyncio
import dataclasses
import logging
import threading

import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.device_calls import ROUTING_READ
from composer_jax.sampler.request import Request
from composer_jax.sampler.scheduler import Scheduler
from composer_jax.sampler.sequence import CacheLease, Limits, SchedulerOutput, SequenceState
from composer_jax.sampler.watchdog import Activity, Watchdog, describe_stall

LIMITS = Limits(4, n_pages=10, shards=1, rows=2, prefill_shapes=((2, 8),), decode_steps=4)


def new_activity(*requests: SequenceState, limits=LIMITS, **changes) -> Activity:
    """Of a scheduler that has admitted what it can."""
    scheduler = Scheduler(limits)
    for request in requests:
        scheduler.submit(request)
    scheduler.schedule()
    fields = dict(scheduler=scheduler, calls=(), update=None, is_paused=False, progress=0)
    return Activity(**(fields | changes))


class Watched:
    """A watchdog of 60 s with a clock that the test sets."""

    def __init__(self, activity: Activity) -> None:
        self.activity, self.now, self.warnings = activity, 0.0, []
        self.watchdog = Watchdog(60, lambda: self.activity, clock=lambda: self.now, warn=self.warnings.append)

    def check_at(self, *times: float) -> int:
        """Looks at these times; returns how many warnings there are."""
        for self.now in times:
            self.watchdog.check()
        return len(self.warnings)


def test_a_warning_comes_after_the_time_and_then_after_twice_as_long():
    watched = Watched(new_activity(SequenceState([1], 1)))
    assert watched.check_at(1000, 1059.9) == 0
    assert watched.check_at(1060) == 1
    assert watched.check_at(1070, 1119.9) == 1
    assert watched.check_at(1120) == 2
    assert watched.check_at(1239.9) == 2 and watched.check_at(1240, 1250) == 3
    assert [text.split(".")[0] for text in watched.warnings] == [
        f"The sampler made no progress for {seconds} s" for seconds in (60, 120, 240)
    ]


def test_progress_starts_the_time_again():
    watched = Watched(new_activity(SequenceState([1], 1)))
    assert watched.check_at(0, 60) == 1
    watched.activity = dataclasses.replace(watched.activity, progress=1)
    assert watched.check_at(70, 129) == 1 and watched.check_at(130) == 2


@pytest.mark.parametrize("is_paused", [False, True])
def test_nothing_to_do_is_not_a_standstill(is_paused):
    """The time counts from when somebody begins to wait."""
    watched = Watched(new_activity(is_paused=is_paused))
    assert watched.check_at(0, 100, 1000) == 0
    watched.activity.scheduler.submit(SequenceState([1, 2], 1))
    assert watched.check_at(1010, 1069) == 0 and watched.check_at(1070) == 1
    watched.activity.scheduler.cancel(next(iter(watched.activity.scheduler.waiting)))
    assert watched.check_at(5000) == 1


def test_the_calls_that_run_are_named():
    scheduler = Scheduler(LIMITS)
    for tokens in ([1], list(range(7))):
        scheduler.submit(SequenceState(tokens, 2))
    prefill = scheduler.schedule()
    activity = Activity(scheduler, (prefill,), None, False, 0)
    assert (
        "Running on the devices: a prefill call of 2 rows per device and 8 tokens (1 rows filled) and a decode call of "
        "1 row of up to 1 tokens; the first call of a shape compiles. 2 requests run."
    ) in describe_stall(activity, 60)
    decode = SchedulerOutput(None, [], prefill.decode)
    text = describe_stall(dataclasses.replace(activity, calls=(decode,)), 60)
    assert "Running on the devices: a decode call of 1 row of up to 1 tokens;" in text
    text = describe_stall(dataclasses.replace(activity, calls=(decode, prefill, ROUTING_READ)), 60)
    assert "a decode call of 1 row of up to 1 tokens, and 2 calls behind;" in text
    text = describe_stall(dataclasses.replace(activity, calls=(ROUTING_READ, decode)), 60)
    assert "Running on the devices: a read of the experts that tokens chose, and 1 call behind;" in text
    assert "No device call is running. 2 requests run." in describe_stall(dataclasses.replace(activity, calls=()), 60)


PROMPT = list(range(12))
WAITING = {
    "slots": (
        [SequenceState([1] * 9, 1), SequenceState([2], 1), SequenceState([3] * 5, 1)],
        {},
        "1 request waits: 1 for one of 2 slots. Running requests hold 4 of 10 pages, sessions 0 more. The oldest "
        "waiting request has 5 tokens.",
    ),
    "pages": (
        [SequenceState([1] * 30, 1), SequenceState([2] * 20, 1), SequenceState([3], 1)],
        {},
        "2 requests wait: 1 for free pages, 1 for its turn. Running requests hold 8 of 10 pages, sessions 0 more. The "
        "oldest waiting request has 20 tokens.",
    ),
    "slots before the prefix": (
        [SequenceState(PROMPT, 1), SequenceState([2], 1), SequenceState([*PROMPT, 1], 1)],
        {},
        "1 request waits: 1 for one of 2 slots.",
    ),
    "prefix": (
        [SequenceState(PROMPT, 1), SequenceState([*PROMPT, 1], 1)],
        {},
        "1 request waits: 1 for a prefix that a running request computes.",
    ),
    "pause": (
        [SequenceState([1], 1), SequenceState([2], 1), SequenceState([3], 1)],
        {"is_paused": True},
        "2 requests run. The sampler is paused; call resume. 1 request waits: 1 for the end of the pause.",
    ),
    "drain": (
        [SequenceState([1], 1), SequenceState([2], 1), SequenceState([3], 1)],
        {"update": (7, "drain")},
        "Weights of version 7 wait until the running requests have ended (mode='drain'). 1 request waits: 1 for the "
        "new weights.",
    ),
    "call": (
        [],
        {"update": (7, "keep"), "calls": (SchedulerOutput((2, 8), [], []),)},
        "7 wait for the end of the device call.",
    ),
    "install": ([], {"update": (7, "drain")}, "No device call is running. Weights of version 7 are being installed."),
}


@pytest.mark.parametrize(("requests", "changes", "sentence"), WAITING.values(), ids=WAITING)
def test_the_reason_is_named(requests, changes, sentence):
    activity = new_activity(*(dataclasses.replace(request) for request in requests), **changes)
    assert activity.is_busy and sentence in describe_stall(activity, 60)


def test_pages_of_sessions_are_counted():
    scheduler = Scheduler(LIMITS)
    request = SequenceState([1], 1, lease=CacheLease())
    scheduler.submit(request)
    scheduler.start(scheduler.schedule())
    scheduler.commit_decode(request, [2])
    scheduler.finish(request)
    scheduler.submit(SequenceState([5], 1))
    text = describe_stall(Activity(scheduler, (), None, False, 0), 60)
    assert "Running requests hold 0 of 10 pages, sessions 1 more." in text and "1 for its turn" in text


def test_a_device_call_that_does_not_end_is_reported(new_sampler, monkeypatch):
    """The call waits for the warning. Afterwards the request is answered, and no timer is left."""
    sampler = new_sampler(page_size=8, stall_seconds=0.02)
    warned, records = threading.Event(), []

    class Recorder(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())
            warned.set()

    start_decode = sampler.engines[0].runner.start_decode

    def start(*args):
        finish = start_decode(*args)

        def stuck():
            assert warned.wait(60), "no warning"
            return finish()

        return stuck

    monkeypatch.setattr(sampler.engines[0].runner, "start_decode", start)
    logger, recorder = logging.getLogger("absl"), Recorder(logging.WARNING)
    logger.addHandler(recorder)

    async def main():
        async with sampler.serving():
            sample = await sampler.submit(Request([3, 1, 4], SamplingParams(3)))
        assert sampler.engines[0]._watchdog._timer is None
        return sample

    try:
        sample = asyncio.run(asyncio.wait_for(main(), 120))
    finally:
        logger.removeHandler(recorder)
    assert 1 <= len(sample.tokens) <= 3
    assert "a decode call of 1 row of up to 3 tokens" in records[-1] or "a prefill call of 8 rows" in records[0]


def test_a_sampler_that_is_lent_to_the_learner_is_not_reported():
    """The time counts from when the learner gives it back."""
    watched = Watched(new_activity(SequenceState([1], 1), is_paused=True, waits_for_others=True))
    assert watched.check_at(0, 100, 1000) == 0
    watched.activity = dataclasses.replace(watched.activity, is_paused=False, waits_for_others=False)
    assert watched.check_at(1010, 1069) == 0 and watched.check_at(1070) == 1


def test_zero_seconds_switch_it_off():
    async def main():
        watchdog = Watchdog(0, lambda: pytest.fail("it looked"))
        watchdog.start()
        await asyncio.sleep(0)
        assert watchdog._timer is None
        watchdog.stop()

    asyncio.run(main())


def test_a_request_waits_for_the_device_that_has_the_pages_of_its_session():
    scheduler, leases = Scheduler(dataclasses.replace(LIMITS, shards=2, rows=1)), [CacheLease(), CacheLease()]
    for token, lease in enumerate(leases):
        first = SequenceState([token] * 5, 1, lease=lease)
        scheduler.submit(first)
        for _ in range(2):
            scheduler.start(scheduler.schedule())
        scheduler.commit_decode(first, [1])
        scheduler.finish(first)
    assert [lease.shard for lease in leases] == [0, 1]
    scheduler.submit(SequenceState([0] * 6, 1))  # finds its prefix on the first device
    scheduler.schedule()
    scheduler.submit(SequenceState([0, 0, 0, 0, 0, 1, 2], 1, lease=leases[0]))
    activity = Activity(scheduler, (scheduler.schedule(),), None, False, 0)
    assert "1 for a slot on the device that has the pages of its session" in describe_stall(activity, 60)
