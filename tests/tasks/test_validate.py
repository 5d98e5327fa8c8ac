"""Validation: tasks that are valid, flaky, solved, wrong or unknown."""

import asyncio
from dataclasses import replace

from composer_jax.demo import bugfix
from composer_jax.demo.generate import generate
from composer_jax.tasks import SuiteGrader, Task
from composer_jax.tasks.validate import Validation, gold_changes, validate
from tests.tasks.conftest import lay

BROKEN = "def one():\n    return 2\n"
TESTS = "from one import one\n\n\ndef test_one():\n    assert one() == 1\n"


def make(tmp_path, packages, code, gold, name):
    repository = lay(tmp_path / name, {"one.py": code, "test_one.py": TESTS})
    grader = SuiteGrader(("test_one.py::test_one",), timeout_s=10)
    return Task(
        name,
        "repository",
        "train",
        "Repair it.",
        {},
        ("finish",),
        grader,
        {"gold": {"one.py": gold}},
        repository=repository,
        packages=packages,
    )


def test_every_task_gets_its_verdict(pool, packages, tmp_path):
    right = BROKEN.replace("2", "1")
    flaky = "import random\n\n\ndef one():\n    return random.SystemRandom().choice([1] * 9 + [2] * 9)\n"
    tasks = [
        make(tmp_path, packages, BROKEN, right, "valid"),
        make(tmp_path, packages, right, right, "solved"),
        make(tmp_path, packages, BROKEN, BROKEN, "wrong"),
        make(tmp_path, packages, BROKEN, flaky, "flaky"),
        bugfix.generate("train", 0, 0, bugs=2),
    ]
    done = []
    validations = asyncio.run(validate(tasks, pool, runs=2, jobs=4, after_task=done.append))
    assert [one.verdict for one in validations[:3]] == ["valid", "solved", "wrong"]
    assert validations[1].detail.startswith("no-op scores 1") and validations[2].detail.startswith("gold scores 0")
    assert validations[4].valid and validations[4].gold == (1.0, 1.0)
    assert sorted(one.task_id for one in done) == sorted(task.id for task in tasks)


def test_verdicts_of_rewards():
    def verdict(nothing, gold):
        return Validation("t", nothing, gold, "").verdict

    assert verdict((0.0, 0.0), (1.0, 1.0)) == "valid"
    assert verdict((0.0, 0.0), (1.0, 0.0)) == "flaky"
    assert verdict((0.0, 1.0), (1.0, 1.0)) == "flaky"
    assert verdict((1.0, 1.0), (1.0, 1.0)) == "solved"
    assert verdict((0.0, 0.0), (0.0, 0.0)) == "wrong"


def test_a_task_without_a_known_solution_is_graded_untouched_only(pool, packages, tmp_path):
    task = replace(make(tmp_path, packages, BROKEN, BROKEN, "t"), metadata={})
    assert gold_changes(task) is None
    validation = asyncio.run(validate([task], pool, runs=1))[0]
    assert (validation.verdict, validation.nothing, validation.gold) == ("unknown", (0.0,), ())


def test_the_solution_of_a_swe_bench_row_is_known(pool, packages, tmp_path):
    patch = "--- a/one.py\n+++ b/one.py\n@@ -1,2 +1,2 @@\n def one():\n-    return 2\n+    return 1\n"
    task = replace(make(tmp_path, packages, BROKEN, BROKEN, "t"), metadata={"gold_patch": patch})
    assert asyncio.run(validate([task], pool, runs=1))[0].valid


def test_a_task_that_cannot_be_graded_here_stops_no_other(pool, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker, no podman
    good = generate("bugfix", "train", 0, 0)
    with_image = Task("i", "swe_bench", "heldout", "Do it.", {}, (), good.grader, image="some/image")
    validations = asyncio.run(validate([with_image, good], pool, runs=1))
    assert [one.verdict for one in validations] == ["unknown", "valid"]
    assert "docker" in validations[0].detail
