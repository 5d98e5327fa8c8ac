"""What a stage used, over all attempts at it: a run that is killed has used its time all the same."""

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
"""How often it is written down: what a killed attempt can lose."""


@contextlib.contextmanager
def used(path: Path) -> Iterator[Callable[[], dict[str, float]]]:
    """Keeps account in `path` while the block runs, going on from what an earlier attempt left there.

    Yields a function that returns {"seconds": of all attempts together, "peak_rss_gb": of the largest process}.
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
                return  # the main thread writes too, and says what is wrong

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
        with contextlib.suppress(UserError):  # what is being raised matters more than the seconds since
            write()
        raise
    stop()
    write()


def peak_rss_gb() -> float:
    """Largest resident memory of this process so far, GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
