"""The seconds and memory that a stage used, summed over its attempts: a killed run has used its time as well."""

import contextlib
import json
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError

EVERY_S = 5.0
"""Seconds between writes, which a killed attempt can lose."""


@contextlib.contextmanager
def track_usage(path: Path) -> Iterator[Callable[[], dict[str, float]]]:
    """Writes the usage to `path` while the block runs, on top of what earlier attempts left there.

    Yields a function that returns {"seconds": sum over all attempts, "peak_rss_gb": largest of all processes}.
    """
    before = json.loads(path.read_text()) if path.exists() else {"seconds": 0.0, "peak_rss_gb": 0.0}
    began, ended = time.perf_counter(), threading.Event()

    def usage() -> dict[str, float]:
        return {
            "seconds": before["seconds"] + time.perf_counter() - began,
            "peak_rss_gb": max(before["peak_rss_gb"], peak_rss_gb()),
        }

    def write() -> None:
        write_atomically(path, json.dumps(usage()).encode())

    def keep_writing() -> None:
        while not ended.wait(EVERY_S):
            try:
                write()
            except UserError:
                return  # the main thread's own write raises the same error

    path.parent.mkdir(exist_ok=True)
    writer = threading.Thread(target=keep_writing, name="usage", daemon=True)
    writer.start()

    def stop() -> None:
        ended.set()
        writer.join()

    try:
        yield usage
    except BaseException:
        stop()
        with contextlib.suppress(UserError):  # the error that ends the stage matters more than the last seconds
            write()
        raise
    stop()
    write()


def peak_rss_gb() -> float:
    """Returns the largest resident memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
