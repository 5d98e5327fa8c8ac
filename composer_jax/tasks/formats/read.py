"""Reads the tasks at a path in any supported format."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from composer_jax.data.row_files import read_rows
from composer_jax.errors import UserError
from composer_jax.extensions import resolve
from composer_jax.tasks import harbor
from composer_jax.tasks.formats import harbor_dir, swe_bench, swe_smith
from composer_jax.tasks.formats.fields import Fields
from composer_jax.tasks.formats.options import ReadOptions
from composer_jax.tasks.task import Task

log = logging.getLogger(__name__)
SHOWN = 3  # errors of tasks that are left out, in the sentence that counts them
ROW_FILES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


def read_tasks(path: Path | str, options: ReadOptions | None = None, skipped: list[str] | None = None) -> list[Task]:
    """Returns the tasks at a path, in order.

    path: a Harbor or Terminal-Bench directory or a folder of them, written by write_task or by other projects; the
      output of `launch.tasks generate`; a file of SWE-bench or SWE-smith rows, or of both (ROW_FILES); a SWE-bench 5
      task repository; a path of a user's own format (ReadOptions.formats).
    skipped: receives the error of each task that cannot be used. None: one sentence in the log counts these tasks and
      says why.

    A task that cannot be used is left out. Raises UserError for another kind of path, a path without tasks or with none
    that can be used, and a repeated id.
    """
    path, options = Path(path), options or ReadOptions()
    if (path / "baseline.json").is_file():  # the output of repository/build.py
        path /= "tasks"
    tasks: list[Task] = []
    refused: list[UserError] = []
    for read_one in _find_readers(path, options):
        try:
            tasks.append(read_one())
        except UserError as error:
            refused.append(error)
    if refused and not tasks:
        raise refused[0]
    if skipped is not None:
        skipped += map(str, refused)
    elif refused:
        total, shown = len(tasks) + len(refused), "; ".join(map(str, refused[:SHOWN]))
        more = f"; and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
        log.warning("%d of %d tasks of %s are left out: %s%s.", len(refused), total, path, shown, more)
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise UserError(f"{path} holds the task {task.id} twice; keep one of them")
        seen.add(task.id)
    return tasks


def _find_readers(path: Path, options: ReadOptions) -> Sequence[Callable[[], Task]]:
    """Returns one function per task of a path, from the first format that reads the path."""
    for name in (*options.formats, *FORMATS):
        readers = resolve(name, FORMATS, "config.tasks.formats")(path, options)
        if readers:
            return readers
        if readers is not None:
            raise UserError(f"{path} holds no tasks; a task is a folder with a task.toml, or a row of a file")
    if path.exists():
        raise UserError(f"{path} is not a file of rows; their names end in {', '.join(ROW_FILES)}")
    raise UserError(f"{path} does not exist; give a folder of tasks or a file of rows")


def _read_row_file(path: Path, options: ReadOptions) -> Sequence[Callable[[], Task]] | None:
    if not (path.is_file() and path.name.endswith(ROW_FILES)):
        return None
    rows = []
    for place, row in read_rows(str(path)):
        if not isinstance(row, dict):
            raise UserError(f"{place} is not a JSON object but a {type(row).__name__}; every line must be one row")
        rows.append(partial(_read_row, Fields(row, place), options))
    return rows


def _read_task_repository(path: Path, options: ReadOptions) -> Sequence[Callable[[], Task]] | None:
    if not (path / "sweb.yaml").is_file():
        return None
    return [partial(_read_row, row, options) for row in swe_bench.rows_of_repository(path)]


def _read_directories(path: Path, options: ReadOptions) -> Sequence[Callable[[], Task]] | None:
    if not path.is_dir():
        return None
    return [partial(_read_directory, directory, options) for directory in _harbor_dirs(path)]


Format = Callable[[Path, ReadOptions], Sequence[Callable[[], Task]] | None]
"""Returns one function per task of a path, or None for a path of another format; the functions raise UserError."""
FORMATS: Mapping[str, Format] = {
    "rows": _read_row_file,
    "swe_bench_repository": _read_task_repository,
    "harbor": _read_directories,
}
"""Our formats of paths by name, in the order in which they are tried."""


def _read_row(row: Fields, options: ReadOptions) -> Task:
    for row_format in (swe_bench, swe_smith):
        if row_format.is_row(row):
            return row_format.read_row(row, options)
    fields = ", ".join(sorted(map(repr, row.values))) or "no fields"
    raise UserError(f"{row.where} is neither a SWE-bench row nor a SWE-smith row; it has {fields[:200]}")


def _read_directory(directory: Path, options: ReadOptions) -> Task:
    if harbor_dir.is_composer_task(directory):
        return harbor.read_task(directory)
    return harbor_dir.read_harbor_dir(directory, options)


def _harbor_dirs(path: Path) -> Iterator[Path]:
    if harbor_dir.is_harbor_dir(path):
        yield path
        return
    try:
        inner = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    for child in inner:
        if harbor_dir.is_harbor_dir(child):
            yield child
