"""Where the tasks of a run come from."""

import dataclasses

import pytest

from composer_jax.demo.generate import generate
from composer_jax.errors import UserError
from composer_jax.sandbox import SandboxLimits
from composer_jax.tasks.harbor import write_task
from composer_jax.tasks.source import TaskSource
from composer_jax.tasks.suites.run import SUITE_LIMITS


def written(folder, split, numbers, family="repository"):
    """A folder of tasks on disk, and their ids."""
    tasks = [dataclasses.replace(generate("bugfix", split, 3, number), family=family) for number in numbers]
    for task in tasks:
        write_task(task, folder / task.id)
    return folder, {task.id for task in tasks}


def test_without_paths_there_are_generators(tmp_path):
    source = TaskSource(5)
    assert source.task("recall", 7) == generate("recall", "train", 5, 7)
    assert (source.train, source.heldout, source.limits) == ({}, {}, SandboxLimits())
    source.require({"bugfix": 5, "recall": 3, "repository": 0}, 10**6)


def test_each_task_of_a_path_comes_once_in_an_order_of_the_seed(tmp_path):
    folder, ids = written(tmp_path, "train", range(6))
    first, other = TaskSource(0, folder), TaskSource(1, folder)
    order = [first.task("repository", number).id for number in range(6)]
    assert set(order) == ids and sorted(order) != order
    assert order == [TaskSource(0, folder).task("repository", number).id for number in range(6)]
    assert order != [other.task("repository", number).id for number in range(6)]
    with pytest.raises(IndexError):
        first.task("repository", 6)
    assert first.limits == SUITE_LIMITS
    first.require({"repository": 2, "bugfix": 1}, 3)


def test_a_family_of_a_path_is_not_generated(tmp_path):
    folder, ids = written(tmp_path, "train", range(2), family="bugfix")
    source = TaskSource(0, folder)
    assert {source.task("bugfix", number).id for number in range(2)} == ids
    assert source.task("recall", 0).family == "recall"


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            {"repository": 3},
            "rl.groups.repository=3 in rl.steps=3 are 9 tasks, .* but tasks.train holds 6",
        ),
        ({"rust": 1, "repository": 1}, "family 'rust'; there are bugfix, recall, and those of tasks.train, repository"),
    ],
)
def test_groups_that_the_path_cannot_fill_are_refused(tmp_path, groups, words):
    source = TaskSource(0, written(tmp_path, "train", range(6))[0])
    with pytest.raises(UserError, match=words):
        source.require(groups, 3)


def test_a_path_that_no_group_asks_for_is_refused(tmp_path):
    source = TaskSource(0, written(tmp_path, "train", range(2))[0])
    with pytest.raises(UserError, match=r"holds tasks of repository, and rl\.groups names none of them; set rl.groups"):
        source.require({"bugfix": 1, "repository": 0}, 1)


def test_a_family_that_needs_a_path_is_named():
    with pytest.raises(UserError, match="family 'repository'.*tasks.train is empty"):
        TaskSource(0).require({"repository": 1}, 3)


def test_tasks_of_the_other_split_and_tasks_of_both_are_refused(tmp_path):
    train, _ = written(tmp_path / "a", "train", range(2))
    heldout, _ = written(tmp_path / "b", "heldout", range(2))
    assert {task.split for task in TaskSource(0, train, heldout).heldout["repository"]} == {"heldout"}
    with pytest.raises(UserError, match=r"of the split 'heldout'; give it as tasks\.heldout"):
        TaskSource(0, heldout)
    with pytest.raises(UserError, match=r"of the split 'train'; give it as tasks\.train"):
        TaskSource(0, None, train)
    (task, *_) = TaskSource(0, train).train["repository"]
    write_task(dataclasses.replace(task, split="heldout"), heldout / "again")
    with pytest.raises(UserError, match=f"task {task.id} is in .*a and in .*b"):
        TaskSource(0, train, heldout)


def test_a_task_whose_image_is_not_here_is_refused(tmp_path):
    folder = tmp_path / "task"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text('version = "1.0"\n[environment]\ndocker_image = "no/such:image"\n')
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "tests" / "test.sh").write_text("exit 0\n")
    with pytest.raises(UserError, match="has no image no/such:image; pull or|need Docker or Podman"):
        TaskSource(0, folder)
