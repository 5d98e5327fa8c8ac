"""The simulation against the whole Orchestrator, whose simulated episodes take every turn on a virtual clock."""

import asyncio
import dataclasses
import math
import random

import pytest

from composer_jax.agent.episode import Episode
from composer_jax.agent.transcript import Transcript
from composer_jax.rl.config import RLConfig
from composer_jax.rl.group_source import GroupSource
from composer_jax.scale.simulation.roles import Roles
from composer_jax.scale.simulation.simulation import Simulation
from composer_jax.scale.simulation.workload import FINISHED, HUNG, LOST, Attempt
from composer_jax.seeds import hash_seed
from composer_jax.tasks.source import TaskSource
from tests.rl import simulated
from tests.rl.simulated import AGENT, TASKS, Play, drawn_play
from tests.virtual_clock import run_virtually

CONFIG = RLConfig(steps=30, groups={"bugfix": 2, "memory_chain": 1}, group_size=4, batches=((24, 2),))
LIMIT_S = 500.0


class PlayedWorkload:
    """The attempts of the Orchestrator's episodes, by their seeds."""

    def __init__(self, config, attempt_of):
        self.source = GroupSource(config, AGENT, 0, TaskSource(0, TASKS))
        self.attempt_of = attempt_of

    def attempts(self, group):
        self.source.draw(group, [])
        return [self.attempt_of(spec.seed) for spec in self.source.specs(group)]

    def retry(self, group, episode, tries):
        return self.attempt_of(hash_seed("retry", self.source.specs(group)[episode].seed, tries))

    def is_trained(self, group):
        return True


def run_orchestrator(config, play_of, tmp_path, monkeypatch, episode_seconds, **options):
    run = simulated.Simulation(tmp_path / "run", config, play_of, episode_seconds=episode_seconds, **options)
    return run_virtually(run.run(monkeypatch))


def run_simulation(config, attempt_of, rates, learn_s, episode_seconds, **options):
    roles = Roles(rates, 10**6, learn_s_per_token=0.0, learn_s=learn_s)
    simulation = Simulation(
        config,
        roles,
        PlayedWorkload(config, attempt_of),
        steps=config.steps,
        episode_seconds=episode_seconds,
        keeps_batches=True,
        **options,
    )
    return simulation, simulation.run(float("inf"))


@pytest.mark.parametrize(
    ("staleness", "late", "faults"), [(0, "wait", 0.1), (1, "wait", 0.0), (3, "wait", 0.1), (2, "drop", 0.1)]
)
def test_with_conversations_of_constant_speed_every_batch_is_the_same(tmp_path, monkeypatch, staleness, late, faults):
    config = dataclasses.replace(CONFIG, max_staleness=staleness, late_groups=late)
    # Attempts that hang from the same moment on end at the same moment, and "drop" depends on which one is first.
    kinds = ("lost", "raises") if late == "drop" else ("lost", "raises", "hangs")

    def play_of(seed):
        return drawn_play(seed, faults=faults, kinds=kinds)

    def attempt_of(seed):
        play = play_of(seed)
        turns = 1 if play.fault == "raises" else play.turns
        fate = {"": FINISHED, "hangs": HUNG}.get(play.fault, LOST)
        return Attempt(0.0, turns * play.turn_s, 1.0, fate)

    detailed = run_orchestrator(config, play_of, tmp_path, monkeypatch, LIMIT_S, learn_s=2.0, slots=16)
    simulation, outcome = run_simulation(config, attempt_of, [0.0] + [1.0] * 16, 2.0, LIMIT_S)
    assert simulation.batches == [list(batch.groups) for batch in detailed.batches()]
    assert outcome.ended_s == pytest.approx(detailed.seconds)
    assert outcome.staleness_max == max(row["staleness_max"] for row in detailed.rows.values())
    assert outcome.dropped == sum(row["groups_dropped"] for row in detailed.rows.values())


CHUNK = 25
"""Tokens that the detailed engine samples between two looks at how many conversations decode."""


def sharing_harness(rates):
    """Episodes that alternate: tools for turn_s seconds, then 100 tokens at the rate of all that decode just then."""
    decoding = 0

    def harness(policy):
        async def run_episode(spec, session, context):
            nonlocal decoding
            task, seed = spec.task, spec.seed
            play, oldest = policy.play_of(seed), policy.version
            for _ in range(play.turns):
                await asyncio.sleep(play.turn_s)
                decoding += 1
                for _ in range(100 // CHUNK):
                    await asyncio.sleep(CHUNK / rates[decoding])
                decoding -= 1
            transcript = Transcript()
            transcript.append("prompt", [1, 2, 3])
            transcript.append("assistant", [5], [6, 7], [-0.5] * 2, [oldest, policy.version])
            return Episode(task.id, task.family, task.split, seed, transcript, 1.0, "finished", turns=play.turns)

        return run_episode

    return harness


def long_play(seed: int) -> Play:
    rng = random.Random(hash_seed("long", seed))
    return Play(min(80, 5 + int(10 * rng.lognormvariate(0, 0.7))), rng.uniform(1.0, 9.0))


@pytest.mark.parametrize(("staleness", "learn_s"), [(0, 20.0), (4, 100.0)])
def test_with_shared_engines_a_few_parts_agree_with_every_turn(tmp_path, monkeypatch, staleness, learn_s):
    """Attempts of some 15 turns in 1, 4 and 16 parts: total time within 10, 2 and 1 %."""
    config = dataclasses.replace(CONFIG, max_staleness=staleness)
    rates = [0.0] + [1 / (0.02 + 0.004 * n) for n in range(1, 25)]  # a step takes 24 ms alone and 116 ms with 24
    monkeypatch.setattr(simulated, "simulated_harness", sharing_harness(rates))
    detailed = run_orchestrator(config, long_play, tmp_path, monkeypatch, None, learn_s=learn_s, slots=24)
    stale = [row["staleness_in_flight"] + row["staleness_in_queue"] for row in detailed.rows.values()]

    def attempt_of(seed):
        play = long_play(seed)
        return Attempt(play.turns * play.turn_s, play.turns * 100.0, 1.0)

    for parts, tolerance in ((1, 0.1), (4, 0.02), (16, 0.01)):
        _, outcome = run_simulation(config, attempt_of, rates, learn_s, math.inf, parts=parts)
        assert outcome.ended_s == pytest.approx(detailed.seconds, rel=tolerance)
        assert outcome.staleness_mean == pytest.approx(sum(stale) / len(stale), abs=0.05)
