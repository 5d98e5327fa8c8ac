"""Whether tasks are what they say: doing nothing scores 0, the known solution scores 1, every time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from composer_jax.errors import UserError
from composer_jax.sandbox import Change, SandboxPool
from composer_jax.tasks.formats import swe_bench
from composer_jax.tasks.grader import CaseGrader
from composer_jax.tasks.grading import changes_from_texts, grade, initial_changes
from composer_jax.tasks.images.containers import container_pool
from composer_jax.tasks.task import Task

RUNS = 5


@dataclass(frozen=True)
class Validation:
    """nothing, gold: the rewards of each run; gold is empty where no solution is known. detail: what the first run that
    went wrong said, or nothing."""

    task_id: str
    nothing: tuple[float, ...]
    gold: tuple[float, ...]
    detail: str

    @property
    def valid(self) -> bool:
        return bool(self.gold) and set(self.nothing) == {0.0} and set(self.gold) == {1.0}

    @property
    def verdict(self) -> str:
        """One word: valid, solved (doing nothing scores), flaky (runs differ), wrong (the solution fails), or unknown
        (no solution is known, or the task cannot be graded here)."""
        if self.valid:
            return "valid"
        if len(set(self.nothing)) > 1 or len(set(self.gold)) > 1:
            return "flaky"
        if any(self.nothing):
            return "solved"
        return "wrong" if self.gold else "unknown"


def gold_changes(task: Task) -> dict[str, Change] | None:
    """The changes of a workspace in which the task is solved as its metadata knows to, or None if it does not.

    Metadata of generated tasks and of SWE-bench and SWE-smith rows are understood.
    """
    know, changes = task.metadata, initial_changes(task)
    if "gold" in know:
        return changes | changes_from_texts(know["gold"], task.repository)
    if isinstance(task.grader, CaseGrader) and {"path", "old", "new"} <= set(know):
        text = changes[know["path"]].data.decode()
        return {**changes, know["path"]: Change("file", text.replace(know["old"], know["new"]).encode())}
    if task.repository is not None and "gold_patch" in know:
        return changes | swe_bench.gold_changes(task)
    return None


async def validate(
    tasks: Sequence[Task],
    pool: SandboxPool,
    runs: int = RUNS,
    jobs: int = 1,
    after_task: Callable[[Validation], None] = lambda validation: None,
) -> list[Validation]:
    """Grades every task `runs` times untouched and `runs` times solved; in the order of the tasks.

    A task with an image is graded in containers of its own. One that cannot be graded here is unknown, with the reason
    as its detail, and the others go on.

    jobs: tasks at once. after_task: called as each is done.
    """
    turns = asyncio.Semaphore(jobs)

    async def one(task: Task) -> Validation:
        async with turns:
            try:
                found = await _in_its_pool(task, pool, runs)
            except UserError as error:
                found = Validation(task.id, (), (), str(error))
            after_task(found)
            return found

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(task)) for task in tasks]
    return [job.result() for job in running]


async def _in_its_pool(task: Task, pool: SandboxPool, runs: int) -> Validation:
    if task.image is None:
        return await _validate(task, pool, runs)
    async with await asyncio.to_thread(container_pool, task, 1) as own:  # may build the image
        return await _validate(task, own, runs)


async def _validate(task: Task, pool: SandboxPool, runs: int) -> Validation:
    nothing, solved, wrong, gold = [], [], "", gold_changes(task)
    cases = [(0.0, initial_changes(task), nothing)]
    if gold is None:
        wrong = "no solution is known"
    else:
        cases.append((1.0, gold, solved))
    for wanted, changes, rewards in cases:
        for _ in range(runs):
            result = await grade(task, changes, pool)
            rewards.append(result.reward)
            if result.reward != wanted:
                wrong = wrong or f"{'no-op' if wanted == 0.0 else 'gold'} scores {result.reward:g}: {result.detail}"
    return Validation(task.id, tuple(nothing), tuple(solved), wrong)
