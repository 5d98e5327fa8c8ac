"""The RL stage: an interrupt between or inside steps loses nothing, and a resumed run uses up no task twice."""

import contextlib
import dataclasses
import signal
import types

import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.checkpoint.weight_chain import WeightReceiver
from composer_jax.checkpoint.workdir import Workdir
from composer_jax.errors import UserError
from composer_jax.observe.metrics import read_metrics
from composer_jax.rl.orchestrator import Cursor
from composer_jax.rl.rollout import Rollout
from composer_jax.stages import reinforce as stage
from composer_jax.stages.config import run_config
from composer_jax.train.learner import TrainState
from configs.tiny import get_config

STEPS = 5


class FakeLearner:
    def init_state(self, params, router_bias):
        return TrainState({"w": params["w"] + 0}, {}, {}, jnp.int32(0))


class FakeOrchestrator:
    """Adds one to the weight per step and, as the real one, uses up the state it is given."""

    rolled: list[int] = []
    act = None

    def __init__(self, *_):
        return

    def roll_out(self, state, cursor, loop):
        step = cursor.task_step + 1
        self.rolled.append(step)
        self.interrupt("roll_out", step)
        return Rollout((), [], 1.0, 0.5, 1, 0)

    def learn(self, state, cursor, rollout):
        new = TrainState({"w": state.params["w"] + 1}, {}, {}, state.step + 1)
        state.params["w"].delete()
        state.step.delete()
        self.interrupt("learn", int(new.step))
        row = {"reward": 0.5, "compilations": 0} | {name: float(i) for i, name in enumerate(stage.TOTALS)}
        return new, Cursor(cursor.task_step + 1, cursor.weight_version + 1, int(new.step)), row

    def interrupt(self, *place):
        if place == FakeOrchestrator.act:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def reinforce(tmp_path, monkeypatch):
    """(where Ctrl-C comes, or None) -> runs the stage in one folder, again and again."""
    monkeypatch.setattr(stage, "Orchestrator", FakeOrchestrator)
    monkeypatch.setattr(FakeOrchestrator, "rolled", [])
    config = run_config(get_config("smoke"))
    config = dataclasses.replace(
        config, rl=dataclasses.replace(config.rl, steps=STEPS, save_every=3, publish=str(tmp_path / "published"))
    )
    checked = []
    with Workdir(tmp_path / "run", {}) as workdir:

        @contextlib.contextmanager
        def in_stage(name):
            result = {}
            yield result
            workdir.mark_done(name, result)

        @contextlib.contextmanager
        def rollout_context():
            yield None, None

        model = types.SimpleNamespace(
            chat=None,
            weights_before=lambda _: ({"w": jnp.zeros(3)}, {}),
            learner=lambda *_: FakeLearner(),
            store=lambda name: CheckpointStore(workdir.path / "checkpoints" / name, keep=1),
        )
        services = types.SimpleNamespace(
            rollout_context=rollout_context,
            tasks=None,
            check_task_manifest=checked.append,
            sampler_with=lambda *_, **__: None,
        )
        run = types.SimpleNamespace(
            workdir=workdir, path=workdir.path, config=config, stage=in_stage, model=model, services=services
        )

        def go(act=None):
            monkeypatch.setattr(FakeOrchestrator, "act", act)
            stage.reinforce(run)
            return run

        yield go


def weights_and_steps(run):
    with run.model.store("rl") as store:
        arrays, _ = store.restore(like={"params": {"w": np.zeros(3, np.float32)}})
    return arrays["params"]["w"].tolist(), [row["step"] for row in read_metrics(run.path / "metrics" / "rl.jsonl")]


def published(run) -> dict[int, list[float]]:
    """The weights of every version that a server can take."""
    receiver = WeightReceiver(run.config.rl.publish)
    versions = {}
    for version in range(run.config.rl.steps + 1):
        with contextlib.suppress(UserError):
            receiver.receive(version)
            versions[version] = receiver.arrays["params/w"].tolist()
    assert receiver.arrays["params/w"].dtype == jnp.bfloat16
    return versions


def totals(run):
    return {name: run.workdir.stage_result("rl")[name] for name in stage.TOTALS}


def test_an_uninterrupted_stage(reinforce):
    run = reinforce()
    assert weights_and_steps(run) == ([5.0] * 3, [1, 2, 3, 4, 5])
    assert totals(run) == {name: 5.0 * i for i, name in enumerate(stage.TOTALS)}
    assert FakeOrchestrator.rolled == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("place", [(name, step) for name in ("roll_out", "learn") for step in (1, 2, 4, 5)], ids=str)
def test_ctrl_c_anywhere_loses_no_step(reinforce, place):
    with pytest.raises(KeyboardInterrupt):
        reinforce(place)
    run = reinforce()
    assert weights_and_steps(run) == ([5.0] * 3, [1, 2, 3, 4, 5])
    # A rollout that was cut short is rolled out again; no other is.
    again = [place[1]] if place[0] == "roll_out" else []
    assert sorted(FakeOrchestrator.rolled) == sorted([1, 2, 3, 4, 5, *again])
    assert totals(run) == {name: 5.0 * i for i, name in enumerate(stage.TOTALS)}, "of all attempts"
    assert published(run) == {version: [float(version)] * 3 for version in range(6)}
