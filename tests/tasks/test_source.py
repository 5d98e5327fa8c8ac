"""Where the tasks of a run come from."""

import dataclasses
import sys
import types

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import SandboxLimits
from composer_jax.storage.bucket import BucketFolder
from composer_jax.tasks.config import TasksConfig
from composer_jax.tasks.harbor import write_task
from composer_jax.tasks.source import TaskSource
from composer_jax.tasks.suites.run import SUITE_LIMITS
from tests.demo.generate import generate

FAMILIES = {
    "bugfix": "composer_jax.demo.bugfix:Bugfix",
    "memory_chain": "composer_jax.demo.memory_chain:MemoryChain",
}


def source_of(seed, train="", heldout="", families=FAMILIES):
    return TaskSource(seed, TasksConfig(families, str(train), str(heldout)))


def written(folder, split, numbers, family="repository"):
    """A folder of tasks on disk, and their ids."""
    tasks = [dataclasses.replace(generate("bugfix", split, 3, number), family=family) for number in numbers]
    for task in tasks:
        write_task(task, folder / task.id)
    return folder, {task.id for task in tasks}


def test_tasks_come_from_a_bucket_like_from_a_folder(tmp_path, bucket_url):
    folder, _ = written(tmp_path / "tasks", "train", range(1))
    bucket = BucketFolder(f"{bucket_url}/tasks")
    for file in folder.rglob("*"):
        if file.is_file():
            bucket.write(file.relative_to(folder).as_posix(), file.read_bytes(), 0)
    here, there = source_of(0, folder), source_of(0, f"{bucket_url}/tasks")
    assert [task.id for task in there.train["repository"]] == [task.id for task in here.train["repository"]]
    assert there.train["repository"][0].files == here.train["repository"][0].files
    with pytest.raises(UserError, match="of the split 'train'"):
        source_of(0, "", f"{bucket_url}/tasks")


def test_without_paths_there_are_generators(tmp_path):
    source = source_of(5)
    assert source.task("memory_chain", 7) == generate("memory_chain", "train", 5, 7)
    assert (source.train, source.heldout, source.limits) == ({}, {}, SandboxLimits())
    source.require({"bugfix": 5, "memory_chain": 3, "repository": 0}, 10**6)


def test_each_task_of_a_path_comes_once_in_an_order_of_the_seed(tmp_path):
    folder, ids = written(tmp_path, "train", range(6))
    first, other = source_of(0, folder), source_of(1, folder)
    order = [first.task("repository", number).id for number in range(6)]
    assert set(order) == ids and sorted(order) != order
    assert order == [source_of(0, folder).task("repository", number).id for number in range(6)]
    assert order != [other.task("repository", number).id for number in range(6)]
    with pytest.raises(IndexError):
        first.task("repository", 6)
    assert first.limits == SUITE_LIMITS
    first.require({"repository": 2, "bugfix": 1}, 3)


def test_a_family_of_a_path_is_not_generated(tmp_path):
    folder, ids = written(tmp_path, "train", range(2), family="bugfix")
    source = source_of(0, folder)
    assert {source.task("bugfix", number).id for number in range(2)} == ids
    assert source.task("memory_chain", 0).family == "memory_chain"


def test_groups_that_the_path_cannot_fill_and_paths_that_no_group_names_are_refused(tmp_path):
    source = source_of(0, written(tmp_path, "train", range(6))[0])
    for of, groups, words in (
        (source, {"repository": 3}, "are 9 tasks, .* but tasks.train holds 6"),
        (
            source,
            {"rust": 1, "repository": 1},
            "family 'rust'; tasks.families has bugfix, memory_chain",
        ),
        (source, {"bugfix": 1, "repository": 0}, r"holds tasks of repository, and rl\.groups names none of them"),
        (source_of(0), {"repository": 1}, "family 'repository'.*tasks.train is empty"),
    ):
        with pytest.raises(UserError, match=words):
            of.require(groups, 3)


def test_tasks_of_the_other_split_and_tasks_of_both_are_refused(tmp_path):
    train, _ = written(tmp_path / "a", "train", range(2))
    heldout, _ = written(tmp_path / "b", "heldout", range(2))
    assert {task.split for task in source_of(0, train, heldout).heldout["repository"]} == {"heldout"}
    with pytest.raises(UserError, match=r"of the split 'heldout'; give it as tasks\.heldout"):
        source_of(0, heldout)
    with pytest.raises(UserError, match=r"of the split 'train'; give it as tasks\.train"):
        source_of(0, "", train)
    (task, *_) = source_of(0, train).train["repository"]
    write_task(dataclasses.replace(task, split="heldout"), heldout / "again")
    with pytest.raises(UserError, match=f"task {task.id} is in .*a and in .*b"):
        source_of(0, train, heldout)


def test_a_task_whose_image_is_not_here_is_refused(tmp_path):
    folder = tmp_path / "task"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(
        'version = "1.0"\n[environment]\nallow_internet = false\ndocker_image = "no/such:image"\n'
    )
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "tests" / "test.sh").write_text("exit 0\n")
    with pytest.raises(UserError, match="has no image no/such:image; pull or|need Docker or Podman"):
        source_of(0, folder)


class Misnamed:
    def generate(self, split, seed, index):
        return generate("bugfix", split, seed, index)


@pytest.mark.parametrize(
    ("families", "words"),
    [
        ({"other": f"{__name__}:Misnamed"}, "tasks.families.other generates tasks of family 'bugfix'; use that name"),
        ({"bugfix": FAMILIES["bugfix"]}, "'other' is not a task family; tasks.families has bugfix"),
        ({"other": "no_such_module:Family"}, "config.tasks.families.other='no_such_module:Family' cannot be imported"),
    ],
)
def test_families_that_do_not_fit_their_name_are_refused(monkeypatch, families, words):
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or types.ModuleType(__name__))
    monkeypatch.setattr(sys.modules[__name__], "Misnamed", Misnamed, raising=False)
    with pytest.raises(UserError, match=words):
        source_of(0, families=families).task("other", 0)
