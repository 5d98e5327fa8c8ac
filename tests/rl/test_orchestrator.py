"""The orchestrator with simulated roles on a virtual clock: order, staleness, overlap, faults, kills."""

import asyncio
import dataclasses
import random
import threading
from collections import Counter

import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.models.flops import training_flops
from composer_jax.rl.config import RLConfig
from composer_jax.rl.curriculum import CurriculumConfig
from composer_jax.rl.learning_step import Cursor, graded_group
from composer_jax.rl.ledger import RolloutLedger
from composer_jax.rl.played_group import hash_tokens
from composer_jax.rl.rewards import RewardConfig
from composer_jax.train.utilisation import Utilisation
from tests.many import many
from tests.models.small import small
from tests.rl.made_up import episode
from tests.rl.simulated import LENGTHS, Play, Simulation, drawn_play
from tests.virtual_clock import run_virtually

CONFIG = RLConfig(steps=12, groups={"bugfix": 2, "memory_chain": 1}, group_size=4, batches=((24, 2),))


def changed(**changes) -> RLConfig:
    return dataclasses.replace(CONFIG, **changes)


def steady(seed: int) -> Play:
    return Play(turns=2, turn_s=1.0)


@pytest.fixture
def simulate(tmp_path, monkeypatch):
    """(config, play_of, options of Simulation) -> the finished Simulation."""

    def run(config, play_of, folder="run", **options):
        simulation = Simulation(tmp_path / folder, config, play_of, **options)
        return run_virtually(simulation.run(monkeypatch))

    return run


def test_a_synchronous_run_trains_each_step_on_tokens_of_its_own_weights(simulate):
    simulation = simulate(CONFIG, drawn_play)
    batches = simulation.batches()
    assert [batch.groups for batch in batches] == [tuple(range(3 * i, 3 * i + 3)) for i in range(12)]
    assert all(batch.versions == (batch.version, batch.version) for batch in batches)
    assert [batch.version for batch in batches] == list(range(12))
    assert simulation.policy.installed == list(range(1, 13))
    assert {row["staleness_max"] for row in simulation.rows.values()} == {0.0}
    assert len({task for batch in batches for task in batch.tasks}) == 36


@pytest.mark.parametrize(("learn_s", "ideal"), [(1.0, 12 * 2 + 1), (2.0, 13 * 2), (5.0, 2 + 12 * 5)])
def test_on_devices_of_their_own_the_slower_role_sets_the_pace(simulate, learn_s, ideal):
    in_turns = simulate(CONFIG, steady, "in turns", learn_s=learn_s, shares_devices=True)
    assert in_turns.seconds == pytest.approx(12 * (2 + learn_s))
    simulation = simulate(changed(max_staleness=1), steady, learn_s=learn_s, slots=12)
    assert ideal <= simulation.seconds <= 1.1 * ideal


def test_long_episodes_hold_an_asynchronous_run_up_less(simulate):
    """Episodes differ in length, so a synchronous step takes as long as its longest one."""
    synchronous = simulate(changed(steps=30), drawn_play, "synchronous").seconds
    for late in ("wait", "drop"):
        asynchronous = simulate(changed(steps=30, max_staleness=4, late_groups=late), drawn_play, late, slots=12)
        assert asynchronous.seconds < 0.7 * synchronous


def test_staleness_is_bounded_and_split_into_flight_and_queue(simulate):
    rows = simulate(changed(steps=20, max_staleness=3), drawn_play).rows.values()
    assert max(row["staleness_max"] for row in rows) == 3
    assert any(row["staleness_in_flight"] > 0 for row in rows) and any(row["staleness_in_queue"] > 0 for row in rows)
    assert all(row["staleness_in_flight"] + row["staleness_in_queue"] <= 3 for row in rows)


def test_dropped_groups_are_cancelled_and_replaced(simulate):
    simulation = simulate(changed(steps=20, max_staleness=1, late_groups="drop"), drawn_play)
    dropped = sum(row["groups_dropped"] for row in simulation.rows.values())
    with RolloutLedger(simulation.folder) as ledger:
        assert 0 < dropped == len(ledger.dropped)
        trained = [number for batch in ledger.batches for number in batch.groups]
        assert len(set(trained)) == 60 and not ledger.dropped & set(trained)
    assert max(row["staleness_max"] for row in simulation.rows.values()) <= 1


