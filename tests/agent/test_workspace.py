"""The workspace and its sandbox hold the same files; the sandbox is acquired late and may die."""

import asyncio
import gc
import threading
import weakref

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from composer_jax.agent import workspace as workspaces
from composer_jax.agent.search.index import SearchIndex
from composer_jax.agent.workspace import Workspace
from composer_jax.errors import UserError
from composer_jax.sandbox import GONE, Change, LocalSandboxPool, SandboxFileError, local_pool
from composer_jax.sandbox.async_lazy import AsyncLazy
from tests.agent.conftest import DyingPool, task_of
from tests.many import many
from tests.sandbox.fixtures import contents

SHOW = "import pathlib; print(*sorted(f'{p}={p.read_text()}' for p in pathlib.Path('.').glob('*.txt')), sep=',')"
FILES = {"show.py": SHOW, "a.txt": "1"}
SHOW_THEM = ["python", "show.py"]


async def test_no_sandbox_is_taken_before_something_runs(dying_pool):
    pool = dying_pool(set())
    workspace = Workspace(task_of(FILES), pool)
    workspace.write("b.txt", b"2")
    await workspace.close()
    assert len(pool.sandboxes) == 0


@pytest.mark.parametrize("deaths", [{0}, {0, 1}])
async def test_a_dead_sandbox_is_replaced_with_the_same_files(dying_pool, deaths):
    pool = dying_pool(deaths)
    workspace = Workspace(task_of(FILES), pool)
    workspace.write("a.txt", b"9")
    assert (await workspace.run(SHOW_THEM, 5)).stdout == "a.txt=9\n"
    workspace.write("b.txt", b"2")
    pool.sandboxes[-1].end("a test ended it")
    assert (await workspace.run(SHOW_THEM, 5)).stdout == "a.txt=9,b.txt=2\n"
    await workspace.close()
    await workspace.close()  # again: no effect


@pytest.fixture
def folder(tmp_path):
    """A small repository with every kind of entry that a change can replace."""
    for path, text in {"a.txt": "a", "d/b.txt": "b", "d/e/c.txt": "c", "run.sh": "echo run"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "link").symlink_to("a.txt")
    (tmp_path / "run.sh").chmod(0o755)
    return tmp_path


async def test_a_workspace_is_its_base_folder_plus_changes(pool, folder):
    workspace = Workspace(task_of({"top.txt": "t", "a.txt": "over"}, repository=folder), pool)
    assert dict(workspace.files) == {
        "a.txt": b"over", "d/b.txt": b"b", "d/e/c.txt": b"c", "run.sh": b"echo run", "top.txt": b"t",
    }  # fmt: skip
    workspace.write("w/x.txt", b"x")
    assert workspace.paths("folder", "link") == ["d", "d/e", "link", "w"]
    command = "cat a.txt top.txt > d/n.txt; rm -r d/e link w; mkdir link; echo x > link/y; mkdir -p m/n; echo z > m/n/z"
    await workspace.run(["sh", "-c", command], 5)
    assert dict(workspace.files) == {
        "a.txt": b"over", "d/b.txt": b"b", "d/n.txt": b"overt", "link/y": b"x\n", "m/n/z": b"z\n",
        "run.sh": b"echo run", "top.txt": b"t",
    }  # fmt: skip
    assert workspace.paths("folder", "link") == ["d", "link", "m", "m/n"]
    workspace.write("a.txt", b"a")
    assert "a.txt" not in workspace.changes, "a file equal to the repository's is not a change"
    await workspace.close()


def test_replace_changes_all_files_or_none(folder):
    workspace = Workspace(task_of({}, repository=folder), None)
    with pytest.raises(SandboxFileError):
        workspace.replace({"new.txt": (b"x", None), "d/b.txt": None, "a.txt/x": (b"x", None)})
    assert workspace.changes == {}
    workspace.replace({"new.txt": (b"x", 0o755), "a.txt": None, "a.txt/x": (b"y", None)})
    assert workspace.changes == {
        "new.txt": Change("file", b"x", 0o755), "a.txt": GONE, "a.txt/x": Change("file", b"y"),
    }  # fmt: skip


def test_changes_larger_than_a_sandbox_are_refused(folder, monkeypatch):
    monkeypatch.setattr(workspaces, "MAX_CHANGED", 100)
    workspace = Workspace(task_of({}, repository=folder), None)
    workspace.write("a.txt", b"x" * 60)
    with pytest.raises(SandboxFileError):
        workspace.write("b.txt", b"x" * 60)
    workspace.write("a.txt", b"x" * 100)


WRITTEN = ("a.txt", "d/b.txt", "new/x.txt", "d", "d/e", "link", "d/e/c.txt/deep.txt", "a.txt/in.txt")
DELETED = ("a.txt", "d/b.txt", "d/e/c.txt", "link", "new/x.txt")
COMMANDS = (
    "rm -rf d",
    "rm -rf d/e; echo 1 > d/e",
    "mkdir -p d/e; echo 2 > d/e/c.txt",
    "rm -rf a.txt; mkdir a.txt; echo 3 > a.txt/in.txt",
    "rm -rf new link; ln -s d new; mkfifo link",
    "chmod 700 d; chmod +x a.txt; mv d d2; cp -r d2 d",
    "rm -rf * .x; printf a > a.txt",
    "true",
)
OPERATIONS = [
    *(("write", path) for path in WRITTEN),
    *(("delete", path) for path in DELETED),
    *(("run", command) for command in COMMANDS),
    ("die", ""),
]


