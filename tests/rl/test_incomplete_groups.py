"""Groups of which the infrastructure lost episodes."""

import dataclasses

import pytest

from composer_jax.rl.batch import Group, has_enough_graded
from tests.rl.made_up import conversation, episode
from tests.rl.test_policy_update import CONFIG, STATE, update


def group(*rewards: float) -> Group:
    return Group([episode(r, conversation(100 * i, turns=1)) for i, r in enumerate(rewards)], list(rewards))


@pytest.mark.parametrize(("size", "least"), [(4, 3), (5, 3)])
def test_a_group_is_left_out_with_at_most_half_of_its_episodes(size, least):
    rewards = [1.0, 0.0, 0.5, 0.25, 0.75]
    trained = [graded for graded in range(2, size + 1) if has_enough_graded(group(*rewards[:graded]), size)]
    assert trained == list(range(least, size + 1))


def test_a_step_trains_the_rest_of_a_group_and_leaves_out_half_of_one():
    """Rewards 1, 0, 0 and one episode lost; of the other group, two of four."""
    policy_update = update(dataclasses.replace(CONFIG, group_size=4))
    _, result = policy_update.step(STATE, [group(1.0, 0.0, 0.0), group(1.0, 0.0)], 8, 0)
    assert result.metrics["groups_incomplete"] == 1 and result.is_updated
    batches = policy_update.learner.batches
    assert sum(batch["segments"].max(1).sum() for batch in batches) == 3
    assert max(batch["advantages"].max() for batch in batches) == pytest.approx(2 / 3)
    assert policy_update.learner.normalisers.policy == 8 * CONFIG.tokens_per_episode
