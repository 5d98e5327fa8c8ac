"""Makes tasks from a Python repository with a test suite, checks tasks, and shows them.

    python -m launch.tasks generate --repo=DIR --out=DIR --count=50 --requirements=pytest
    python -m launch.tasks generate --repo=DIR --out=DIR --count=50 --packages=DIR --kinds=stub,delete_feature
    python -m launch.tasks validate PATH --runs=5
    python -m launch.tasks show PATH

generate copies the repository without caches, history and build outputs, runs its suite several times in sandboxes,
keeps the tests that always pass, breaks the code in many ways, and writes a Harbor directory for each breakage that the
suite detects and that its repair undoes. The suite needs pytest and the packages that the repository imports:
--packages is a folder made by `pip install --target DIR pytest ...`; --requirements installs into OUT/packages. The
packages must not include the repository itself. The same flags give the same tasks.

validate grades each task of a path several times untouched, which must score 0, and with its own solution (for a Harbor
task what solution/solve.sh leaves), which must score 1. It writes validation.json beside the tasks and lists the
invalid ones and those that cannot be used here; the exit code is 1 if there are any. Tasks that need the network need
--network=host. The path is a task, a folder of tasks, or a .jsonl or .parquet file of SWE-bench or SWE-smith rows,
whose repositories are in --repos. show prints a summary of each task of a path, or one task in full.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from absl import flags as absl_flags

from composer_jax.errors import UserError
from launch import flags, hosts

COMMANDS = ("generate", "validate", "show")
EXIT_INVALID = 1


def define(values):
    from composer_jax.sandbox.config import NETWORKS

    string = lambda name, meaning, default=None: absl_flags.DEFINE_string(  # noqa: E731
        name, default, meaning, flag_values=values
    )
    whole = lambda name, default, meaning, least=1: absl_flags.DEFINE_integer(  # noqa: E731
        name, default, meaning, lower_bound=least, flag_values=values
    )
    listed = lambda name, meaning: absl_flags.DEFINE_list(name, None, meaning, flag_values=values)  # noqa: E731
    string("repo", "generate: the root folder of the repository.")
    string("out", "generate: a new or empty folder.")
    whole("count", 50, "generate: number of tasks.")
    listed(
        "kinds",
        "generate: kinds of breakage, separated by commas (mutate: all mutations); default: all.",
    )
    whole("seed", 0, "generate: random seed.", 0)
    string("packages", "A folder of installed packages, including pytest; for validate, the packages of rows.")
    absl_flags.DEFINE_enum(
        "network", "none", NETWORKS, "validate: the network of tasks that need one (docs/sandbox.md).",
        flag_values=values,
    )  # fmt: skip
    string("repos", "validate, show: a folder of git repositories for rows.")
    listed("requirements", "generate: pip requirements of the tests, separated by commas.")
    absl_flags.DEFINE_enum(
        "split", "train", ("train", "heldout", "unseen"), "generate: the split of the tasks.", flag_values=values
    )
    absl_flags.DEFINE_bool(
        "hide_tests", False, "generate: remove the test files with failing tests from the workspace.",
        flag_values=values,
    )  # fmt: skip
    absl_flags.DEFINE_bool(
        "names", True, "generate: put the names of failing tests into the instruction.", flag_values=values
    )
    absl_flags.DEFINE_bool(
        "message", True, "generate: put the message of one failing test into the instruction.", flag_values=values
    )
    absl_flags.DEFINE_bool(
        "docstrings", True, "generate: put the docstrings of removed code into the instruction.", flag_values=values
    )
    whole("runs", 5, "validate: gradings of each task; generate: runs of the unbroken suite.")
    whole("jobs", os.cpu_count() or 1, "Number of concurrent sandboxes.")
    return ()


def main(values, words):
    if not words:
        raise UserError(f"a command is missing: {', '.join(COMMANDS)}; --help says what they do")
    command, *paths = words
    if command not in COMMANDS:
        raise UserError(f"{command!r} is not a command; use {', '.join(COMMANDS)}")
    if len(paths) != (command != "generate"):
        expected = "no path, but --repo and --out" if command == "generate" else "one path, of a task or of tasks"
        raise UserError(f"{command} takes {expected}; the arguments were {' '.join(paths) or 'none'}")
    {"generate": generate, "validate": validate, "show": show}[command](values, *map(Path, paths))


def generate(values):
    from composer_jax.tasks.repository.baseline_run import add_remedy
    from composer_jax.tasks.repository.build import BuildRequest, build
    from composer_jax.tasks.repository.instruction import InstructionStyle

    for name in ("repo", "out"):
        if values[name].value is None:
            raise UserError(f"generate needs --{name}: {values[name].help}")
    request = BuildRequest(
        repository=Path(values.repo),
        out=Path(values.out),
        count=values.count,
        kinds=values.kinds,
        seed=values.seed,
        packages=Path(values.packages) if values.packages else None,
        requirements=tuple(values.requirements or ()),
        jobs=values.jobs,
        runs=values.runs,
        hide_tests=values.hide_tests,
        style=InstructionStyle(docstrings=values.docstrings, tests=values.names, message=values.message),
        split=values.split,
    )
    built = asyncio.run(build(request))
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(built.kinds.items()))
    rejected = ", ".join(f"{count} by {gate!r}" for gate, count in built.rejected.most_common())
    print(f"wrote {len(built.tasks)} tasks to {request.out / 'tasks'}: {kinds or 'none'}")
    if built.uncollected:
        file, reason = next(iter(built.uncollected.items()))
        print(f"{len(built.uncollected)} test files cannot be imported, the first {file}: {add_remedy(reason)}")
    print(f"rejected: {rejected or 'none'} (see {request.out / 'rejected.jsonl'})")
    if len(built.tasks) < request.count:
        print(
            f"the {built.tests} tests that pass every time gave {len(built.tasks)} of {request.count} tasks; try more "
            "kinds or another seed"
        )


def validate(values, path):
    from composer_jax.observe.progress import Progress
    from composer_jax.sandbox import LocalSandboxPool
    from composer_jax.tasks.network import require_network
    from composer_jax.tasks.suites.run import SUITE_LIMITS
    from composer_jax.tasks.validate import validate as validate_tasks

    refused = []
    tasks = read(values, path, refused)
    require_network(tasks, values.network, "--network=host")

    async def run():
        with Progress(len(tasks), "tasks", "validate") as progress:
            async with LocalSandboxPool(SUITE_LIMITS, size=values.jobs, network=values.network == "host") as pool:
                return await validate_tasks(
                    tasks, pool, values.runs, values.jobs, after_task=lambda one: progress.update(last=one.verdict)
                )

    validations = asyncio.run(run())
    target = (path if path.is_dir() else path.parent) / "validation.json"
    target.write_text(json.dumps([{**vars(one), "verdict": one.verdict} for one in validations], indent=1))
    invalid = [one for one in validations if not one.valid]
    for one in invalid:
        print(f"{one.task_id}: {one.verdict}; {one.detail}")
    for error in refused:
        print(f"left out: {error}")
    total = len(validations) + len(refused)
    print(f"{len(validations) - len(invalid)} of {total} tasks are valid in {values.runs} runs (see {target})")
    if invalid or refused:
        sys.exit(EXIT_INVALID)


def show(values, path):
    from composer_jax.tasks.harbor.directory import gold_patch

    tasks = read(values, path)
    for task in tasks:
        metadata = task.metadata
        print(f"{task.id}  {metadata.get('kind', task.family)}  {metadata.get('note', '')}")
        if "difficulty" in metadata:
            print("  difficulty " + ", ".join(f"{name} {value}" for name, value in metadata["difficulty"].items()))
        if len(tasks) == 1:
            print(f"\n{task.instruction}")
            print(gold_patch(task, metadata["gold"]) if "gold" in metadata else metadata.get("gold_patch", ""))


def read(values, path, refused=None):
    from composer_jax.tasks.formats import ReadOptions, read_tasks

    options = ReadOptions(
        repos=Path(values.repos) if values.repos else None, packages=Path(values.packages) if values.packages else None
    )
    return read_tasks(path, options, refused)


if __name__ == "__main__":
    flags.run(main, define=define, arguments="COMMAND [PATH]", processes=hosts.NO_DEVICES)
