"""Simulated runs against closed forms: conservation, limits, shared engines, faults, seeds."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.rl.config import RLConfig
from composer_jax.scale.simulation.assumptions import Assumptions
from composer_jax.scale.simulation.engines import DecodePool
from composer_jax.scale.simulation.roles import Roles
from composer_jax.scale.simulation.simulation import Simulation
from composer_jax.scale.simulation.workload import FINISHED, LOST, Attempt, DrawnWorkload

CONFIG = RLConfig(groups={"repository": 4}, group_size=2)


class ConstantWorkload:
    """Every attempt has the same length; episodes of the groups in `lost` lose their first attempts."""

    def __init__(self, attempt: Attempt, group_size: int = 2, lost: frozenset[int] = frozenset(), losses: int = 0):
        self.attempt, self.group_size, self.lost, self.losses = attempt, group_size, lost, losses

    def attempts(self, group):
        return [self._attempt(group, 0)] * self.group_size

    def retry(self, group, episode, tries):
        return self._attempt(group, tries)

    def is_trained(self, group):
        return True

    def _attempt(self, group, tries):
        is_lost = group in self.lost and tries < self.losses
        return self.attempt._replace(fate=LOST if is_lost else FINISHED)


def constant(rate: float, sessions: int) -> list[float]:
    """Every conversation gets `rate` tokens per second, however many there are."""
    return [0.0] + [rate] * sessions


def test_conversations_share_an_engine_of_fixed_speed():
    """12 tokens per second in all: two of 6 and 12 tokens take 1 s together, then the other has its 6 in 0.5 s."""
    pool, ends = DecodePool([0.0, 12.0, 6.0]), []
    pool.add(6.0, "short")
    pool.add(12.0, "long")
    while pool.running:
        at = pool.next_end()
        pool.advance(at)
        ends.append((pool.pop(), at))
        pool.end()
    assert ends == [("short", pytest.approx(1.0)), ("long", pytest.approx(1.5))]
    assert pool.sampled == pytest.approx(18.0) and pool.next_end() == math.inf


def test_a_conversation_that_comes_later_slows_the_others():
    pool = DecodePool([0.0, 10.0, 5.0])
    pool.add(20.0, "first")
    pool.advance(1.0)
    pool.add(5.0, "second")
    assert pool.next_end() == pytest.approx(2.0)  # second: 5 tokens at 5 per second
    pool.advance(2.0)
    assert pool.pop() == "second"
    pool.end()
    assert pool.next_end() == pytest.approx(2.5)  # first: 20 - 10 - 5 tokens left at 10 per second


def test_a_pause_holds_all_conversations_up():
    pool = DecodePool([0.0, 10.0])
    pool.add(20.0, "only")
    pool.advance(1.0)
    pool.is_paused = True
    assert pool.next_end() == math.inf
    pool.advance(5.0)
    pool.is_paused = False
    assert pool.next_end() == pytest.approx(6.0)


def test_with_endless_engines_a_step_takes_the_time_of_learning_and_publishing():
    roles = Roles(constant(1e9, 1000), 1000, learn_s_per_token=0.01, learn_s=1.0, publish_s=2.0, install_s=3.0)
    config = dataclasses.replace(CONFIG, max_staleness=1)
    outcome = Simulation(config, roles, ConstantWorkload(Attempt(0.0, 1.0, 100.0))).run(10_000, warm_up_s=100)
    step_s = 1.0 + 4 * 2 * 100 * 0.01 + 2.0 + 3.0
    assert outcome.steps_per_day == pytest.approx(86_400 / step_s)
    assert outcome.learner_utilisation == pytest.approx(9 / step_s, rel=1e-2)
    assert outcome.limit == "learning" and outcome.staleness_max == 1
    assert outcome.trained_tokens_per_step == pytest.approx(800.0)


def test_a_synchronous_step_is_one_episode_and_one_update():
    roles = Roles(constant(2.0, 100), 100, learn_s_per_token=0.0, learn_s=7.0, install_s=3.0, sandbox_start_s=0.5)
    outcome = Simulation(CONFIG, roles, ConstantWorkload(Attempt(4.0, 10.0, 1.0))).run(50_000)
    assert outcome.steps_per_day == pytest.approx(86_400 / (0.5 + 4.0 + 10 / 2 + 7.0 + 3.0))
    assert outcome.staleness_max == 0 and outcome.staleness_mean == 0


def test_messages_go_through_the_learner_one_after_another():
    """100 sandboxes; an attempt samples 10 tokens in no time, with messages of 0.05 s each: 2 attempts a second."""
    roles = Roles(constant(1e9, 1000), 100, learn_s_per_token=0.0, message_s_per_token=0.05)
    config = dataclasses.replace(CONFIG, groups={"repository": 50}, max_staleness=4)
    for parts in (1, 4):
        simulation = Simulation(config, roles, ConstantWorkload(Attempt(1.0, 10.0, 1.0)), parts=parts)
        outcome = simulation.run(20_000, warm_up_s=1000)
        assert outcome.episodes_per_hour == pytest.approx(2 * 3600, rel=0.01)
        assert outcome.router_utilisation == pytest.approx(1.0, rel=0.01)
    alone = dataclasses.replace(roles, sandboxes=1)
    outcome = Simulation(config, alone, ConstantWorkload(Attempt(1.5, 10.0, 1.0))).run(20_000, warm_up_s=1000)
    assert outcome.episodes_per_hour == pytest.approx(3600 / 2, rel=0.01)
    assert outcome.router_utilisation == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize(("sessions", "sandboxes", "limit"), [(5, 100, "engines"), (100, 5, "sandboxes")])
def test_few_sessions_or_sandboxes_bound_the_episodes(sessions, sandboxes, limit):
    """Five episodes of 9 s at once: a step of 8 episodes takes 8 * 9 / 5 s, if playing runs far enough ahead."""
    roles = Roles(constant(2.0, sessions), sandboxes, learn_s_per_token=0.0, learn_s=0.1)
    config = dataclasses.replace(CONFIG, max_staleness=3)
    outcome = Simulation(config, roles, ConstantWorkload(Attempt(4.0, 10.0, 1.0))).run(50_000, warm_up_s=500)
    assert outcome.steps_per_day == pytest.approx(86_400 * 5 / (8 * 9), rel=2e-3)
    assert outcome.episodes_per_hour == pytest.approx(3600 * 5 / 9, rel=2e-3)
    assert outcome.limit == limit
    assert outcome.sandbox_utilisation == pytest.approx(5 / sandboxes, rel=1e-2)


def test_an_engine_of_fixed_speed_is_used_whatever_its_sessions():
    rates = [0.0] + [20.0 / n for n in range(1, 41)]  # 20 tokens per second in all
    config = dataclasses.replace(CONFIG, max_staleness=4)
    roles = Roles(rates, 40, learn_s_per_token=0.0, learn_s=0.01)
    outcome = Simulation(config, roles, ConstantWorkload(Attempt(1.0, 10.0, 1.0))).run(20_000, warm_up_s=500)
    assert outcome.steps_per_day == pytest.approx(86_400 * 20 / 80, rel=1e-2)
    assert outcome.engine_utilisation == pytest.approx(1.0, rel=1e-2)


def test_sandboxes_start_one_after_another():
    """Two a second: a synchronous step of 8 episodes waits 3.5 s for the start of its last one."""
    roles = Roles(constant(1.0, 100), 100, learn_s_per_token=0.0, learn_s=100.0, sandbox_starts_per_s=2.0)
    outcome = Simulation(CONFIG, roles, ConstantWorkload(Attempt(1.0, 5.0, 1.0))).run(50_000, warm_up_s=500)
    assert outcome.steps_per_day == pytest.approx(86_400 / (3.5 + 1 + 5 + 100))


def test_a_group_whose_episodes_are_all_lost_is_shipped_and_costs_no_training():
    roles = Roles(constant(1.0, 100), 100, learn_s_per_token=1.0)
    workload = ConstantWorkload(Attempt(0.0, 5.0, 10.0), lost=frozenset({1}), losses=3)
    simulation = Simulation(CONFIG, roles, workload, steps=1, keeps_batches=True)
    outcome = simulation.run(math.inf)
    assert simulation.batches == [[0, 1, 2, 3]]
    assert outcome.trained_tokens_per_step == 3 * 2 * 10
    assert outcome.ended_s == pytest.approx(3 * 5 + 60) and outcome.lost_fraction == pytest.approx(6 / 12)


def test_a_hung_attempt_ends_at_the_limit_and_is_not_repeated():
    class HangsOnce(ConstantWorkload):
        def attempts(self, group):
            return [self.attempt, self.attempt._replace(fate=2)]

    roles = Roles(constant(1.0, 100), 100, learn_s_per_token=0.0, learn_s=1.0)
    simulation = Simulation(
        CONFIG, roles, HangsOnce(Attempt(0.0, 5.0, 10.0)), steps=1, episode_seconds=50.0, keeps_batches=True
    )
    outcome = simulation.run(math.inf)
    assert outcome.ended_s == pytest.approx(50 + 1) and outcome.trained_tokens_per_step == 4 * 10
    assert outcome.lost_fraction == 0


def test_tools_that_take_longer_than_the_limit_end_there():
    roles = Roles(constant(1.0, 100), 100, learn_s_per_token=0.0, learn_s=1.0)
    simulation = Simulation(CONFIG, roles, ConstantWorkload(Attempt(90.0, 5.0, 10.0)), steps=1, episode_seconds=50.0)
    outcome = simulation.run(math.inf)
    assert outcome.ended_s == pytest.approx(50 + 5 + 1) and outcome.lost_fraction == 0


def test_a_learner_that_is_busy_most_of_the_time_but_waits_is_limited_by_what_it_waits_for():
    """A step learns 10 s, while 5 of its 8 episodes of 9 s play at once: it waits 4.4 of 14.4 s."""
    roles = Roles(constant(2.0, 5), 100, learn_s_per_token=0.0, learn_s=10.0)
    config = dataclasses.replace(CONFIG, max_staleness=3)
    outcome = Simulation(config, roles, ConstantWorkload(Attempt(4.0, 10.0, 1.0))).run(50_000, warm_up_s=500)
    assert outcome.phases["learning"] == pytest.approx(10 / 14.4, rel=1e-2) and outcome.limit == "engines"


def test_seeds_decide_and_nothing_else_does():
    def outcome(seed):
        workload = DrawnWorkload(Assumptions(), group_size=2, max_model_len=32_768, max_turns=300, seed=seed)
        roles = Roles([0.0] + [30.0] * 40, 40, learn_s_per_token=1e-4, learn_s=5.0)
        config = dataclasses.replace(CONFIG, max_staleness=2)
        return Simulation(config, roles, workload, episode_seconds=7200.0).run(50_000)

    assert outcome(1) == outcome(1) != outcome(2)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    staleness=st.integers(0, 4),
    late=st.sampled_from(["wait", "drop"]),
    sessions=st.integers(1, 60),
    sandboxes=st.integers(1, 60),
    lost=st.floats(0.0, 0.3),
    hung=st.floats(0.0, 0.1),
    learn_s=st.floats(0.0, 500.0),
)
def test_no_group_is_lost_or_too_stale_whatever_fails(seed, staleness, late, sessions, sandboxes, lost, hung, learn_s):
    config = dataclasses.replace(CONFIG, max_staleness=staleness, late_groups=late)
    assumed = Assumptions(lost_fraction=lost, hung_fraction=hung, turns_tail="pareto", equal_groups=0.2)
    workload = DrawnWorkload(assumed, group_size=2, max_model_len=32_768, max_turns=300, seed=seed)
    roles = Roles([0.0] + [40 / math.sqrt(n) for n in range(1, sessions + 1)], sandboxes, 1e-5, learn_s, 2.0, 1.0)
    simulation = Simulation(config, roles, workload, steps=12, episode_seconds=5000.0, keeps_batches=True)
    outcome = simulation.run(math.inf)
    trained = [number for batch in simulation.batches for number in batch]
    assert len(trained) == len(set(trained)) == outcome.shipped == 12 * 4
    assert outcome.admitted == outcome.shipped + outcome.dropped + outcome.outstanding
    assert outcome.outstanding == 0
    assert late == "drop" or outcome.dropped == 0
    assert outcome.staleness_max <= staleness
    assert sum(outcome.phases.values()) == pytest.approx(1.0)
    assert 0 <= outcome.sandbox_utilisation <= 1 + 1e-9 and 0 <= outcome.engine_utilisation <= 1 + 1e-9
    assert outcome.episodes_running <= min(sessions, sandboxes) + 1e-6


def test_a_run_in_which_nothing_ends_is_reported():
    roles = Roles(constant(1.0, 100), 100, learn_s_per_token=0.0)
    workload = ConstantWorkload(Attempt(0.0, math.inf, 1.0))
    with pytest.raises(RuntimeError, match="the simulated run hangs"):
        Simulation(CONFIG, roles, workload, steps=1).run(math.inf)
