"""Defers Ctrl-C and SIGTERM until a training step is complete."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from composer_jax.parallel.processes import any_process, process_count


class AllProcessesInterrupted(KeyboardInterrupt):
    """An interrupt that all processes raise after the same step, so that they can still save a checkpoint together."""


@contextlib.contextmanager
def defer_signals() -> Iterator[Callable[[], None]]:
    """Defers Ctrl-C and SIGTERM to the end of the block; a second signal is handled at once.

    A training step donates the buffers of the state it starts from, so an interrupt inside the step would leave
    nothing to save. Outside the main thread, where Python delivers no signals, the context changes nothing.

    Yields:
      A function that handles a deferred signal before the end of the block. Several processes call it after the same
      steps; if any of them has a deferred signal, all raise AllProcessesInterrupted.
    """
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Signals without a Python handler (ignored in the background, or the system's default) are left alone.
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    deferred: signal.Signals | None = None

    def defer(number, frame):
        nonlocal deferred
        if deferred is not None:
            handlers[number](number, frame)
        deferred = signal.Signals(number)

    def install():
        for number in handlers:
            signal.signal(number, defer)

    def restore():
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def raise_deferred():
        nonlocal deferred
        if not any_process(deferred is not None):
            return
        if process_count() > 1 or deferred is None:
            raise AllProcessesInterrupted
        number, deferred = deferred, None
        restore()
        try:
            handlers[number](number, None)
        finally:
            install()

    install()
    try:
        yield raise_deferred
    finally:
        restore()
    if deferred is not None:
        handlers[deferred](deferred, None)


@contextlib.contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignores Ctrl-C and SIGTERM inside the block; outside the main thread it changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
