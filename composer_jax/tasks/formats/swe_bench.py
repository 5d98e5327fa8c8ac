"""Tasks from the rows of SWE-bench: full, Lite, Verified, Multilingual, and version 5.

    repo, instance_id, base_commit, problem_statement, patch, test_patch, FAIL_TO_PASS, PASS_TO_PASS, version, ...;
    Verified has difficulty; version 5 has image, eval_script, log_parser, eval_type (pass_and_fail | fail_only).

A row runs without an image iff its tests have pytest ids, its repository is among the mirrors, and its packages are in
the folder of packages. Every other row needs its image and an eval_script: our pytest runner is unreliable on the old
Pythons of many images.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from composer_jax.errors import UserError
from composer_jax.tasks.formats.checkout import Mirrors, move_into_store, new_folder
from composer_jax.tasks.formats.fields import Fields
from composer_jax.tasks.formats.options import ReadOptions
from composer_jax.tasks.grader import Grader, LogGrader, SuiteGrader
from composer_jax.tasks.grading.log_parsers import parser_of
from composer_jax.tasks.patches.git_diff import apply_change, changes_from_patch
from composer_jax.tasks.task import Task

TIMEOUT_S = 1800.0  # of one evaluation; SWE-bench's value
_PYTEST_ID = re.compile(r"[\w./-]+\.py::.+", re.DOTALL)
_INSTANCE = re.compile(r"[A-Za-z0-9_.-]+")
_DESCRIBED = ("hints_text", "created_at", "version", "environment_setup_commit", "difficulty", "split", "image_assets")


def is_row(row: Fields) -> bool:
    """Whether a row belongs to SWE-bench (SWE-smith rows have no test_patch)."""
    return {"instance_id", "base_commit", "test_patch"} <= row.values.keys()


def read_row(row: Fields, options: ReadOptions) -> Task:
    """Returns the task of a row. Raises UserError for an incomplete row or one that cannot be graded here."""
    name, repo, commit = instance_id(row), row.text("repo"), row.text("base_commit")
    patches = {"gold_patch": row.text("patch"), "test_patch": row.text("test_patch")}
    f2p, p2p = test_ids(row)
    if (kind := row.text("eval_type", "pass_and_fail")) not in ("pass_and_fail", "fail_only"):
        raise UserError(f"{row.where} has eval_type = {kind!r}; it is pass_and_fail or fail_only")
    checkout = Mirrors(options.repos, options.store).checkout(repo, commit) if options.repos else None
    packages = find_packages(options, repo, row.text("version", ""))
    has_pytest_ids = all(map(_PYTEST_ID.fullmatch, f2p + p2p))
    if checkout is not None and packages is not None and has_pytest_ids:
        tests, image = _tests(checkout, patches["test_patch"], options.store), None
        grader = SuiteGrader(f2p, p2p, tests, timeout_s=TIMEOUT_S)
    else:
        grader, image, packages = _log_grader(row, f2p, p2p, kind), image_name(row), None
    return Task(
        id=name,
        family="swe_bench",
        split=options.split or "heldout",
        instruction=instruction(repo, row.text("problem_statement")),
        files={},
        tools=options.tools,
        grader=grader,
        metadata={"repo": repo, "base_commit": commit, **patches, **select_metadata(row, _DESCRIBED)},
        repository=checkout,
        packages=packages,
        image=image,
    )


def rows_of_repository(path: Path) -> list[Fields]:
    """Returns the tasks of a SWE-bench 5 task repository (sweb.yaml, tasks/<id>/task.yaml) as rows.

    Raises UserError for an incomplete one.
    """
    folders = sorted(file.parent for file in (path / "tasks").glob("*/task.yaml"))
    if not folders:
        raise UserError(f"{path} has no tasks/<id>/task.yaml; it is not a task repository")
    return [_row_of_folder(folder) for folder in folders]


def _row_of_folder(folder: Path) -> Fields:
    row = dict(_yaml(folder / "task.yaml"))
    tests = _yaml(folder / "tests.json")  # JSON is YAML
    row |= {name: tests.get(name) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    for field, name in (
        ("problem_statement", "problem_statement.md"),
        ("hints_text", "hints.md"),
        ("patch", "gold.patch"),
        ("test_patch", "test.patch"),
        ("eval_script", "eval.sh"),
    ):
        if (folder / name).is_file():
            try:
                row[field] = (folder / name).read_bytes().decode()
            except UnicodeDecodeError as error:
                raise UserError(f"{folder / name} is not UTF-8 text: {error}") from error
    return Fields(row, str(folder))


def _yaml(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} does not hold a table of fields")
    return {key: value.isoformat() if hasattr(value, "isoformat") else value for key, value in values.items()}


def instance_id(row: Fields) -> str:
    name = row.text("instance_id")
    if not _INSTANCE.fullmatch(name):
        raise UserError(f"{row.where} has instance_id = {name!r}; it may hold letters, digits, and _ . -")
    return name


def test_ids(row: Fields) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns FAIL_TO_PASS and PASS_TO_PASS without duplicates. A test in both counts as fail-to-pass."""
    f2p = tuple(dict.fromkeys(row.texts("FAIL_TO_PASS")))
    p2p = tuple(dict.fromkeys(row.texts("PASS_TO_PASS", ())))
    if not f2p:
        raise UserError(f"{row.where} has an empty FAIL_TO_PASS; it must name at least one test")
    return f2p, tuple(test for test in p2p if test not in set(f2p))


