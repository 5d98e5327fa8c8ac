"""Bug-fix tasks: every bug fails its tests, the oracle repairs it, and nothing less does."""

import asyncio
import json
import re

import pytest

from composer_jax.demo import bugfix, functions
from composer_jax.demo.functions import COMPOSED, KINDS, TRAINED_KINDS
from composer_jax.demo.splits import function_names
from composer_jax.errors import UserError
from composer_jax.seeds import seeded_random
from composer_jax.tasks.grading import grade, initial_changes
from composer_jax.tasks.grading.judge_cases import same_value
from tests.tasks.conftest import as_changes


def repaired(task, line=None):
    """The workspace after the buggy line was replaced by `line` (default: the oracle's)."""
    know = task.metadata
    text = task.files[know["path"]]
    assert text.count(know["old"]) == 1
    return {**task.files, know["path"]: text.replace(know["old"], line or know["new"])}


def values(files, cases):
    """Which cases pass, evaluated here: the modules are our own one-liners."""
    results = []
    for module, function, args, want in cases:
        scope = {}
        exec(files[f"{module}.py"], scope)
        results.append(same_value(scope[function](*args), want))
    return results


def hidden(task):
    return [(*case.call, case.want) for case in task.grader.cases]


def test_a_task_is_a_function_of_its_arguments():
    assert bugfix.generate("train", 3, 5) == bugfix.generate("train", 3, 5)
    assert bugfix.generate("train", 3, 5) != bugfix.generate("train", 3, 6)
    assert bugfix.generate("train", 3, 5) != bugfix.generate("train", 4, 5)


@pytest.mark.parametrize("split", ["train", "heldout", "unseen"])
def test_thousands_of_different_tasks(split):
    tasks = [bugfix.generate(split, 0, index) for index in range(3000)]
    assert len({task.digest for task in tasks}) == len(tasks)
    assert len({task.id for task in tasks}) == len(tasks)


@pytest.mark.parametrize("kind", KINDS)
def test_bugs_fail_and_only_the_oracle_passes(kind):
    split = "unseen" if kind == COMPOSED else "train"
    for index in range(60):
        task = bugfix.generate(split, 1, index, kind if kind != COMPOSED else "mix")
        know = task.metadata
        assert know["kind"] == kind
        visible = json.loads(task.files["cases.json"])
        assert not all(values(task.files, visible))
        assert all(values(repaired(task), visible))
        assert all(values(repaired(task), hidden(task)))
        for line in (know["old"], *know["wrong"]):
            assert not all(values(repaired(task, line), hidden(task))), (task.id, line)


def test_only_the_buggy_function_fails():
    for index in range(100):
        task = bugfix.generate("heldout", 2, index)
        visible = json.loads(task.files["cases.json"])
        failing = {case[1] for case, ok in zip(visible, values(task.files, visible), strict=True) if not ok}
        assert failing == {task.metadata["function"]}


def test_every_edit_is_unambiguous_whatever_was_edited_before():
    for index in range(500):
        task = bugfix.generate("train", 4, index)
        know = task.metadata
        for line in (know["new"], *know["wrong"]):
            assert repaired(task, line)[know["path"]].count(line) == 1


def test_hidden_cases_are_not_the_visible_ones():
    repeated = total = 0
    for index in range(200):
        task = bugfix.generate("train", 5, index)
        visible = {json.dumps(case[:3]) for case in json.loads(task.files["cases.json"])}
        repeated += sum(json.dumps(case.call) in visible for case in task.grader.cases)
        total += len(task.grader.cases)
    # Only a boundary that is the one point where two comparisons differ may come twice.
    assert repeated / total < 0.05


def test_the_unseen_kind_is_made_of_known_words_and_never_trained():
    comments, tokens = set(), set()
    for split in ("train", "heldout"):
        for index in range(500):
            for text in bugfix.generate(split, 6, index).files.values():
                comments |= {re.sub(r"\d+", "N", line) for line in text.split("\n") if line.startswith("#")}
                tokens |= set(re.findall(r"[a-z]+|[^\w\s]+", text))
    rng = seeded_random("a test")
    for _ in range(200):
        f = functions.make(COMPOSED, function_names("unseen")[0], "unseen", rng)
        assert f"# {re.sub(r'[0-9]+', 'N', f.comment)}" not in comments
        used = set(re.findall(r"[a-z]+|[^\w\s]+", f"{f.comment} {f.right} {' '.join(f.wrong)}"))
        assert used <= tokens


def test_unknown_kinds_are_refused():
    with pytest.raises(UserError, match="'typo' is not a kind of bug.*operator"):
        bugfix.generate("train", 0, 0, "typo")
    with pytest.raises(UserError, match="'composed' is not a kind of bug for split train"):
        bugfix.generate("train", 0, 0, COMPOSED)
    assert COMPOSED not in TRAINED_KINDS


@pytest.mark.parametrize(("split", "index"), [("train", 0), ("train", 1), ("heldout", 2), ("unseen", 3)])
def test_in_a_real_sandbox(pool, split, index):
    async def check():
        task = bugfix.generate(split, 8, index)
        know = task.metadata
        sandbox = await pool.acquire(task.files)
        before = await sandbox.run(["python", "run_tests.py"])
        await sandbox.write(know["path"], repaired(task)[know["path"]])
        after = await sandbox.run(["python", "run_tests.py"])
        await sandbox.close()
        assert before.outcome == "nonzero" and before.exit_code == 1
        assert re.fullmatch(rf"FAIL {know['function']}\(.*\) is .*, want .*\n", before.stdout)
        assert (after.outcome, after.stdout) == ("ok", "PASS 8\n")
        assert (await grade(task, initial_changes(task), pool)).reward == 0.0
        assert (await grade(task, as_changes(repaired(task)), pool)).reward == 1.0
        assert (await grade(task, as_changes(repaired(task, know["wrong"][0])), pool)).reward == 0.0

    asyncio.run(check())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("return unknown", r"FAIL \w+\(.*\) NameError\n"),
        ("return (", r"FAIL import SyntaxError\n"),
        ("raise SystemExit(0)", r"FAIL \w+\(.*\) SystemExit\n"),
        ("return 'x' * 5000", r"FAIL \w+\(.*\) is 'x{59}, want .*\n"),
    ],
)
def test_the_runner_says_one_short_line_whatever_happens(pool, line, said):
    async def check():
        task = bugfix.generate("train", 9, 0, "operator")
        sandbox = await pool.acquire(repaired(task, line))
        result = await sandbox.run(["python", "run_tests.py"])
        await sandbox.close()
        assert re.fullmatch(said, result.stdout), result
        assert result.outcome == "nonzero"
        assert result.stderr == ""

    asyncio.run(check())
