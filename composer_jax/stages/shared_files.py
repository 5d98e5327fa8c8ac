"""Files of a run that process 0 makes and all processes read, on a shared disk or through the bucket of the run."""

from collections.abc import Callable
from pathlib import Path

from composer_jax.parallel.processes import broadcast_from_process0, is_first_process, process_count
from composer_jax.storage.workdir import Workdir


def make_shared(workdir: Workdir | None, make: Callable[[], Path]) -> Path:
    """Calls `make` in process 0 and returns the path that it returns, in every process, once all can read it.

    Args:
      workdir: the run's folder, which holds the path; None is a folder that all processes share.
      make: makes the file or folder, unless it is there, and returns its path.
    """

    def make_and_publish() -> str:
        path = make()
        if workdir is not None and process_count() > 1:
            workdir.publish()
        return str(path if workdir is None else path.relative_to(workdir.path))

    name = broadcast_from_process0(make_and_publish)
    if workdir is None:
        return Path(name)
    if not is_first_process():
        workdir.fetch()
    return workdir.path / name
