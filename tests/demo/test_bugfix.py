"""Bug-fix tasks: every bug fails its tests, the oracle repairs it, and nothing less does."""

import asyncio
import json
import re

import pytest

from composer_jax.demo import bugfix, functions
from composer_jax.demo.bugfix import TWO_BUGS
from composer_jax.demo.functions import COMPOSED, KINDS, TRAINED_KINDS
from composer_jax.demo.splits import function_names
from composer_jax.errors import UserError
from composer_jax.seeds import seeded_random
from composer_jax.tasks.grading import grade, initial_changes
from tests.demo.repairs import failing, hidden, passes, repaired, right_lines, states, visible
from tests.tasks.conftest import as_changes


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
        task = bugfix.generate(split, 1, index, kind if kind != COMPOSED else "mix", bugs=1)
        assert task.metadata["kind"] == kind and task.max_turns is None
        for lines in states(task):
            files, is_right = repaired(task, lines), lines == right_lines(task)
            assert all(passes(files, visible(task))) == all(passes(files, hidden(task))) == is_right, (task.id, lines)


def test_one_or_two_functions_fail_and_no_other():
    counts = []
    for index in range(300):
        task = bugfix.generate("heldout", 2, index)
        broken = {bug["function"] for bug in task.metadata["bugs"]}
        assert failing(task.files, visible(task)) == failing(task.files, hidden(task)) == broken
        counts.append(len(broken))
    assert set(counts) == {1, 2} and abs(counts.count(2) / 300 - TWO_BUGS) < 0.08
    assert len(bugfix.generate("unseen", 2, 0).metadata["bugs"]) == 1
    with pytest.raises(UserError, match="bugs=3; a bug-fixing task has 1 or 2"):
        bugfix.generate("train", 2, 0, bugs=3)


def test_every_edit_is_unambiguous_whatever_was_edited_before():
    for index in range(60):
        task = bugfix.generate("train", 4, index, bugs=2)
        for lines in states(task):
            files = repaired(task, lines)
            assert all(files[bug["path"]].count(lines[bug["function"]]) == 1 for bug in task.metadata["bugs"])


def test_every_function_has_its_specification():
    for index in range(60):
        task = bugfix.generate("train", 5, index)
        for path, text in task.files.items():
            if path.endswith(".py") and path != "run_tests.py":
                first_words = re.findall(r"^    # (\w+)", text, re.MULTILINE)
                assert text.count("def ") == len(first_words) == len(set(first_words)) == 2
        assert all(f"{bug['head']}\n    {bug['old']}" in task.files[bug["path"]] for bug in task.metadata["bugs"])


def test_hidden_cases_are_not_the_visible_ones():
    repeated = total = 0
    for index in range(200):
        task = bugfix.generate("train", 5, index)
        shown = {json.dumps(case[:3]) for case in visible(task)}
        repeated += sum(json.dumps(case.call) in shown for case in task.grader.cases)
        total += len(task.grader.cases)
    # Only a boundary that is the one point where two comparisons differ may come twice.
    assert repeated / total < 0.05


def test_the_unseen_kind_is_made_of_known_words_and_never_trained():
    comments, tokens = set(), set()
    for split in ("train", "heldout"):
        for index in range(500):
            for text in bugfix.generate(split, 6, index).files.values():
                lines = [line.strip() for line in text.split("\n")]
                comments |= {re.sub(r"\d+", "N", line) for line in lines if line.startswith("#")}
                tokens |= set(re.findall(r"[a-z]+|[^\w\s]+", text))
    assert "# x times N" in comments
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
        task = bugfix.generate(split, 8, index, bugs=1)
        (bug,) = task.metadata["bugs"]
        wrong = repaired(task, {bug["function"]: bug["wrong"][0]})
        sandbox = await pool.acquire(task.files)
        before = await sandbox.run(["python", "run_tests.py"])
        await sandbox.write(bug["path"], repaired(task)[bug["path"]])
        after = await sandbox.run(["python", "run_tests.py"])
        await sandbox.close()
        assert before.outcome == "nonzero" and before.exit_code == 1
        assert re.fullmatch(rf"FAIL {bug['function']}\(.*\) is .*, want .*\n", before.stdout)
        assert (after.outcome, after.stdout) == ("ok", f"PASS {len(visible(task))}\n")
        assert (await grade(task, initial_changes(task), pool)).reward == 0.0
        assert (await grade(task, as_changes(repaired(task)), pool)).reward == 1.0
        assert (await grade(task, as_changes(wrong), pool)).reward == 0.0

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
        task = bugfix.generate("train", 9, 0, "operator", bugs=1)
        (bug,) = task.metadata["bugs"]
        sandbox = await pool.acquire(repaired(task, {bug["function"]: line}))
        result = await sandbox.run(["python", "run_tests.py"])
        await sandbox.close()
        assert re.fullmatch(said, result.stdout), result
        assert result.outcome == "nonzero"
        assert result.stderr == ""

    asyncio.run(check())
