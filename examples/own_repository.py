"""Trains on tasks made from your repository: `python -m examples.own_repository [REPOSITORY [WORKDIR [PACKAGES]]]`.

REPOSITORY has a pytest suite; without it the script makes a small one. PACKAGES is a folder of installed packages (`pip
install --target PACKAGES pytest ...`); without it pip installs pytest into WORKDIR. The script breaks the code in
several ways, makes a task of each way that the suite notices, and runs pretraining, SFT and RL at the size of a smoke
test, in which little is learned.
"""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from composer_jax import Run, pretrain, read_metrics, sft, train_rl
from composer_jax.tasks.repository.build import BuildRequest, build
from configs import tiny

STEPS, GROUPS = 2, 1  # RL steps, and tasks in each; a task is used once

FILES = {
    "shop/__init__.py": "",
    "shop/price.py": '''"""Prices in cents."""


def total(prices, discount=0):
    """The sum of all prices without the discount."""
    return sum(prices) - discount


def cheapest(prices):
    """The lowest price, 0 of none."""
    if not prices:
        return 0
    return min(prices)


def average(prices):
    """The mean price, rounded down."""
    return total(prices) // len(prices)
''',
    "tests/test_price.py": """from shop.price import average, cheapest, total


def test_total():
    assert total([1, 2], 1) == 2


def test_cheapest():
    assert cheapest([3, 1]) == 1


def test_cheapest_of_none():
    assert cheapest([]) == 0


def test_average():
    assert average([2, 5]) == 3
""",
}


def make_repository(folder: Path) -> Path:
    """A git repository with one commit."""
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    author = ["-c", "user.name=example", "-c", "user.email=example@example.invalid"]
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "A shop"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def make_tasks(repository: Path, out: Path, packages: Path | None) -> Path:
    """Tasks of the repository, one Harbor directory each, in `out`."""
    requirements = () if packages else ("pytest",)
    request = BuildRequest(
        repository, out, count=STEPS * GROUPS, kinds=("mutate",), packages=packages, requirements=requirements, runs=1
    )
    written = asyncio.run(build(request)).tasks
    print(f"{len(written)} tasks from {repository}")
    return out


def get_config(tasks: Path) -> ConfigDict:
    """The smoke run of configs/tiny.py, with RL on the tasks alone; steps are cut further."""
    config: Any = tiny.get_config("smoke")
    config.tasks.train = str(tasks)
    config.pretrain.update({"steps": 2, "evaluate_every": 2, "save_every": 2})
    config.sft.update({"steps": 2, "save_every": 2})
    config.rl.steps = STEPS
    config.rl.groups = {"repository": GROUPS}
    return config


def main(repository: str = "", workdir: str = "runs/own_repository", packages: str = "") -> None:
    folder = Path(workdir)
    source = Path(repository) if repository else make_repository(folder / "repository")
    tasks = make_tasks(source, folder / "tasks", Path(packages) if packages else None)
    with Run(get_config(tasks), folder / "run") as run:
        for stage in (pretrain, sft, train_rl):
            stage(run)
    for row in read_metrics(folder / "run" / "metrics" / "rl.jsonl"):
        print(f"step {row['step']}: reward {row['reward']:.2f}, {row['tokens']:.0f} tokens per episode")


if __name__ == "__main__":
    main(*sys.argv[1:])
