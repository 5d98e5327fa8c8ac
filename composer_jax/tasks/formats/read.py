"""Tasks from whatever a path holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.tasks import harbor
from composer_jax.tasks.formats import harbor_dir, swe_bench, swe_smith
from composer_jax.tasks.formats.fields import Fields
from composer_jax.tasks.formats.options import Options
from composer_jax.tasks.formats.rows import ROW_FILES, read_rows
from composer_jax.tasks.task import Task


def read_tasks(path: Path | str, options: Options | None = None, skipped: list[str] | None = None) -> list[Task]:
    """The tasks that a path holds, in order.

    path: a Harbor or Terminal-Bench directory or a folder of them, ours (write_task) or of others; what `launch.tasks
      generate` wrote; a .jsonl or .parquet file of SWE-bench or SWE-smith rows, or rows of both; a repository of tasks
      of SWE-bench 5.
    skipped: where given, a task that cannot be used is left out and the sentence that says why goes here; else the
      first one ends the reading.
    Raises UserError for a path that is none of these, that holds no task, or that holds an id twice.
    """
    path, options = Path(path), options or Options()
    if (path / "baseline.json").is_file():  # what repository/build.py left there
        path /= "tasks"
    tasks: list[Task] = []
    for make in _makers(path, options):
        try:
            tasks.append(make())
        except UserError as error:
            if skipped is None:
                raise
            skipped.append(str(error))
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise UserError(f"{path} holds the task {task.id} twice; keep one of them")
        seen.add(task.id)
    return tasks


def _makers(path: Path, options: Options) -> Iterable[Callable[[], Task]]:
    if path.is_file() and path.suffix in ROW_FILES:
        makers = [partial(_from_row, row, options) for row in read_rows(path)]
    elif path.is_dir() and swe_bench.is_task_repository(path):
        makers = [partial(_from_row, row, options) for row in swe_bench.rows_of_repository(path)]
    elif path.is_dir():
        makers = [partial(_from_directory, directory, options) for directory in _harbor_dirs(path)]
    elif path.exists():
        raise UserError(f"{path} holds no tasks that can be read; files of rows end in {' or '.join(ROW_FILES)}")
    else:
        raise UserError(f"there is no {path}; give a folder of tasks or a file of rows")
    if not makers:
        raise UserError(f"there are no tasks in {path}; a task is a folder with a task.toml, or a row of a file")
    return makers


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


def _from_directory(directory: Path, options: Options) -> Task:
    return (
        harbor.read_task(directory)
        if harbor_dir.is_composer_task(directory)
        else harbor_dir.read_harbor_dir(directory, options)
    )


def _from_row(row: Fields, options: Options) -> Task:
    if swe_bench.is_row(row):
        return swe_bench.read_row(row, options)
    if swe_smith.is_row(row):
        return swe_smith.read_row(row, options)
    fields = ", ".join(sorted(map(repr, row.values))) or "no fields"
    raise UserError(f"{row.where} is a row neither of SWE-bench nor of SWE-smith; it has {fields[:200]}")
