"""Tasks that need the network: all are named before anything starts, unless the run gives it to them."""

import asyncio
import dataclasses
import socket
from types import SimpleNamespace

import pytest

from composer_jax.errors import UserError
from composer_jax.rl.workers.worker_setup import WorkerSetup
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.sandbox.config import SandboxConfig
from composer_jax.schema.run_config import run_config
from composer_jax.stages import evaluate as evaluation
from composer_jax.stages import train_rl
from composer_jax.stages.play import run_attempt
from composer_jax.stages.rollout_services import RolloutServices
from composer_jax.tasks.config import TasksConfig
from composer_jax.tasks.grading import grade
from composer_jax.tasks.source import TaskSource
from configs import tiny
from tests.demo.generate import generate

NAMES = ("a", "b", "c")


@pytest.fixture
def folder(tmp_path):
    """Three Harbor tasks, of which the last says that it needs no network."""
    for name in NAMES:
        task = tmp_path / "tasks" / name
        (task / "tests").mkdir(parents=True)
        (task / "environment").mkdir()
        (task / "environment" / "Dockerfile").write_text("FROM python:3.12-slim\nWORKDIR /app\n")
        (task / "task.toml").write_text(
            f'version = "1.0"\n[environment]\nallow_internet = {str(name != "c").lower()}\n'
        )
        (task / "instruction.md").write_text("Do it.\n")
        (task / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    return tmp_path / "tasks"


def test_all_tasks_that_need_the_network_are_named_at_once(folder):
    config = TasksConfig(heldout=str(folder))
    with pytest.raises(UserError, match=r"2 tasks need the network.*: a, b; --config.sandbox.network=host gives"):
        TaskSource(0, config)
    source = TaskSource(0, config, network="host")
    assert sorted((task.id, task.network) for task in source.heldout["harbor"]) == [
        ("a", True),
        ("b", True),
        ("c", False),
    ]


def test_the_config_says_which_network():
    assert run_config(tiny.get_config("smoke")).sandbox == SandboxConfig("none")
    with pytest.raises(UserError, match="sandbox.network='all'; it is one of none, host"):
        SandboxConfig("all")


class Unfinished:
    """A run's folder in which no stage has ended."""

    @staticmethod
    def stage_done(name):
        return False


class UnloadedModel:
    """A run's model whose weights a test must not load."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was used before the tasks were read")


@pytest.mark.parametrize("stage", ["evaluate", "rl"])
def test_a_stage_refuses_them_before_it_loads_weights(folder, tmp_path, stage):
    config = tiny.get_config("smoke")
    config.tasks[{"evaluate": "heldout", "rl": "train"}[stage]] = str(folder)

    class Run:
        config, model = None, UnloadedModel()
        services: RolloutServices

        @staticmethod
        def is_done(name):
            return False

    Run.config = run_config(config)
    Run.services = RolloutServices(Run.config, tmp_path, Run.model, Unfinished())
    with pytest.raises(UserError, match="2 tasks need the network"):
        evaluation.evaluate(Run, "before") if stage == "evaluate" else train_rl.train_rl(Run)


REACH = """
python -c "import socket; socket.create_connection(('127.0.0.1', {port}), 2)" && reached=1
echo ${{reached:-0}} > /logs/verifier/reward.txt
"""


@pytest.mark.parametrize("network", ["none", "host"])
def test_a_run_with_the_network_of_the_host_gives_it_to_the_tasks_that_need_it(folder, tmp_path, network):
    config = tiny.get_config("smoke")
    config.sandbox.network = network
    services = RolloutServices(run_config(config), tmp_path, SimpleNamespace(chat=None), Unfinished())
    with socket.create_server(("127.0.0.1", 0)) as server, services.episode_context() as (context, loop):
        for name in NAMES:
            (folder / name / "tests" / "test.sh").write_text(REACH.format(port=server.getsockname()[1]))
        source = TaskSource(0, TasksConfig(heldout=str(folder)), network="host")
        tasks = [task for task in source.heldout["harbor"] if network == "host" or not task.network]
        rewards = {task.id: loop.run(grade(task, {}, context.pool)).reward for task in tasks}
        assert rewards == {"none": {"c": 0.0}, "host": {"a": 1.0, "b": 1.0, "c": 0.0}}[network]
        if network == "none":
            with pytest.raises(UserError, match="this sandbox pool has no network"):
                loop.run(grade(next(task for task in source.heldout["harbor"] if task.network), {}, context.pool))


def test_a_played_task_is_refused_before_a_sandbox_starts(monkeypatch):
    monkeypatch.setattr("composer_jax.stages.play.LocalSandboxPool", None)
    task = dataclasses.replace(generate("bugfix", "train", 0, 0), network=True)
    with pytest.raises(UserError, match="the task needs the network.*; network='host' gives"):
        run_attempt(task, policy=None, chat=object())
    with pytest.raises(UserError, match="sandbox.network='hosts'; it is one of none, host"):
        run_attempt(task, policy=None, chat=object(), network="hosts")


def test_workers_get_the_network_of_the_run(monkeypatch):
    given = []

    class Pool(LocalSandboxPool):
        def __init__(self, *arguments, network, **options):
            given.append(network)
            super().__init__(*arguments, **options)

    monkeypatch.setattr("composer_jax.rl.workers.worker_setup.LocalSandboxPool", Pool)
    monkeypatch.setattr(WorkerSetup, "chat", lambda self: None)

    async def enter(setup):
        async with setup.episode_context(1):
            pass

    for network in (False, True):
        setup = WorkerSetup.from_json(dataclasses.asdict(WorkerSetup({}, network=network)))
        asyncio.run(enter(setup))
    assert given == [False, True]