def check_operations(pool, folder, chosen):
    """The workspace and its sandbox hold the same files, and so does a new sandbox."""
    pool = DyingPool(pool, set())

    async def go():
        workspace = Workspace(task_of({}, repository=folder), pool)
        for number, (what, detail) in enumerate(chosen):
            try:
                if what == "write":
                    workspace.write(detail, b"%d" % number)
                elif what == "delete":
                    workspace.delete(detail)
                elif what == "run":
                    await workspace.run(["sh", "-c", detail], 5)
                elif pool.sandboxes:
                    pool.sandboxes[-1].end("a test ended it")
            except SandboxFileError as error:
                assert what != "run", error
        await workspace.run(["true"], 5)
        held = await contents(pool.sandboxes[-1])
        assert dict(workspace.files) == held
        changes = workspace.changes
        await workspace.close()
        await workspace.run(["true"], 5)
        assert await contents(pool.sandboxes[-1]) == held
        assert {path: change.kind for path, change in workspace.changes.items()} == {
            path: change.kind for path, change in changes.items()
        }
        await workspace.close()

    asyncio.run(go())


SOME = st.lists(st.sampled_from(OPERATIONS), max_size=8)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(chosen=SOME)
@example(chosen=[("run", "rm -rf d"), ("write", "d/b.txt"), ("die", ""), ("run", "true")])
@example(chosen=[("delete", "a.txt"), ("write", "a.txt/in.txt"), ("run", "true"), ("delete", "a.txt/in.txt")])
def test_workspace_and_sandbox_agree_after_any_operations(pool, folder, chosen):
    check_operations(pool, folder, chosen)


@pytest.mark.slow
@settings(max_examples=many(500), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(chosen=SOME)
def test_workspace_and_sandbox_agree_after_very_many_operations(pool, folder, chosen):
    check_operations(pool, folder, chosen)


def test_a_folder_is_copied_and_indexed_once_for_all_episodes(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("def echo():\n    return 1\n")
    copies, indexes = [], []
    copy_folder, build = local_pool.copy_folder, SearchIndex.of

    def count_copy(source, target):
        copies.append(source)
        copy_folder(source, target)

    def count_index(*arguments):
        indexes.append(arguments)
        return build(*arguments)

    async def episodes(pool, count):
        workspaces = [Workspace(task_of({}, repository=tmp_path), pool) for _ in range(count)]
        await asyncio.gather(*(workspace.run(["true"], 5) for workspace in workspaces))
        hits = await asyncio.gather(*(workspace.search("echo", "", 3) for workspace in workspaces))
        assert all(ranking[0].chunk.name == "echo" for ranking in hits)
        for workspace in workspaces:
            await workspace.close()

    pool = LocalSandboxPool(size=5)
    monkeypatch.setattr(local_pool, "copy_folder", count_copy)
    monkeypatch.setattr(SearchIndex, "of", count_index)
    asyncio.run(episodes(pool, 5))
    asyncio.run(episodes(pool, 1))
    assert copies == [tmp_path] and len(indexes) == 1
    pool.kill()


def test_the_copies_of_folders_are_deleted_with_their_pool(folder):
    pool = LocalSandboxPool(size=1)
    tree = weakref.ref(asyncio.run(pool.trees.get(folder)))
    pool.kill()
    del pool
    gc.collect()
    assert tree() is None


async def test_packages_can_be_imported(pool, folder, tmp_path_factory):
    packages = tmp_path_factory.mktemp("packages")
    (packages / "thing.py").write_text("NAME = 'a thing'")
    workspace = Workspace(task_of({}, repository=folder, packages=packages), pool)
    assert (await workspace.run(["python", "-c", "import thing; print(thing.NAME)"], 5)).stdout == "a thing\n"
    result, is_new = await workspace.shell("python3 -c 'import thing; print(thing.NAME)'", 20)
    assert (result.stdout, is_new) == ("a thing\n", False)
    await workspace.close()


def test_a_repository_that_is_not_a_folder_is_refused(pool, tmp_path):
    workspace = Workspace(task_of({}, repository=tmp_path / "nowhere"), pool)
    with pytest.raises(UserError, match="nowhere"):
        asyncio.run(workspace.prepare())


async def test_the_event_loop_runs_while_a_lazy_value_is_computed_once():
    started, go_on, calls = threading.Event(), threading.Event(), []

    def make():
        started.set()
        assert go_on.wait(20)
        calls.append(1)
        if len(calls) == 1:
            raise UserError("the first time it fails")
        return "value"

    value = AsyncLazy(make)
    waiting = [asyncio.ensure_future(value.get()) for _ in range(3)]
    while not started.is_set():
        await asyncio.sleep(0)
    waiting[0].cancel()
    go_on.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in results] == [asyncio.CancelledError, UserError, UserError]
    assert await asyncio.gather(value.get(), value.get()) == ["value", "value"] and value.get_here() == "value"
    assert len(calls) == 2


async def test_the_shell_survives_a_file_that_became_a_folder(pool, folder):
    workspace = Workspace(task_of({}, repository=folder), pool)
    await workspace.shell("X=1; cd d", 5)
    workspace.delete("a.txt")
    workspace.write("a.txt/in.txt", b"in")
    result, is_new = await workspace.shell("echo $X; cat ../a.txt/in.txt", 5)
    assert (result.stdout, is_new) == ("1\nin", False)
    await workspace.close()
