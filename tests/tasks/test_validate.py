"""Validation: tasks that are valid, solved, wrong or unknown, and verdicts of rewards."""

import asyncio

from composer_jax.demo import bugfix
from composer_jax.tasks import SuiteGrader, Task
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
