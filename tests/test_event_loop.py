"""EventLoop: one loop for several calls, inside another loop too, and Ctrl-C lets it clean up."""

import asyncio
import signal
import threading

import pytest

from composer_jax.event_loop import EventLoop


async def where():
    return asyncio.get_running_loop(), threading.current_thread()


def test_all_calls_share_a_loop_that_is_not_in_this_thread():
    with EventLoop() as loop:
        (first, thread), (second, _) = loop.run(where()), loop.run(where())
    assert first is second and first.is_closed()
    assert thread is not threading.current_thread() and not thread.is_alive()


def test_it_runs_inside_a_running_loop_as_in_a_notebook():
    async def cell():
        with EventLoop() as loop:
            return loop.run(where())[0] is not asyncio.get_running_loop()

    assert asyncio.run(cell())


def test_errors_come_out_and_the_loop_lives_on():
    async def broken():
        raise ZeroDivisionError

    with EventLoop() as loop:
        with pytest.raises(ZeroDivisionError):
            loop.run(broken())
        assert loop.run(where())


def test_ctrl_c_cancels_and_waits_for_the_clean_up():
    cleaned = []

    async def busy():
        try:
            await asyncio.sleep(0.05)  # by then the main thread waits
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            cleaned.append(True)

    with EventLoop() as loop:
        with pytest.raises(KeyboardInterrupt):
            loop.run(busy())
        assert cleaned == [True]
        assert loop.run(where())