def test_a_deterministic_run_does_not_depend_on_who_ends_first(simulate):
    config = changed(max_staleness=2, deterministic=True)
    runs = [
        simulate(config, lambda seed, speed=speed: dataclasses.replace(drawn_play(seed), turn_s=speed(seed)), name)
        for name, speed in (("a", lambda seed: 1.0), ("b", lambda seed: random.Random(seed).uniform(0.1, 9.0)))
    ]
    assert runs[0].batches() == runs[1].batches()
    assert [batch.versions for batch in runs[0].batches()][3:] == [(t - 2, t - 2) for t in range(3, 12)]


def test_a_row_has_the_speed_of_the_learner_and_its_share_of_the_peak(simulate):
    config = changed(steps=2)
    (row, _), flops = simulate(config, drawn_play).rows.values(), training_flops(small(), np.asarray(LENGTHS))
    assert row["tokens_per_s"] == pytest.approx(sum(LENGTHS) / row["train_s"]) and "mfu" not in row
    for row in simulate(config, drawn_play, "known", utilisation=Utilisation(small(), peak=1e12)).rows.values():
        assert row["mfu"] == pytest.approx(flops / (row["train_s"] * 1e12))


class PausedCheck:
    """A weight check that wants a paused policy with the learner's version."""

    def __init__(self, policy):
        self.policy = policy

    async def measure(self, state, version):
        await asyncio.sleep(0.5)
        assert not self.policy.running.is_set() and state.params == version == self.policy.version
        return version / 100


@pytest.mark.parametrize(("staleness", "shares_devices"), [(0, True), (2, False)])
def test_the_weights_are_checked_at_the_beginning_and_every_few_steps(simulate, staleness, shares_devices):
    config = changed(max_staleness=staleness, weight_check_every=5)
    options = dict(learn_s=2.0, slots=10, shares_devices=shares_devices, new_weight_check=PausedCheck)
    rows = simulate(config, drawn_play, **options).rows
    gaps = {step: row["weight_gap"] for step, row in rows.items()}
    assert gaps == dict.fromkeys(range(1, 13)) | {1: 0.0, 5: 0.05, 10: 0.1}


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["wait", "drop"])
@pytest.mark.parametrize("steps", [40, pytest.param(many(420), marks=pytest.mark.slow)])
def test_faults_of_every_kind_lose_no_group(simulate, late, steps):
    """A tenth of the attempts each lose their sandboxes, raise in the harness, or hang."""
    config = changed(steps=steps, max_staleness=2, late_groups=late)
    simulation = simulate(config, lambda seed: drawn_play(seed, faults=0.1), episode_seconds=500.0, slots=24)
    counts = Counter(number for batch in simulation.batches() for number in batch.groups)
    assert len(counts) == 3 * steps and set(counts.values()) == {1}
    assert simulation.ended >= 12 * steps
    assert max(row["staleness_max"] for row in simulation.rows.values()) <= 2
    lost = sum(row["infrastructure_failures"] for row in simulation.rows.values())
    assert 0 < lost < 0.06 * 12 * steps  # three attempts, 0.3 each


def test_a_run_in_which_everything_is_lost_ends_and_plays_the_groups_again(simulate, tmp_path, monkeypatch):
    simulation = Simulation(tmp_path / "run", CONFIG, lambda seed: Play(fault="lost"))
    with pytest.raises(UserError, match="All 12 episodes"):
        run_virtually(simulation.run(monkeypatch))
    simulation.play_of = steady
    run_virtually(simulation.run(monkeypatch))
    assert simulation.batches()[0].groups == (0, 1, 2)


def test_a_failing_policy_ends_the_run(simulate, tmp_path, monkeypatch):
    from tests.rl import simulated

    async def fail(self, seed):
        raise ConnectionError("the engine died")

    monkeypatch.setattr(simulated.SimulatedPolicy, "open", fail)
    with pytest.raises(ConnectionError):
        simulate(CONFIG, steady)


# -- kills -----------------------------------------------------------------------------------------------------------


