"""Random patches and edits of random files, against git and a reference: `python -m benchmarks.fuzz_patches`.

Unified diffs, envelopes and edits of edit_file are made for files with every mixture of line ends, with a byte order
mark, with Latin-1, and with blank and repeated lines. Some are damaged: other line numbers, missing or other lines, a
file that has changed since. Most are written as git or the envelope's format writes them, others as models do: with
line ends as read_file shows them, in a fence, a here-document or JSON, with blank lines between their parts, with
characters missing or added anywhere. Nothing may raise; an error is one sentence and leaves every file as it was; the
result is that of benchmarks/patch_reference.py, and that of `git apply` where both apply a diff. Prints one JSON
object: what became of patches and edits, how git compares, and the first that went wrong. Ends with status 1 if there
are any.

    --cases=N: patches and edits in all    --seed=N: other ones
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.patch_reference import edit_problem
from benchmarks.random_patches import FuzzCase, PatchWriter
from composer_jax.agent.tools import execute_call, select_tools
from composer_jax.agent.workspace import Workspace
from composer_jax.data.chat.messages import ToolCall
from composer_jax.observe.progress import Progress
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.task import Task

_TOOLS = select_tools(("repository/edit_file", "repository/apply_patch"))
_BATCH = 250  # diffs of one `git apply`
_TASK = Task("fuzz", "fuzz", "train", "", {}, (), CaseGrader((Case("a", "f", (), None),)))


async def run_case(case: FuzzCase) -> tuple[str, dict[str, bytes]]:
    """Returns the observation of the case's call and the files after it."""
    workspace = Workspace(_TASK, None)
    for path, data in case.before.items():
        workspace.write(path, data)
    call = ToolCall("edit_file" if case.kind == "edit" else "apply_patch", dict(case.arguments))
    answer = await execute_call(call, _TOOLS, workspace)
    return answer, dict(workspace.files)


def problem_of(case: FuzzCase, answer: str, after: Mapping[str, bytes]) -> str | None:
    """What is wrong with the observation and the files after a case; None if nothing is."""
    is_refused = answer.startswith("ERROR ")
    if is_refused and after != case.before:
        return "an error changed files"
    if is_refused and len(answer.split()) < 4:
        return "an error is no sentence"
    if not case.is_known:
        return None
    if case.kind == "edit":
        old, new = case.arguments["old"], case.arguments["new"]
        text, result = (files["f"].decode(errors="surrogateescape") for files in (case.before, after))
        return edit_problem(text, old, new, None if is_refused else result)
    if is_refused != (case.after is None):
        return "refused" if is_refused else "applied"
    return None if is_refused or after == case.after else "has another result"


def apply_with_git(cases: Mapping[int, FuzzCase], folder: Path) -> dict[int, dict[str, bytes]]:
    """Returns the files of those cases whose diffs git applies. The paths of cases have no folder in common."""
    for case in cases.values():
        for path, data in case.before.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    left = dict(cases)
    while left:
        # A line that is none of a diff ends what a wrong count would go on with.
        texts = {number: f"case {number}\n{case.arguments['patch']}" for number, case in left.items()}
        command = ["git", "-c", "core.quotePath=false", "apply", "--whitespace=nowarn", "-"]
        done = subprocess.run(
            command, cwd=folder, env=_git_env(folder), input="".join(texts.values()).encode(), capture_output=True
        )
        if done.returncode == 0:
            break
        failed = _failed_cases(done.stderr.decode(errors="replace"), texts, left)
        left = {number: case for number, case in left.items() if number not in failed}
    return {number: _files_of(folder / _folder_of(case), folder) for number, case in left.items()}


def _failed_cases(errors: str, texts: Mapping[int, str], cases: Mapping[int, FuzzCase]) -> set[int]:
    """The cases that git's errors name, by a path or by a line of its input."""
    numbers = {_folder_of(case): number for number, case in cases.items()}
    failed = {numbers[folder] for folder in re.findall(r"c[0-9a-f]+(?=/)", errors) if folder in numbers}
    for line in map(int, re.findall(r" line (\d+)", errors)):
        for number, text in texts.items():
            line -= text.count("\n")
            if line <= 0:
                failed.add(number)
                break
    if not failed:
        raise RuntimeError(f"git apply failed without naming a patch: {errors[:500]}")
    return failed


def _folder_of(case: FuzzCase) -> str:
    paths = re.findall(r"c[0-9a-f]+(?=/)", case.arguments["patch"])
    return paths[0]


def _files_of(below: Path, folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in below.rglob("*") if path.is_file()}


def _git_env(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CEILING_DIRECTORIES": str(folder.parent)}


async def fuzz(cases: int, seed: int, on_case: Callable[[], object] = bool) -> dict[str, Any]:
    """Returns what became of random patches and edits: counts, and those that went wrong."""
    writer, counts, git, wrong = PatchWriter(seed), Counter[str](), Counter[str](), []
    batch: dict[int, FuzzCase] = {}
    results: dict[int, tuple[str, dict[str, bytes]]] = {}

    def report(case: FuzzCase, answer: str, problem: str) -> None:
        wrong.append({"problem": problem, "answer": answer, "case": repr(case)})

    def compare_batch() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            applied = apply_with_git(batch, Path(scratch))
        for number, case in batch.items():
            answer, after = results[number]
            is_refused = answer.startswith("ERROR ")
            git[
                f"{'refused' if is_refused else 'applied'} here, {'applied' if number in applied else 'refused'} by git"
            ] += 1
            if not is_refused and number in applied and applied[number] != after:
                report(case, answer, f"git makes {applied[number]}")
        batch.clear()
        results.clear()

    for number in range(cases):
        case = writer.case()
        try:
            answer, after = await run_case(case)
        except Exception as error:  # what this looks for
            report(case, repr(error), "raised")
            continue
        counts[f"{case.kind} {'refused' if answer.startswith('ERROR ') else 'applied'}"] += 1
        if problem := problem_of(case, answer, after):
            report(case, answer, problem)
        if case.as_git:
            batch[number], results[number] = case, (answer, after)
        if len(batch) == _BATCH:
            compare_batch()
        on_case()
    if batch:
        compare_batch()
    return {
        "cases": cases,
        **dict(sorted(counts.items())),
        "git": dict(git),
        "wrong": len(wrong),
        "wrong_cases": wrong[:5],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args()
    with Progress(o.cases, "cases", "fuzz") as progress:
        result = asyncio.run(fuzz(o.cases, o.seed, lambda: progress.update(1)))
    print(json.dumps(result))
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