def image_name(row: Fields) -> str:
    """Returns the row's own image, or its name at SWE-bench on Docker Hub."""
    default = f"swebench/sweb.eval.x86_64.{row.text('instance_id').replace('__', '_1776_')}".lower()
    return row.text("image", default)


def instruction(repo: str, problem: str) -> str:
    """Returns the instruction for the agent."""
    return (
        f"The workspace holds the repository {repo}. Change its code so that the issue below is resolved; tests that "
        f"you do not see decide. There is no need to change tests.\n\n<issue>\n{problem.strip()}\n</issue>\n"
    )


def find_packages(options: ReadOptions, repo: str, version: str) -> Path | None:
    """Returns the user's folder of packages for a version of a repository, or None."""
    if options.packages is None:
        return None
    for name in (f"{repo.replace('/', '__')}/{version}", repo.replace("/", "__")):
        folder = (options.packages / name).resolve()
        if folder.is_dir() and folder.is_relative_to(options.packages.resolve()):
            return folder
    return None


def select_metadata(row: Fields, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the named fields that are not empty, as JSON values."""
    present = {name: row.values[name] for name in names if row.values.get(name) not in (None, "")}
    return {name: value.isoformat() if hasattr(value, "isoformat") else value for name, value in present.items()}


def _log_grader(row: Fields, f2p: tuple[str, ...], p2p: tuple[str, ...], kind: str) -> Grader:
    if "eval_script" not in row:
        raise UserError(
            f"{row.where} ({row.values['instance_id']}) cannot be graded: it has no eval_script for its image, "
            "and without one it needs pytest ids, its repository (repos) and installed packages (packages)"
        )
    try:
        parser_of(row.text("log_parser"))
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from None
    return LogGrader(row.text("eval_script"), row.text("log_parser"), f2p, p2p, kind == "fail_only", TIMEOUT_S)


def _tests(checkout: Path, patch: str, store: Path) -> Path:
    """Returns a folder of the test files that `patch` adds or changes, after the patch."""
    changes = changes_from_patch(checkout, patch)
    key = hashlib.sha256(f"{checkout.name}\0{patch}".encode(errors="surrogateescape")).hexdigest()
    target = store / f"tests@{key[:16]}"
    if target.is_dir():
        return target
    with new_folder(store) as files:
        for path, change in changes.items():
            if change.kind != "gone":
                apply_change(files, path, change)
        return move_into_store(files, target)
