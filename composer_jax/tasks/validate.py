"""Validates tasks: the untouched workspace must score 0 and the known solution 1, in every run."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.sandbox import Change, Sandbox, SandboxFileError, SandboxKilled, SandboxPool
from composer_jax.tasks.formats.harbor_dir import expand_variables
from composer_jax.tasks.grader import CaseGrader
from composer_jax.tasks.grading import changes_from_texts, grade, initial_changes
from composer_jax.tasks.images import container_pool
from composer_jax.tasks.patches.git_diff import changes_from_patch
from composer_jax.tasks.retry import apply_layers, retry_if_sandbox_dies
from composer_jax.tasks.task import Task

RUNS = 5


@dataclass(frozen=True)
class Validation:
    """nothing, gold: the rewards of the untouched and of the solved workspace, one per run; gold is empty without a
    known solution. detail: the first unexpected result, or empty."""

    task_id: str
    nothing: tuple[float, ...]
    gold: tuple[float, ...]
    detail: str

    @property
    def valid(self) -> bool:
        return bool(self.gold) and set(self.nothing) == {0.0} and set(self.gold) == {1.0}

    @property
    def verdict(self) -> str:
        """One word: valid, solved (the untouched workspace scores), flaky (runs differ), wrong (the solution fails), or
        unknown (no solution is known, the task cannot be graded here, or it kills its sandbox)."""
        if self.valid:
            return "valid"
        if len(set(self.nothing)) > 1 or len(set(self.gold)) > 1:
            return "flaky"
        if any(self.nothing):
            return "solved"
        return "wrong" if self.gold else "unknown"


def gold_changes(task: Task) -> dict[str, Change] | None:
    """Returns the changes of a workspace with the solution in the task's metadata, or None without one.

    Supports the metadata of generated tasks and of SWE-bench and SWE-smith rows; run_solution is for Harbor's.
    """
    metadata, changes = task.metadata, initial_changes(task)
    if "gold" in metadata:
        return changes | changes_from_texts(metadata["gold"], task.repository)
    edits = metadata.get("bugs") or [metadata]
    if isinstance(task.grader, CaseGrader) and all({"path", "old", "new"} <= set(edit) for edit in edits):
        for edit in edits:
            text = changes[edit["path"]].data.decode()
            changes[edit["path"]] = Change("file", text.replace(edit["old"], edit["new"]).encode())
        return changes
    if task.repository is not None and "gold_patch" in metadata:
        is_reverse = metadata.get("gold_is_reverse", False)
        return changes | changes_from_patch(task.repository, metadata["gold_patch"], is_reverse)
    return None


async def validate(
    tasks: Sequence[Task],
    pool: SandboxPool,
    runs: int = RUNS,
    jobs: int = 1,
    after_task: Callable[[Validation], None] = lambda validation: None,
) -> list[Validation]:
    """Grades every task `runs` times untouched and `runs` times solved; returns results in the order of the tasks.

    A task with an image is graded in its own containers. A task that cannot be graded here, or whose tests or solution
    kill the sandbox, gets the verdict unknown, with the reason as its detail, and does not stop the others.

    jobs: tasks at once. after_task: called with each result.
    """
    turns = asyncio.Semaphore(jobs)

    async def validate_one(task: Task) -> Validation:
        async with turns:
            try:
                if task.image is None:
                    validation = await _validate(task, pool, runs)
                else:
                    async with await asyncio.to_thread(container_pool, task, 1) as containers:  # may build the image
                        validation = await _validate(task, containers, runs)
            except (UserError, SandboxKilled) as error:
                validation = Validation(task.id, (), (), str(error))
            after_task(validation)
            return validation

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(validate_one(task)) for task in tasks]
    return [job.result() for job in running]


async def _validate(task: Task, pool: SandboxPool, runs: int) -> Validation:
    nothing, solved, detail, gold = [], [], "", gold_changes(task)
    has_script = gold is None and "solution" in task.metadata
    if gold is None and not has_script:
        detail = "no solution is known"
    for _ in range(runs):
        result = await grade(task, initial_changes(task), pool)
        nothing.append(result.reward)
        if result.reward != 0.0:
            detail = detail or f"no-op scores {result.reward:g}: {result.detail}"
    for _ in range(runs if gold is not None or has_script else 0):
        changes, problem = (gold, "") if gold is not None else await run_solution(task, pool)
        result = await grade(task, changes, pool)
        solved.append(result.reward)
        if result.reward != 1.0:
            detail = detail or f"gold scores {result.reward:g}: {result.detail}{problem}"
    return Validation(task.id, tuple(nothing), tuple(solved), detail)


async def run_solution(task: Task, pool: SandboxPool) -> tuple[dict[str, Change], str]:
    """Returns the changes that solution/solve.sh of a Harbor task leaves in the workspace, and what it complained of.

    It runs as an agent's commands do, with the solution's folder at /solution. Raises what retry_if_sandbox_dies does,
    and UserError when its variables need one that the environment of this process lacks.
    """
    folder = Path(task.metadata["solution"])
    env = expand_variables(task.metadata["solution_environment"], f"{folder.with_name('task.toml')} [solution]")
    variables = [f"{name}={value}" for name, value in env.items()]
    folders = (task.repository, task.packages, folder)
    repository, packages, solution = [await pool.trees.get(folder) for folder in folders]

    async def acquire() -> Sandbox:
        sandbox = await pool.acquire({}, repository, packages=packages, network=task.network, solution=solution)
        return await apply_layers(sandbox, initial_changes(task))

    async def run(sandbox: Sandbox) -> tuple[dict[str, Change], str]:
        async with sandbox:
            script = ["env", *variables, "bash", "/solution/solve.sh"]
            result = await sandbox.run(script, timeout_s=task.metadata["solution_timeout_s"])
            last_line = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:] or ["nothing"]
            ended = f"; solve.sh ended with {result.outcome}, its last words: {last_line[0][:200]}"
            try:
                return await sandbox.changes(), "" if result.outcome == "ok" else ended
            except SandboxFileError as error:
                return initial_changes(task), f"; what solve.sh left cannot be read: {error}"

    return await retry_if_sandbox_dies(acquire, run)
