"""What a test compiled."""

import contextlib
import threading
from collections.abc import Iterator

from composer_jax.observe.compilations import compilations_since, count_compilations


@contextlib.contextmanager
def compiles_nothing() -> Iterator[None]:
    """Fails with the names of the programs that the block compiled.

    A thread that an earlier test left behind may still compile: what other threads than those of the block and the
    main one compile does not count.
    """
    others = set(threading.enumerate()) - {threading.current_thread()}
    before = count_compilations()
    yield
    programs = [c.program for c in compilations_since(before) if c.thread not in others]
    assert programs == [], f"compiled {programs}"