CURRICULUM = CurriculumConfig(window=3, turns=0.5)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        changed(max_staleness=2, deterministic=True),
        changed(max_staleness=1, deterministic=True, curriculum=CURRICULUM),
    ],
    ids=["synchronous", "ahead", "curriculum"],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(simulate, tmp_path, monkeypatch, config):
    whole = simulate(config, drawn_play, learn_s=2.0, slots=10)
    rng = random.Random(0)
    for trial in range(3):
        killed = Simulation(tmp_path / f"killed{trial}", config, drawn_play, learn_s=2.0, slots=10)
        for _ in range(4):
            run_virtually(killed.run(monkeypatch, kill_at=rng.uniform(0, whole.seconds)))
        run_virtually(killed.run(monkeypatch))
        assert killed.batches() == whole.batches()
        assert killed.orchestrator.cursor == whole.orchestrator.cursor


@pytest.mark.parametrize("late", ["wait", "drop"])
def test_a_killed_asynchronous_run_trains_what_it_had_recorded(tmp_path, monkeypatch, late):
    config, rng = changed(steps=20, max_staleness=2, late_groups=late), random.Random(1)
    for trial in range(3):
        simulation = Simulation(tmp_path / f"{trial}", config, drawn_play, learn_s=2.0, slots=20)
        before = []
        while simulation.checkpoint.task_step < 20 and len(before) < 19:
            run_virtually(simulation.run(monkeypatch, kill_at=rng.uniform(10, 100)))
            after = simulation.batches()
            assert after[: len(before)] == before
            before = after
        run_virtually(simulation.run(monkeypatch))
        batches = simulation.batches()
        assert batches[: len(before)] == before and len(batches) == 20
        trained = [number for batch in batches for number in batch.groups]
        assert len(set(trained)) == 60
        assert all(batch.version - batch.versions[0] <= 2 for batch in batches)


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_killed_run_samples_no_message_again(tmp_path, monkeypatch, staleness):
    """Episodes go on after the messages that they had, with the weights versions that they had."""
    config, rng = changed(max_staleness=staleness), random.Random(2)
    simulation = Simulation(tmp_path, config, drawn_play, learn_s=2.0, slots=10, save_every=1)
    while simulation.checkpoint.task_step < 12:
        run_virtually(simulation.run(monkeypatch, kill_at=rng.uniform(1, 60)))
    assert simulation.decoded_tokens == sum(row["sampled_tokens"] for row in simulation.rows.values())
    assert not list((tmp_path / "rl" / "samples").iterdir())


def test_a_step_that_learns_is_completed_before_an_interrupt(tmp_path, monkeypatch):
    simulation = Simulation(tmp_path, CONFIG, steady, learn_s=5.0, save_every=1)

    async def interrupt():
        run = asyncio.create_task(simulation.run(monkeypatch))
        await asyncio.sleep(4.0)  # two seconds of rollout, then learning
        assert not simulation.orchestrator.is_consistent
        run.cancel()
        await asyncio.wait([run])

    run_virtually(interrupt())
    assert simulation.orchestrator.is_consistent
    assert simulation.orchestrator.cursor == Cursor(1, 1, 1)


def test_rows_are_hashed_beside_the_event_loop(tmp_path, monkeypatch):
    """Hashing the rows of a step of long contexts takes seconds, in which episodes go on."""
    threads = []

    def recording(groups):
        threads.append(threading.current_thread())
        return hash_tokens(groups)

    monkeypatch.setattr("composer_jax.rl.ledger.hash_tokens", recording)
    simulation = Simulation(tmp_path / "run", changed(steps=2), lambda seed: Play(turn_s=0.0))
    asyncio.run(simulation.run(monkeypatch))
    assert [batch.step for batch in simulation.batches()] == [1, 2] == [*range(1, len(threads) + 1)]
    assert threading.current_thread() not in threads


# -- groups ----------------------------------------------------------------------------------------------------------


def test_what_the_infrastructure_lost_is_left_out_of_its_group_and_never_scored():
    lost = episode(None)
    group = graded_group([episode(1.0), lost, episode(0.0), lost], RewardConfig())
    assert list(group.rewards) == [1.0, 0.0] and all(e.reward is not None for e in group.episodes)
    assert graded_group([lost, lost, lost, episode(1.0)], RewardConfig()) is None


def test_rewards_of_a_group_include_what_length_costs():
    config = RewardConfig(weight=0.2, summary_token=0.0, turn=1.0, q=0.0)
    episodes = [episode(1.0, turns=1), episode(1.0, turns=2), episode(0.0), episode(0.0)]
    assert list(graded_group(episodes, config).rewards) == pytest.approx([0.8, 0.6, 0.0, 0.0])
