"""Validation: tasks that are valid, solved, wrong or unknown, and verdicts of rewards."""

import asyncio
import dataclasses

from composer_jax.demo import bugfix
from composer_jax.sandbox import SandboxKilled
from composer_jax.tasks import SuiteGrader, Task
from composer_jax.tasks.formats import ReadOptions, read_tasks
from composer_jax.tasks.validate import Validation, gold_changes, validate
from tests.demo.generate import generate
from tests.tasks.conftest import lay

BROKEN = "def one():\n    return 2\n"
TESTS = "from one import one\n\n\ndef test_one():\n    assert one() == 1\n"


def make(tmp_path, packages, code, metadata, name):
    repository = lay(tmp_path / name, {"one.py": code, "test_one.py": TESTS})
    grader = SuiteGrader(("test_one.py::test_one",), timeout_s=10)
    more = {"metadata": metadata, "repository": repository, "packages": packages}
    return Task(name, "repository", "train", "Repair it.", {}, ("finish",), grader, **more)


def test_every_task_gets_its_verdict(pool, packages, tmp_path):
    right = BROKEN.replace("2", "1")
    patch = "--- a/one.py\n+++ b/one.py\n@@ -1,2 +1,2 @@\n def one():\n-    return 2\n+    return 1\n"
    tasks = [
        make(tmp_path, packages, BROKEN, {"gold": {"one.py": right}}, "valid"),
        make(tmp_path, packages, right, {"gold": {"one.py": right}}, "solved"),
        make(tmp_path, packages, BROKEN, {"gold": {"one.py": BROKEN}}, "wrong"),
        make(tmp_path, packages, BROKEN, {}, "without a known solution"),
        make(tmp_path, packages, BROKEN, {"gold_patch": patch}, "of SWE-bench"),
        bugfix.generate("train", 0, 0, bugs=2),
    ]
    done = []
    validations = asyncio.run(validate(tasks, pool, runs=1, jobs=4, after_task=done.append))
    assert [one.verdict for one in validations] == ["valid", "solved", "wrong", "unknown", "valid", "valid"]
    assert validations[1].detail.startswith("no-op scores 1") and validations[2].detail.startswith("gold scores 0")
    assert gold_changes(tasks[3]) is None and (validations[3].nothing, validations[3].gold) == ((0.0,), ())
    assert sorted(one.task_id for one in done) == sorted(task.id for task in tasks)
    assert asyncio.run(validate(tasks[-1:], pool, runs=2))[0].gold == (1.0, 1.0)


SOLUTIONS = {
    "valid": "cp /solution/answer.txt /app/ && [ $WORD = go ] && [ $(cat data.txt) = data ]\n",
    "wrong": "echo 41 > /app/answer.txt; echo gave up >&2; exit 3\n",
    "solved": "true\n",
    "unknown": None,
}


def test_the_script_of_a_harbor_task_is_its_solution(pool, tmp_path):
    for name, script in SOLUTIONS.items():
        files = {
            "task.toml": "[environment]\nallow_internet = false\n[solution.env]\nWORD = 'go'\n",
            "instruction.md": "Write 42 into answer.txt.\n",
            "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\nCOPY *.txt /app/\n",
            "environment/data.txt": "data\n",
            "tests/test.sh": '[ "$(cat /app/answer.txt)" = 42 ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n',
            "solution/answer.txt": "42\n",
        }
        files |= {"environment/answer.txt": "42\n"} if name == "solved" else {}
        lay(tmp_path / "tasks" / name, files | ({} if script is None else {"solution/solve.sh": script}))
    tasks = read_tasks(tmp_path / "tasks", ReadOptions(store=tmp_path / "store"))
    validations = {one.task_id: one for one in asyncio.run(validate(tasks, pool, runs=2, jobs=2))}
    assert {name: one.verdict for name, one in validations.items()} == {name: name for name in SOLUTIONS}
    assert (validations["valid"].nothing, validations["valid"].gold) == ((0.0, 0.0), (1.0, 1.0))
    assert "gold scores 0" in validations["wrong"].detail
    assert validations["wrong"].detail.endswith("; solve.sh ended with nonzero, its last words: gave up")
    assert validations["unknown"].detail == "no solution is known"


def test_verdicts_of_rewards():
    def verdict(nothing, gold):
        return Validation("t", nothing, gold, "").verdict

    assert verdict((0.0, 0.0), (1.0, 1.0)) == "valid"
    assert verdict((0.0, 0.0), (1.0, 0.0)) == "flaky"
    assert verdict((0.0, 1.0), (1.0, 1.0)) == "flaky"
    assert verdict((1.0, 1.0), (1.0, 1.0)) == "solved"
    assert verdict((0.0, 0.0), (0.0, 0.0)) == "wrong"


def test_a_task_that_cannot_be_graded_here_stops_no_other(pool, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker, no podman
    good = generate("bugfix", "train", 0, 0)
    with_image = Task("i", "swe_bench", "heldout", "Do it.", {}, (), good.grader, image="some/image")
    validations = asyncio.run(validate([with_image, good], pool, runs=1))
    assert [one.verdict for one in validations] == ["unknown", "valid"]
    assert "docker" in validations[0].detail


def test_a_solution_that_kills_its_sandbox_stops_no_other_task(pool, monkeypatch, tmp_path):
    solution = {"solution": str(tmp_path), "solution_timeout_s": 10.0, "solution_environment": {}}
    killer, good = (
        dataclasses.replace(bugfix.generate("train", 0, 0), metadata=solution),
        generate("bugfix", "train", 0, 1),
    )

    async def run_solution(task, pool):
        raise SandboxKilled("2 sandboxes died under the same command")

    monkeypatch.setattr("composer_jax.tasks.validate.run_solution", run_solution)
    validations = asyncio.run(validate([killer, good], pool, runs=1))
    assert [one.verdict for one in validations] == ["unknown", "valid"]
    assert validations[0].detail == "2 sandboxes died under the same command"
