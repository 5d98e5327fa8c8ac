"""Writes a task family. `python -m examples.task_family` prints a task and its grades; to train on the family:

    python -m launch.pipeline --config=examples/task_family.py --workdir=runs/family

A family is a class without constructor arguments whose `generate` returns task number `index` of a stream: a pure
function of split, seed and index. Training and evaluation draw from different splits, which must not share tasks.
"""

import asyncio
from typing import Any

from ml_collections import ConfigDict

from composer_jax.sandbox import LocalSandboxPool
from composer_jax.seeds import seeded_random
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.grading import changes_from_texts, grade
from composer_jax.tasks.task import Split, Task
from composer_jax.tasks.visible_cases import RUN_TESTS, visible_cases
from configs import tiny

VERBS = {"train": ("add", "shift", "raise"), "heldout": ("move", "lift"), "unseen": ("push",)}


class Offset:
    """A function returns its argument instead of its argument plus a constant, which its name says."""

    def generate(self, split: Split, seed: int, index: int) -> Task:
        rng = seeded_random("offset", split, seed, index)
        offset = rng.randrange(10, 100)
        name = f"{rng.choice(VERBS[split])}_{offset}"
        cases = [Case("offset", name, (x,), x + offset) for x in rng.sample(range(100), 4)]
        return Task(
            id=f"offset-{split}-{seed}-{index}",
            family="offset",
            split=split,
            instruction=f"Make {name} return x + {offset}.",
            files={
                "offset.py": f"def {name}(x):\n    return x\n",
                "run_tests.py": RUN_TESTS,
                "cases.json": visible_cases(cases[:1]),
            },
            tools=("run_tests", "read", "edit", "finish"),
            grader=CaseGrader(tuple(cases)),
            metadata={"path": "offset.py", "old": "return x", "new": f"return x + {offset}"},
        )


def get_config() -> ConfigDict:
    """The smoke run of configs/tiny.py, with this family in RL and in an evaluation suite."""
    config: Any = tiny.get_config("smoke")
    config.tasks.families.offset = "examples.task_family:Offset"
    config.rl.groups = {"offset": 2}
    config.evaluate.suites.offset = {"family": "offset", "tasks": 4, "attempts": 2}
    config.evaluate.headline = ("offset",)
    return config


async def grades(task: Task) -> tuple[float, float]:
    """The rewards of the untouched workspace and of the solution; a good task gives 0 and 1."""
    path, old, new = (task.metadata[key] for key in ("path", "old", "new"))
    untouched = dict(task.files)
    solved = untouched | {path: task.files[path].replace(old, new)}
    async with LocalSandboxPool(size=1) as pool:
        results = [await grade(task, changes_from_texts(files, None), pool) for files in (untouched, solved)]
    return results[0].reward, results[1].reward


if __name__ == "__main__":
    task = Offset().generate("train", seed=0, index=0)
    print(task.instruction, task.files["offset.py"], sep="\n")
    print("rewards:", *asyncio.run(grades(task)))
