"""An evaluation while RL trains, with simulated roles on a virtual clock: its weights stay, and no step is left out."""

import asyncio
import dataclasses
import random

import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.rl.config import RLConfig
from tests.rl.simulated import Play, Simulation, drawn_play
from tests.virtual_clock import run_virtually

CONFIG = RLConfig(steps=12, groups={"bugfix": 2, "memory_chain": 1}, group_size=4, batches=((24, 2),))
MODES = {
    "synchronous": ({}, True),
    "asynchronous": ({"max_staleness": 2}, True),
    "on devices of their own": ({"max_staleness": 2}, False),
    "deterministic": ({"max_staleness": 2, "deterministic": True}, True),
    "deterministic, on devices of their own": ({"max_staleness": 2, "deterministic": True}, False),
}
mode = pytest.mark.parametrize(("changes", "shares_devices"), MODES.values(), ids=MODES)


class Evaluation:
    """Samples `messages` messages of a second each after every third step; rows: step -> (version, seconds)."""

    def __init__(self, messages=5):
        self.messages, self.rows, self.trainings = messages, {}, set()

    async def __call__(self, policy, step, version):
        if step == 0 or step % 3 or step in self.rows:
            return
        began = asyncio.get_running_loop().time()
        session = await policy.open(7, ahead=True)
        try:
            for _ in range(self.messages):
                assert (await session.sample([1], SamplingParams(2))).versions == [version] * 2
                self.trainings.add(policy.open_sessions - 1)
        finally:
            session.close()
        self.rows[step] = version, asyncio.get_running_loop().time() - began


def play(seed: int) -> Play:
    """Episodes of 2 to 4 s; the evaluation samples for a second at a time."""
    return Play(turns=2 + random.Random(seed).randrange(3), turn_s=1.0)


@mode
def test_the_weights_stay_until_the_evaluation_has_ended(tmp_path, monkeypatch, changes, shares_devices):
    config, evaluation = dataclasses.replace(CONFIG, **changes), Evaluation(messages=40)
    simulation = Simulation(
        tmp_path, config, play, learn_s=3.0, slots=10, shares_devices=shares_devices, evaluate=evaluation
    )
    run_virtually(simulation.run(monkeypatch))
    assert {step: version for step, (version, _) in evaluation.rows.items()} == {3: 3, 6: 6, 9: 9, 12: 12}
    assert len(simulation.batches()) == 12
    if config.deterministic:
        assert evaluation.trainings == {0}, "episodes of training play beside the evaluation"
    else:
        assert max(evaluation.trainings) > 0


def test_a_deterministic_run_has_the_same_batches_with_and_without(tmp_path, monkeypatch):
    config = dataclasses.replace(CONFIG, max_staleness=2, deterministic=True)
    batches = []
    for evaluate in (None, Evaluation()):
        simulation = Simulation(tmp_path / f"{evaluate is None}", config, drawn_play, slots=10, evaluate=evaluate)
        batches.append(run_virtually(simulation.run(monkeypatch)).batches())
        assert simulation.policy.resets == 13, "the cache is forgotten at the beginning and after every step"
    assert batches[0] == batches[1]


def test_on_devices_of_its_own_the_learner_computes_while_the_evaluation_runs(tmp_path, monkeypatch):
    """Steps are queued, learning takes 3 s, and an evaluation of 5 s delays its step by the other 2 s."""
    seconds = []
    for evaluate in (None, Evaluation(messages=5)):
        config = dataclasses.replace(CONFIG, max_staleness=2)
        simulation = Simulation(
            tmp_path / f"{evaluate is None}", config, lambda seed: Play(turns=1), learn_s=3.0, evaluate=evaluate
        )
        seconds.append(run_virtually(simulation.run(monkeypatch)).seconds)
    # After steps 3, 6 and 9 there is learning to overlap with, after the last one there is none.
    assert seconds[1] - seconds[0] == pytest.approx(3 * 2 + 5, abs=0.1)


@mode
def test_a_killed_run_measures_every_step_once(tmp_path, monkeypatch, changes, shares_devices):
    config, rng = dataclasses.replace(CONFIG, **changes), random.Random(4)
    # With save_every=3 the run goes on from the very step whose evaluation was cut short.
    options = dict(learn_s=2.0, slots=10, shares_devices=shares_devices, save_every=3, evaluate=Evaluation(messages=8))
    simulation = Simulation(tmp_path, config, play, **options)
    for _ in range(6):
        run_virtually(simulation.run(monkeypatch, kill_at=rng.uniform(5, 40)))
    run_virtually(simulation.run(monkeypatch))
    rows = options["evaluate"].rows
    assert {step: version for step, (version, _) in rows.items()} == {3: 3, 6: 6, 9: 9, 12: 12}


def test_an_interrupt_cancels_the_evaluation_and_leaves_a_state_to_save(tmp_path, monkeypatch):
    simulation = Simulation(
        tmp_path, CONFIG, lambda seed: Play(turns=1), learn_s=1.0, shares_devices=True, evaluate=Evaluation(1000)
    )
    run_virtually(simulation.run(monkeypatch, kill_at=100.0))
    assert simulation.policy.open_sessions == 0
    assert simulation.orchestrator.is_consistent and simulation.orchestrator.cursor.task_step == 3


def test_an_evaluation_that_fails_ends_the_run(tmp_path, monkeypatch):
    async def fail(policy, step, version):
        raise UserError("All 8 episodes were lost")

    with pytest.raises(UserError, match="All 8"):
        run_virtually(Simulation(tmp_path, CONFIG, play, evaluate=fail).run(monkeypatch))
