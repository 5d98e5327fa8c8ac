"""Runs one function for many units in worker processes, which end when the caller stops."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from composer_jax.errors import UserError

T = TypeVar("T")


def run_in_workers(function: Callable[[int], T], numbers: Sequence[int], workers: int) -> Iterator[tuple[int, T]]:
    """Yields (number, function(number)) as each is done, in any order.

    function: can be pickled. What it raises is raised here, and ends the other workers.

    Raises:
      UserError: a worker process was killed.
    """
    if not numbers:
        return
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        min(workers, len(numbers)), multiprocessing.get_context("spawn"), initializer=_start_worker
    )
    try:
        futures = {executor.submit(function, number): number for number in numbers}
        for future in as_completed(futures):
            yield futures.pop(future), future.result()
        executor.shutdown()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, perhaps because the memory was full; continue with fewer --workers"
        ) from error
    finally:
        # After an error or Ctrl-C nobody needs the units in progress: their files appear when they are complete.
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        executor.shutdown(cancel_futures=True)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others
    # Each worker is one of several and has one core: the tokenizer and the MinHash library start no threads.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
