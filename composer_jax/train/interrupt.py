"""Ctrl-C between steps, never inside one."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Holds a Ctrl-C back until the block is done; a second one ends the block at once.

    For what must happen as a whole: a training step uses up the state it starts from, so an interrupt in the middle of
    one would leave nothing to save. Changes nothing outside the main thread, where Python delivers no signals.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held = False

    def hold(number, frame):
        nonlocal held
        if held:
            handler(number, frame)
        held = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(signal.SIGINT, None)
