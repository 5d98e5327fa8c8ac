"""Groups of which the infrastructure lost episodes."""

import dataclasses

import pytest

from composer_jax.errors import UserError
from composer_jax.rl.batch import Group
from composer_jax.rl.config import AlgorithmConfig
from composer_jax.rl.incomplete_groups import INCOMPLETE, complete_group
from tests.rl.made_up import conversation, episode
from tests.rl.test_policy_update import CONFIG, STATE, update

SIZE = 5


def group(*rewards: float) -> Group:
    return Group([episode(r, conversation(100 * i, turns=1)) for i, r in enumerate(rewards)], list(rewards))


@pytest.mark.parametrize("rule", INCOMPLETE)
@pytest.mark.parametrize("graded", range(2, SIZE + 1))
def test_a_group_is_dropped_with_at_most_half_of_its_episodes(rule, graded):
    partial = group(1.0, 0.0, 0.5, 0.25, 0.75)
    partial = Group(partial.episodes[:graded], partial.rewards[:graded])
    result = complete_group(partial, SIZE, rule)
    if graded == SIZE:
        assert result is partial
    elif graded <= SIZE / 2 or rule == "drop":
        assert result is None
    elif rule == "keep":
        assert result is partial
    else:
        assert list(result.rewards) == [*partial.rewards, *partial.rewards][:SIZE]
        assert all(e is partial.episodes[i % graded] for i, e in enumerate(result.episodes))


def test_half_of_an_even_group_is_at_most_half():
    assert complete_group(group(1.0, 0.0), 4, "keep") is None
    assert complete_group(group(1.0, 0.0, 0.0), 4, "keep") is not None


@pytest.mark.parametrize(
    ("rule", "rows", "advantage"), [("keep", 3, 2 / 3), ("repeat", 4, 1 / 2), ("drop", 0, 0.0)], ids=INCOMPLETE
)
def test_a_step_follows_the_rule(rule, rows, advantage):
    """Rewards 1, 0, 0 and one episode lost; GLM-5 repeats the first."""
    policy_update = update(dataclasses.replace(CONFIG, group_size=4), incomplete_groups=rule)
    _, result = policy_update.step(STATE, [group(1.0, 0.0, 0.0), group(1.0, 0.0)], 8, 0)
    assert result.metrics["groups_incomplete"] == (2 if rule == "drop" else 1)
    assert result.is_updated == (rows > 0)
    if rows:
        batches = policy_update.learner.batches
        assert sum(batch["segments"].max(1).sum() for batch in batches) == rows
        assert max(batch["advantages"].max() for batch in batches) == pytest.approx(advantage)
        assert policy_update.learner.normalisers.policy == 8 * CONFIG.tokens_per_episode


def test_an_unknown_rule_is_refused():
    with pytest.raises(UserError, match="rl.algorithm.incomplete_groups='pad' is unknown; use keep, repeat, drop"):
        AlgorithmConfig(incomplete_groups="pad")
