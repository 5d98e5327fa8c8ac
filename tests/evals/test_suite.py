"""Suites: their episodes and their measures."""

import asyncio

import pytest

from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.agent.summary import Compaction
from composer_jax.agent.usage import EpisodeUsage
from composer_jax.errors import UserError
from composer_jax.evals.suite import Suite, compaction_error, run_suite, summarise
from composer_jax.rl.rollout import lost_episode
from tests.demo.generate import generate
from tests.rl.made_up import conversation, episode
from tests.rl.simulated import SimulatedPolicy

TASKS = [generate("bugfix", "heldout", 0, i) for i in range(3)]


def suite(**changes) -> Suite:
    return Suite(**(dict(name="a", tasks=TASKS, attempts=4, compaction=Compaction(None)) | changes))


def test_specs_are_all_attempts_at_all_tasks_with_seeds_of_their_own():
    specs = suite().specs()
    assert [spec.task.id for spec in specs] == [task.id for task in TASKS for _ in range(4)]
    assert len({spec.seed for spec in specs}) == 12


def test_an_attempt_draws_the_same_numbers_in_every_suite():
    """Policies and conditions are then compared with equal random numbers."""
    other = suite(name="b", tasks=TASKS[1:], attempts=2, compaction=Compaction(100))
    seeds = {(spec.task.id, i % 4): spec.seed for i, spec in enumerate(suite().specs())}
    assert all(seeds[spec.task.id, i % 2] == spec.seed for i, spec in enumerate(other.specs()))
    assert {spec.seed for spec in suite(seed=1).specs()}.isdisjoint(seeds.values())


def test_a_suite_plays_all_its_specs_or_ends_with_a_sentence():
    async def play(spec, policy):
        return episode(spec.seed % 2, task_id=spec.task.id, seed=spec.seed)

    async def lose(spec, policy):
        return lost_episode(spec, "the disk is full")

    def run(play_one):
        return asyncio.run(run_suite(suite(), SimulatedPolicy(None), EpisodeContext(None, None), None, play_one))

    result, episodes = run(play)
    assert [(e.task_id, e.seed) for e in episodes] == [(spec.task.id, spec.seed) for spec in suite().specs()]
    assert result.pass_at_1 == pytest.approx(sum(e.reward for e in episodes) / 12)
    with pytest.raises(UserError, match="All 12 episodes were lost, .* the disk is full"):
        run(lose)


def attempts(task: str, rewards) -> list:
    return [episode(r, task_id=task) for r in rewards]


def test_pass_rates_are_over_tasks_and_attempts():
    episodes = [*attempts("a", [1, 0, 0, 0]), *attempts("b", [0] * 4), *attempts("c", [1] * 4)]
    result = summarise(episodes, 4)
    assert result.pass_at_1 == pytest.approx(5 / 12)
    assert result.pass_at_k == pytest.approx(2 / 3)
    assert (result.attempts, result.episodes, result.infrastructure_failures) == (4, 12, 0)
    assert result.tokens_per_summary == 0
    assert summarise(attempts("a", [0.5, 0.9]), 2).pass_at_1 == 0
    # pass@2 from four attempts of which one solved: 1 - C(3,2)/C(4,2)
    assert summarise(attempts("a", [1, 0, 0, 0]), 2).pass_at_k == pytest.approx(0.5)


def test_failures_have_their_lengths_by_task():
    episodes = [*attempts("a", [1, 0.5]), *attempts("b", [1, 1]), *attempts("c", [0, None])]
    short, long = conversation(0), conversation(0, summaries=2)
    episodes += [episode(0, short, task_id="d"), episode(0, long, task_id="d")]
    assert short.total_sampled < long.total_sampled
    failed = summarise(episodes, 2).failed_tokens
    assert failed.keys() == {"a", "c", "d"}
    assert failed["d"] == (short.total_sampled + long.total_sampled) / 2
    assert failed["a"] == episodes[1].transcript.total_sampled


def test_infrastructure_failures_are_counted_and_never_score():
    result = summarise([*attempts("a", [1, None, None, 1]), *attempts("b", [None, 0, 0, 0])], 4)
    assert result.pass_at_1 == pytest.approx(2 / 5)
    assert result.pass_at_k == pytest.approx(1 / 2)
    assert (result.episodes, result.infrastructure_failures) == (5, 3)
    assert result.outcomes == {"finished": 5, "infrastructure": 3}
    with pytest.raises(ValueError, match="none of 2 episodes was graded"):
        summarise(attempts("a", [None, None]), 2)


def test_costs_are_means_over_episodes():
    episodes = [
        episode(1, conversation(0, turns=1, summaries=2), turns=3, summaries=2),
        episode(0, conversation(0, turns=2), turns=2),
    ]
    result = summarise(episodes, 2)
    assert (result.turns, result.summaries, result.summary_tokens) == (2.5, 1.0, 2.0)
    assert result.tokens_per_summary == 2.0
    # Given and sampled: a prompt of 3, per turn 1 + 3 + 3, per summary 1 + 1 + 2 and 2 carried.
    assert result.tokens == pytest.approx(((3 + 3 * 7 + 2 * 6) + (3 + 2 * 7)) / 2)
    assert result.sampled_tokens == pytest.approx(((3 * 3 + 2 * 2) + 2 * 3) / 2)


def test_compaction_error_is_positive_when_compaction_costs_solutions():
    whole, compacted = summarise(attempts("a", [1, 1, 1, 0]), 4), summarise(attempts("a", [1, 0, 0, 0]), 4)
    assert compaction_error(whole, compacted) == pytest.approx(0.5)
    assert compaction_error(compacted, whole) == pytest.approx(-0.5)
    assert compaction_error(whole, whole) == 0


def test_facts_are_measured_over_the_episodes_whose_task_names_them():
    kept = [episode(1, summaries=2, facts_kept=1.0, facts_kept_last=last) for last in (1.0, 0.0)]
    result = summarise([*kept, episode(0, summaries=1), episode(None, facts_kept=0.0, facts_kept_last=0.0)], 1)
    assert (result.facts_kept, result.facts_kept_last) == (1.0, 0.5)
    plain = summarise([episode(0)], 1)
    assert plain.facts_kept is plain.facts_kept_last is None


def test_an_attempt_is_a_changed_file():
    """Passing without a change would be a task that needs none; giving up is not a failed attempt."""
    used = [EpisodeUsage(calls={"edit": 2}, changed_files=1), EpisodeUsage(calls={"edit": 1}, changed_files=2)]
    tried = [episode(r, usage=u, turns=1) for r, u in zip((1, 0), used, strict=True)]
    result = summarise([*tried, episode(0, usage=EpisodeUsage(malformed_calls=1), turns=2)], 1)
    assert result.attempted == pytest.approx(2 / 3)
    assert result.pass_given_attempt == pytest.approx(1 / 2)
    assert result.calls_per_turn == pytest.approx(4 / 4)
    assert summarise([episode(0)], 1).pass_given_attempt is None
