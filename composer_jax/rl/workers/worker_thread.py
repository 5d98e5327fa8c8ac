"""WorkerThread: a rollout worker in a thread, for a process whose main thread has other work."""

import asyncio
import concurrent.futures
import threading
from typing import Self

from absl import logging

from composer_jax.rl.workers.worker import MakeContext, WorkerOptions, run_worker
from composer_jax.rl.workers.worker_setup import WorkerSetup


class WorkerThread:
    """Plays episodes of a trainer from the beginning of a block to its end, or to that of the trainer's run.

    A worker that fails is logged, and the trainer's other workers play its episodes.
    """

    def __init__(self, options: WorkerOptions, make_context: MakeContext = WorkerSetup.episode_context):
        """See run_worker."""
        self._options, self._make_context = options, make_context
        self._started: concurrent.futures.Future[asyncio.Task] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="rollout-worker", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._task = self._started.result()
        return self

    def __exit__(self, *error: object) -> None:
        """Returns when the worker's sandboxes are gone."""
        if self._thread.is_alive():
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        task = asyncio.create_task(run_worker(self._options, self._make_context))
        self._started.set_result(task)
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            logging.warning("This process plays no more episodes: %s", error, exc_info=error)
