"""Ctrl-C and SIGTERM between steps, never inside one."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM back until the block is done; a second one ends the block at once.

    For what must happen as a whole: a training step uses up the state it starts from, so an interrupt in the middle of
    one would leave nothing to save. Changes nothing outside the main thread, where Python delivers no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # What is ignored (Ctrl-C in the background), or ends the process without asking Python, stays as it is.
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    held = None

    def hold(number, frame):
        nonlocal held
        if held is not None:
            handlers[number](number, frame)
        held = number

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if held is not None:
        handlers[held](held, None)
