"""Whether tasks are what they say: doing nothing scores 0, the known solution scores 1, every time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from composer_jax.errors import UserError
from composer_jax.sandbox import GONE, Change, SandboxPool
from composer_jax.tasks.grader import CaseGrader
from composer_jax.tasks.grading import grade, untouched
from composer_jax.tasks.task import Task

RUNS = 5


@dataclass(frozen=True)
class Validation:
    """nothing, gold: the rewards of each run. detail: what the first run that went wrong said, or ""."""

    task_id: str
    nothing: tuple[float, ...]
    gold: tuple[float, ...]
    detail: str

    @property
    def valid(self) -> bool:
        return bool(self.gold) and set(self.nothing) == {0.0} and set(self.gold) == {1.0}

    @property
    def verdict(self) -> str:
        """One word: valid, solved (doing nothing scores), flaky (runs differ), or wrong (the solution fails)."""
        if self.valid:
            return "valid"
        if len(set(self.nothing)) > 1 or len(set(self.gold)) > 1:
            return "flaky"
        return "solved" if any(self.nothing) else "wrong"


def gold_changes(task: Task) -> dict[str, Change]:
    """The changes of a workspace in which the task is solved as its metadata knows to.

    Raises UserError for a task that knows no solution.
    """
    know, changes = task.metadata, untouched(task)
    if "gold" in know:
        for path, text in know["gold"].items():
            there = None if task.repository is None else task.repository / path
            mode = there.stat().st_mode & 0o777 if there is not None and there.is_file() else 0o644
            changes[path] = GONE if text is None else Change("file", text.encode(), mode)
        return changes
    if isinstance(task.grader, CaseGrader) and {"path", "old", "new"} <= set(know):
        text = changes[know["path"]].data.decode()
        return {**changes, know["path"]: Change("file", text.replace(know["old"], know["new"]).encode())}
    raise UserError(f"task {task.id} knows no solution, so it cannot be validated")


async def validate(
    tasks: Sequence[Task],
    pool: SandboxPool,
    runs: int = RUNS,
    jobs: int = 1,
    solution: Callable[[Task], Mapping[str, Change]] = gold_changes,
    after_task: Callable[[Validation], None] = lambda validation: None,
) -> list[Validation]:
    """Grades every task `runs` times untouched and `runs` times solved; in the order of the tasks.

    jobs: tasks at once. solution: what solves a task. after_task: called as each is done.
    """
    turns = asyncio.Semaphore(jobs)

    async def one(task: Task) -> Validation:
        async with turns:
            found = await _validate(task, pool, runs, solution(task))
            after_task(found)
            return found

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(task)) for task in tasks]
    return [job.result() for job in running]


async def _validate(task: Task, pool: SandboxPool, runs: int, gold: Mapping[str, Change]) -> Validation:
    nothing, solved, wrong = [], [], ""
    for wanted, changes, rewards in ((0.0, untouched(task), nothing), (1.0, gold, solved)):
        for _ in range(runs):
            result = await grade(task, changes, pool)
            rewards.append(result.reward)
            if result.reward != wanted:
                wrong = wrong or f"{'no-op' if wanted == 0.0 else 'gold'} scores {result.reward:g}: {result.detail}"
    return Validation(task.id, tuple(nothing), tuple(solved), wrong)
