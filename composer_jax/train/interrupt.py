"""Ctrl-C and SIGTERM between steps, never inside one."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from composer_jax.parallel.processes import in_any, process_count


class InterruptedTogether(KeyboardInterrupt):
    """An interrupt that all of several processes raise at the same place, so that they can still save together."""


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C and SIGTERM back until the block is done; a second one ends the block at once.

    For what must happen as a whole: a training step uses up the state it starts from, so an interrupt in the middle of
    one would leave nothing to save. Changes nothing outside the main thread, where Python delivers no signals.

    Yields a function that lets through, earlier than the end of the block, what is held. Of several processes, which
    call it at the same places, it interrupts all as soon as one is: by InterruptedTogether, after the same step.
    """
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # What is ignored (Ctrl-C in the background), or ends the process without asking Python, stays as it is.
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    held = None

    def hold(number, frame):
        nonlocal held
        if held is not None:
            handlers[number](number, frame)
        held = number

    def take():
        for number in handlers:
            signal.signal(number, hold)

    def give_back():
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def let_through():
        nonlocal held
        if not in_any(held is not None):
            return
        if process_count() > 1:
            raise InterruptedTogether
        number, held = held, None
        give_back()
        try:
            handlers[number](number, None)
        finally:
            take()

    take()
    try:
        yield let_through
    finally:
        give_back()
    if held is not None:
        handlers[held](held, None)
