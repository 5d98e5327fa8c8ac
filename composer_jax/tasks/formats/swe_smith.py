"""Tasks from the rows of SWE-smith: repositories with an injected bug.

    instance_id (owner__repo.commit8.bugtype__hash), repo (swesmith/<mirror>), patch (injects the bug; its reverse is
    the solution), FAIL_TO_PASS, PASS_TO_PASS, image_name, base_commit, problem_statement (perhaps none).

A test that is missing from the report has failed. Every PASS_TO_PASS test runs.
"""

import hashlib
import re
import shutil
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.tasks.formats.checkout import Mirrors, move_into_store, new_folder
from composer_jax.tasks.formats.fields import Fields
from composer_jax.tasks.formats.options import ReadOptions
from composer_jax.tasks.formats.swe_bench import (
    find_packages,
    instance_id,
    instruction,
    select_metadata,
    test_ids,
)
from composer_jax.tasks.grader import SuiteGrader
from composer_jax.tasks.patches.git_diff import apply_change, changes_from_patch
from composer_jax.tasks.task import Task

# The images of SWE-smith have their Python in a conda environment.
IMAGE_VARIABLES = {
    "PATH": "/opt/miniconda3/envs/testbed/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
}
TIMEOUT_S = 300.0
_COMMIT = re.compile(r"\.([0-9a-f]{8})\.")
_DESCRIBED = ("created_at", "strategy")
# The issue of a row without one names one test, as a report of a failing build would.
_NO_PROBLEM = "Something that worked before does not work any more. This test fails, for one: "


def is_row(row: Fields) -> bool:
    """Whether a row belongs to SWE-smith."""
    return {"instance_id", "patch", "FAIL_TO_PASS"} <= row.values.keys() and "test_patch" not in row.values


def read_row(row: Fields, options: ReadOptions) -> Task:
    """Returns the task of a row. Raises UserError for an incomplete row or a missing repository."""
    name, repo, patch = instance_id(row), row.text("repo"), row.text("patch")
    f2p, p2p = test_ids(row)
    if not patch.strip():
        raise UserError(f"{row.where} has an empty patch; it must be the diff that injects the bug")
    if options.repos is None:
        raise UserError(
            f"{row.where} is a SWE-smith row and needs the repository {repo}; give the folder of repositories (repos)"
        )
    repository = _with_bug(row, name, patch, Mirrors(options.repos, options.store))
    packages = find_packages(options, repo, "")
    image = None if packages is not None else row.text("image_name")
    variables = {} if image is None else {"environment": IMAGE_VARIABLES}
    problem = row.text("problem_statement", "").strip() or _NO_PROBLEM + f2p[0]
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


def _with_bug(row: Fields, name: str, patch: str, mirrors: Mirrors) -> Path:
    """Returns a folder of the repository with the bug, which base_commit contains or the patch injects."""
    commit = row.text("base_commit", "")
    if not commit:
        if not (match := _COMMIT.search(name)):
            raise UserError(f"{row.where} has neither a base_commit nor one in its instance_id {name!r}")
        commit = match[1]
    clean = mirrors.checkout(row.text("repo"), commit)
    try:
        changes_from_patch(clean, patch, reverse=True)  # succeeds if the commit contains the bug
        return clean
    except UserError:
        changes = changes_from_patch(clean, patch)
    key = hashlib.sha256(patch.encode(errors="surrogateescape")).hexdigest()
    target = mirrors.store / f"{clean.name}+{key[:16]}"
    if target.is_dir():
        return target
    with new_folder(mirrors.store) as files:
        shutil.copytree(clean, files, symlinks=True, dirs_exist_ok=True)
        for path, change in changes.items():
            apply_change(files, path, change)
        return move_into_store(files, target)
