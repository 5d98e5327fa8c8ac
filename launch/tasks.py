"""Makes tasks from a Python repository with a test suite, checks tasks, and shows them.

    python -m launch.tasks generate --repo=DIR --out=DIR --count=50 --requirements=pytest
    python -m launch.tasks generate --repo=DIR --out=DIR --count=50 --packages=DIR --kinds=stub,delete_feature
    python -m launch.tasks validate PATH --runs=5
    python -m launch.tasks show PATH

generate copies the repository without caches, history and builds, runs its suite several times in sandboxes, keeps the
tests that always pass, breaks the code in many ways, and writes a Harbor directory for each way that the suite notices
and its own repair mends. The suite needs pytest and what the repository imports: --packages is a folder made by
`pip install --target DIR pytest ...`, --requirements installs into OUT/packages. The repository itself must not be
among them. The same flags give the same tasks.

validate grades each task of a path without any change, which must score 0, and with its own solution, which must score
1, several times. It writes validation.json beside them and lists the tasks that are not valid; the exit code is 1 if
there are any. The path is a task, a folder of tasks, or a .jsonl or .parquet file of SWE-bench or SWE-smith rows, whose
repositories are then in --repos. show prints what a task or each task of a path is.
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
INVALID = 1


def define(values):
    string = lambda name, meaning, default=None: absl_flags.DEFINE_string(  # noqa: E731
        name, default, meaning, flag_values=values
    )
    whole = lambda name, default, meaning, least=1: absl_flags.DEFINE_integer(  # noqa: E731
        name, default, meaning, lower_bound=least, flag_values=values
    )
    listed = lambda name, meaning: absl_flags.DEFINE_list(name, None, meaning, flag_values=values)  # noqa: E731
    string("repo", "generate: the root of the repository.")
    string("out", "generate: a folder that does not exist yet, or is empty.")
    whole("count", 50, "generate: tasks to make.")
    listed(
        "kinds",
        "generate: kinds of breakage, separated by commas (mutate: all mutations); everything if left out.",
    )
    whole("seed", 0, "generate: of every draw.", 0)
    string("packages", "A folder of installed packages, pytest among them; for validate, of rows.")
    string("repos", "validate, show: a folder of git repositories, for rows.")
    listed("requirements", "generate: what pip installs for the tests, separated by commas.")
    absl_flags.DEFINE_enum(
        "split", "train", ("train", "heldout", "unseen"), "generate: the split of the tasks.", flag_values=values
    )
    absl_flags.DEFINE_bool(
        "hide_tests", False, "generate: leave the test files with failing tests out of the workspace.",
        flag_values=values,
    )  # fmt: skip
    absl_flags.DEFINE_bool("names", True, "generate: tell the names of failing tests.", flag_values=values)
    absl_flags.DEFINE_bool("message", True, "generate: tell what one of them says.", flag_values=values)
    absl_flags.DEFINE_bool("docstrings", True, "generate: tell the docstrings of what was removed.", flag_values=values)
    whole("runs", 5, "Of each task for validate; of the suite before anything is broken for generate.")
    whole("jobs", os.cpu_count() or 1, "Sandboxes at once.")
    return ()


def main(values, words):
    if not words:
        raise UserError(f"a command is missing: {', '.join(COMMANDS)}; --help says what they do")
    command, *paths = words
    if command not in COMMANDS:
        raise UserError(f"there is no command {command!r}; use {', '.join(COMMANDS)}")
    if len(paths) != (command != "generate"):
        takes = (
            "no path, but --repo and --out" if command == "generate" else "one path, of a task or of a folder of them"
        )
        raise UserError(f"{command} takes {takes}; given were {' '.join(paths) or 'none'}")
    {"generate": generate, "validate": validate, "show": show}[command](values, *map(Path, paths))


def generate(values):
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
    print(f"rejected: {rejected or 'none'} (see {request.out / 'rejected.jsonl'})")
    if len(built.tasks) < request.count:
        print(f"the repository gave {len(built.tasks)} of {request.count} tasks; ask for more kinds or another seed")


def validate(values, path):
    from composer_jax.observe.progress import Progress
    from composer_jax.sandbox import LocalSandboxPool
    from composer_jax.tasks import validate as library
    from composer_jax.tasks.suites.run import SUITE_LIMITS

    tasks = read(values, path)

    async def run():
        with Progress(len(tasks), "tasks", "validate") as progress:
            async with LocalSandboxPool(SUITE_LIMITS, size=values.jobs) as pool:
                return await library.validate(
                    tasks, pool, values.runs, values.jobs, after_task=lambda found: progress.update(last=found.verdict)
                )

    found = asyncio.run(run())
    target = (path if path.is_dir() else path.parent) / "validation.json"
    target.write_text(json.dumps([{**vars(one), "verdict": one.verdict} for one in found], indent=1))
    bad = [one for one in found if not one.valid]
    for one in bad:
        print(f"{one.task_id}: {one.verdict}; {one.detail}")
    print(f"{len(found) - len(bad)} of {len(found)} tasks are valid in {values.runs} runs (see {target})")
    if bad:
        sys.exit(INVALID)


def show(values, path):
    from composer_jax.tasks.harbor.suite import gold_patch

    tasks = read(values, path)
    for task in tasks:
        know = task.metadata
        print(f"{task.id}  {know.get('kind', task.family)}  {know.get('note', '')}")
        if "difficulty" in know:
            print("  difficulty " + ", ".join(f"{name} {value}" for name, value in know["difficulty"].items()))
        if len(tasks) == 1:
            print(f"\n{task.instruction}")
            print(gold_patch(task, know["gold"]) if "gold" in know else know.get("gold_patch", ""))


def read(values, path):
    from composer_jax.tasks.formats import Options, read_tasks

    options = Options(
        repos=Path(values.repos) if values.repos else None, packages=Path(values.packages) if values.packages else None
    )
    return read_tasks(path, options)


if __name__ == "__main__":
    flags.run(main, define=define, arguments="COMMAND [PATH]", processes=hosts.NO_DEVICES)
