"""Validates tasks: the untouched workspace must score 0 and the known solution 1, in every run."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from composer_jax.errors import UserError
from composer_jax.sandbox import Change, SandboxPool
from composer_jax.tasks.grader import CaseGrader
from composer_jax.tasks.grading import changes_from_texts, grade, initial_changes
from composer_jax.tasks.images import container_pool
from composer_jax.tasks.patches.git_diff import changes_from_patch
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
        unknown (no solution is known, or the task cannot be graded here)."""
        if self.valid:
            return "valid"
        if len(set(self.nothing)) > 1 or len(set(self.gold)) > 1:
            return "flaky"
        if any(self.nothing):
            return "solved"
        return "wrong" if self.gold else "unknown"


def gold_changes(task: Task) -> dict[str, Change] | None:
    """Returns the changes of a workspace with the solution in the task's metadata, or None without one.

    Supports the metadata of generated tasks and of SWE-bench and SWE-smith rows.
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

    A task with an image is graded in its own containers. A task that cannot be graded here gets the verdict unknown,
    with the reason as its detail, and does not stop the others.

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
            except UserError as error:
                validation = Validation(task.id, (), (), str(error))
            after_task(validation)
            return validation

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(validate_one(task)) for task in tasks]
    return [job.result() for job in running]


async def _validate(task: Task, pool: SandboxPool, runs: int) -> Validation:
    nothing, solved, detail, gold = [], [], "", gold_changes(task)
    cases = [(0.0, initial_changes(task), nothing)]
    if gold is None:
        detail = "no solution is known"
    else:
        cases.append((1.0, gold, solved))
    for expected, changes, rewards in cases:
        for _ in range(runs):
            result = await grade(task, changes, pool)
            rewards.append(result.reward)
            if result.reward != expected:
                detail = detail or f"{'no-op' if expected == 0.0 else 'gold'} scores {result.reward:g}: {result.detail}"
    return Validation(task.id, tuple(nothing), tuple(solved), detail)
