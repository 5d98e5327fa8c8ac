"""A copy of a repository without files that could hold an answer: caches, builds, history, leftovers."""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.tasks.suites.protected import FOLDERS as TEST_FOLDERS

FOLDERS = (
    "__pycache__",
    ".git",
    ".hg",
    ".svn",
    ".tox",
    ".nox",
    ".venv",
    "venv",
    "node_modules",
    ".eggs",
    ".idea",
    ".vscode",
    ".hypothesis",
    ".ipynb_checkpoints",
    "htmlcov",
    "*_cache",  # .mypy_cache, .pytest_cache, .ruff_cache
    "*.egg-info",
    "*.dist-info",
)
TOP_LEVEL_FOLDERS = ("build", "dist", "site", "_build")
FILES = (
    "*.pyc",
    "*.pyo",
    "*.orig",
    "*.rej",
    "*.bak",
    "*.swp",
    "*.swo",
    "*~",
    ".coverage",
    ".coverage.*",
    "coverage.xml",
    ".dmypy.json",
    "tags",
    "TAGS",
)
FILES_OUTSIDE_TESTS = ("*.egg", "*.whl", "*.patch", "*.diff")  # among tests they are data


def is_scrubbed(path: str, is_folder: bool) -> bool:
    """Whether a relative posix path is left out of a task's workspace."""
    name = path.rpartition("/")[2]
    if is_folder:
        return path in TOP_LEVEL_FOLDERS or any(fnmatchcase(name, pattern) for pattern in FOLDERS)
    in_tests = any(part in TEST_FOLDERS for part in path.split("/"))
    patterns = FILES if in_tests else (*FILES, *FILES_OUTSIDE_TESTS)
    return name == ".git" or any(fnmatchcase(name, pattern) for pattern in patterns)


def copy_scrubbed(repository: Path, target: Path) -> list[str]:
    """Copies a repository to a new folder; returns the excluded paths, sorted.

    Links that lead out of the repository, pipes and sockets are excluded as well.
    Raises UserError when there is no such repository or the target exists.
    """
    if not repository.is_dir():
        raise UserError(f"{repository} is not a folder; give the root of a repository")
    if target.exists():
        raise UserError(f"{target} is already there; give a new folder")
    excluded = []
    for walked, folders, files in os.walk(repository):
        here = Path(walked)
        (target / here.relative_to(repository)).mkdir(parents=True)
        for name in [*folders, *files]:
            path = here / name
            relative = path.relative_to(repository).as_posix()
            is_folder = path.is_dir() and not path.is_symlink()
            if is_scrubbed(relative, is_folder) or not (is_folder or _can_be_copied(path, repository)):
                excluded.append(relative)
            elif not is_folder:
                shutil.copy2(path, target / relative, follow_symlinks=False)
        folders[:] = [
            name
            for name in folders
            if not (here / name).is_symlink()
            and not is_scrubbed((here / name).relative_to(repository).as_posix(), True)
        ]
    return sorted(excluded)


def _can_be_copied(path: Path, repository: Path) -> bool:
    if path.is_symlink():
        # The target is compared as text, so that the copied link leads into the copy.
        target = Path(os.path.normpath(path.parent / path.readlink()))
        return not path.readlink().is_absolute() and target.is_relative_to(repository)
    return path.is_file()
