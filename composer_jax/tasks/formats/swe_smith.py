"""Tasks from the rows of SWE-smith: repositories into which a bug was put.

    instance_id (owner__repo.commit8.bugtype__hash), repo (swesmith/<mirror>), patch (what puts the bug in; the solution
    is to take it back), FAIL_TO_PASS, PASS_TO_PASS, image_name, base_commit, problem_statement (perhaps none).

A test that is missing from the report has failed, and every stated PASS_TO_PASS test is run.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.tasks.formats.checkout import Mirrors, move_into_store
from composer_jax.tasks.formats.fields import Fields
from composer_jax.tasks.formats.options import Options
from composer_jax.tasks.formats.swe_bench import (
    instance_id,
    instruction,
    packages_of,
    select_metadata,
    test_ids,
)
from composer_jax.tasks.grader import SuiteGrader
from composer_jax.tasks.patches.git_diff import apply_change, changes_from_patch
from composer_jax.tasks.task import Task

# In the images of SWE-smith, python is that of a conda environment.
IMAGE_VARIABLES = {
    "PATH": "/opt/miniconda3/envs/testbed/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
}
TIMEOUT_S = 300.0
_COMMIT = re.compile(r"\.([0-9a-f]{8})\.")
_DESCRIBED = ("created_at", "strategy")


def is_row(row: Fields) -> bool:
    """Whether a row is one of SWE-smith."""
    return {"instance_id", "patch", "FAIL_TO_PASS"} <= row.values.keys() and "test_patch" not in row.values


def read_row(row: Fields, options: Options) -> Task:
    """The task of a row. Raises UserError for one that lacks something or whose repository is not there."""
    name, repo, patch = instance_id(row), row.text("repo"), row.text("patch")
    f2p, p2p = test_ids(row)
    if not patch.strip():
        raise UserError(f"{row.where} has an empty patch; it has to be the diff that puts the bug in")
    if options.repos is None:
        raise UserError(f"{row.where} is of SWE-smith, which needs the repository {repo}; give their folder (repos)")
    repository = _with_bug(row, name, repo, patch, options)
    packages = packages_of(options, repo, "")
    image = None if packages is not None else row.text("image_name")
    variables = {} if image is None else {"environment": IMAGE_VARIABLES}
    problem = row.text("problem_statement", "").strip() or _problem(f2p)
    return Task(
        id=name,
        family="swe_smith",
        split=options.split or "train",
        instruction=instruction(repo, problem),
        files={},
        tools=options.tools,
        grader=SuiteGrader(f2p, p2p, timeout_s=TIMEOUT_S),
        metadata={
            "repo": repo,
            "gold_patch": patch,
            "gold_is_reverse": True,
            **select_metadata(row, _DESCRIBED),
            **variables,
        },
        repository=repository,
        packages=packages,
        image=image,
    )


def _problem(tests: tuple[str, ...]) -> str:
    """An issue for a row that has none. It names one test, as a report of a failing build would."""
    return f"Something that worked before does not work any more. This test fails, for one: {tests[0]}"


def _with_bug(row: Fields, name: str, repo: str, patch: str, options: Options) -> Path:
    """The folder of the repository with the bug in it: base_commit has it, or the patch puts it in."""
    commit = row.text("base_commit", "")
    if not commit:
        if not (match := _COMMIT.search(name)):
            raise UserError(f"{row.where} has neither a base_commit nor one in its instance_id {name!r}")
        commit = match[1]
    clean = Mirrors(options.repos, options.store).checkout(repo, commit)
    try:
        changes_from_patch(clean, patch, reverse=True)  # is the bug in it already?
        return clean
    except UserError:
        changes = changes_from_patch(clean, patch)
    key = hashlib.sha256(patch.encode(errors="surrogateescape")).hexdigest()
    target = options.store / f"{clean.name}+{key[:16]}"
    if not target.is_dir():
        with tempfile.TemporaryDirectory(dir=options.store, prefix=".bug-") as scratch:
            files = Path(scratch, "files")
            shutil.copytree(clean, files, symlinks=True)
            for path, change in changes.items():
                apply_change(files, path, change)
            move_into_store(files, target)
    return target
