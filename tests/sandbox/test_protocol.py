"""Sandbox and SandboxPool: both kinds and the test double offer the same calls, and callers need no more than that."""

import asyncio
import inspect
from dataclasses import fields

import pytest

from composer_jax.agent.workspace import Workspace
from composer_jax.errors import UserError
from composer_jax.sandbox import Capabilities, Change, LocalSandbox, LocalSandboxPool, RunResult, Sandbox, SandboxPool
from composer_jax.sandbox.container import Container
from composer_jax.sandbox.container_pool import ContainerPool
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.grading.submission import grade
from composer_jax.tasks.result_cache import ResultCache
from composer_jax.tasks.task import Task
from tests.sandbox.fake_pool import FakePool, FakeSandbox


def task_of(files, **options):
    return Task("t", "family", "train", "Do it.", files, (), CaseGrader((Case("a", "f", (), None),)), **options)


def count_runs(files, argv):
    files["runs"] = b"%d" % (int(files.get("runs", b"0")) + 1)
    return f"{argv[0]} sees {sorted(files)}\n"


def print_names(files, argv):
    return f"{sorted(files)}\n"


@pytest.mark.parametrize(
    "protocol, kind",
    [(Sandbox, LocalSandbox), (Sandbox, Container), (Sandbox, FakeSandbox)]
    + [(SandboxPool, LocalSandboxPool), (SandboxPool, ContainerPool), (SandboxPool, FakePool)],
)
def test_every_kind_has_the_calls_of_the_protocol(protocol, kind):
    calls = {name: call for name, call in vars(protocol).items() if inspect.isfunction(call) and name[0] != "_"}
    assert {"close"} < calls.keys()
    for name, call in calls.items():
        wanted, offered = (inspect.signature(function).parameters for function in (call, getattr(kind, name)))
        assert offered.keys() == wanted.keys(), name
        for parameter in wanted:
            assert offered[parameter].kind == wanted[parameter].kind, (name, parameter)
            if wanted[parameter].default is not inspect.Parameter.empty:
                assert offered[parameter].default == wanted[parameter].default, (name, parameter)


def test_the_local_pool_says_what_it_can_do(pool):
    capabilities = pool.capabilities
    assert (pool.image, pool.workspace_paths[0]) == (None, "/workspace")
    assert capabilities.can_snapshot and capabilities.can_fork and capabilities.can_mount_packages
    assert not (capabilities.can_use_network or capabilities.can_set_output_limit or capabilities.has_writable_system)
    assert {field.type for field in fields(Capabilities)} == {"bool"}


def test_the_local_pool_refuses_what_it_says_it_cannot_do(pool):
    async def go():
        async with await pool.acquire({}) as sandbox:
            with pytest.raises(UserError, match=r"no output limit per command; set SandboxLimits\.output_kb"):
                await sandbox.run(["true"], output_kb=1)
        with pytest.raises(UserError, match="has no network"):
            await pool.acquire({}, network=True)

    asyncio.run(go())


def test_a_container_says_that_it_cannot_be_forked():
    async def go():
        container = object.__new__(Container)  # no engine is needed to refuse
        for call in (container.snapshot(), container.restore(None), container.fork()):
            with pytest.raises(UserError, match="a container cannot be .*; (take|acquire)"):
                await call

    asyncio.run(go())


def test_an_agents_workspace_runs_in_any_pool():
    async def go():
        fake = FakePool(count_runs)
        workspace = Workspace(task_of({"a.py": "x = 1\n"}), fake)
        assert workspace.roots == ("/fake/workspace",)
        result = await workspace.run(["python", "a.py"], 5)
        assert result == RunResult("ok", 0, "python sees ['a.py', 'runs']\n", "", 0.0, 0)
        assert workspace.changes["runs"] == Change("file", b"1")
        workspace.write("b.py", b"y")
        assert (await workspace.shell("ls", 5))[0].stdout == "bash sees ['a.py', 'b.py', 'runs']\n"
        await workspace.close()
        assert [sandbox.is_closed for sandbox in fake.sandboxes] == [True]

    asyncio.run(go())


@pytest.mark.parametrize("has_writable_system, runs", [(False, 1), (True, 2)])
def test_results_are_cached_where_the_workspace_determines_them(has_writable_system, runs):
    async def go():
        fake = FakePool(print_names, has_writable_system=has_writable_system)
        workspace = Workspace(task_of({"a.py": ""}), fake, ResultCache())
        for _ in range(2):
            assert (await workspace.run(["ls"], 5)).stdout == "['a.py']\n"
        return [command for sandbox in fake.sandboxes for command in sandbox.commands]

    assert asyncio.run(go()) == [["ls"]] * runs


@pytest.mark.parametrize("image", [None, "other"])
def test_a_task_with_an_image_is_graded_in_that_image(image):
    with pytest.raises(UserError, match="needs the image mine"):
        asyncio.run(grade(task_of({}, image="mine"), {}, FakePool(print_names, image)))
