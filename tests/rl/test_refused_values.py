"""Values that no config of RL takes: each is refused by a sentence that names it."""

import pytest

from composer_jax.agent.effort import EffortConfig, EffortLevel
from composer_jax.errors import UserError
from composer_jax.rl.config import NormaliserConfig, RLConfig
from composer_jax.rl.curriculum import CurriculumConfig
from composer_jax.rl.feedback import FeedbackConfig
from composer_jax.rl.reference import ReferenceKLConfig
from composer_jax.rl.rewards import RewardConfig

ON_A_LADDER = CurriculumConfig(ladders={"one": ("two", "three")})


@pytest.mark.parametrize(
    ("make", "fields", "word"),
    [
        (CurriculumConfig, {"window": -1}, "window=-1"),
        (CurriculumConfig, {"floor": 0.0}, "floor=0.0"),
        (CurriculumConfig, {"turns": -1.0}, "turns=-1.0"),
        (CurriculumConfig, {"promote_above": 0.2}, "fall_below=0.2 and promote_above=0.2"),
        (CurriculumConfig, {"promote_above": 1.1}, "promote_above=1.1"),
        (CurriculumConfig, {"fall_below": -0.1}, "fall_below=-0.1"),
        (CurriculumConfig, {"rung_window": 0}, "rung_window=0"),
        (CurriculumConfig, {"easier": -0.1}, "easier=-0.1"),
        (CurriculumConfig, {"easier": 1.0}, "easier=1.0"),
        (CurriculumConfig, {"ladders": {"a": ()}}, "ladders.a has no harder rung"),
        (CurriculumConfig, {"ladders": {"a": ("b",), "c": ("b",)}}, "ladders.c names 'b'"),
        (CurriculumConfig, {"ladders": {"a": ("b", "b")}}, "ladders.a names 'b'"),
        (EffortLevel, {"thinking_tokens": -1}, "thinking_tokens=-1"),
        (EffortLevel, {"length_factor": -0.5}, "length_factor=-0.5"),
        (EffortConfig, {"prompt": "Think."}, "'Think.'"),
        (EffortConfig, {"levels": {"": EffortLevel()}}, "without a name"),
        (FeedbackConfig, {"weight": -0.1}, "weight=-0.1"),
        (FeedbackConfig, {"hints_per_episode": 0}, "hints_per_episode=0"),
        (FeedbackConfig, {"tokens_per_row": 0}, "tokens_per_row=0"),
        (FeedbackConfig, {"detectors": ()}, "detectors is empty"),
        (FeedbackConfig, {"detectors": ("typo",)}, "'typo' is unknown"),
        (FeedbackConfig, {"detectors": ("mine:shout", "other:shout")}, "'shout' twice"),
        (NormaliserConfig, {"policy": "rows"}, "policy='rows'"),
        (ReferenceKLConfig, {"coefficient": -0.1}, "coefficient=-0.1"),
        (ReferenceKLConfig, {"form": "row"}, "form='row'"),
        (RewardConfig, {"weight": -0.1}, "weight=-0.1"),
        (RewardConfig, {"call_token": -1.0}, "call_token=-1.0"),
        (RewardConfig, {"q": -0.5}, "q=-0.5"),
        (RewardConfig, {"k": 0.0}, "k=0.0"),
        (RewardConfig, {"penalties": {"malformed_calls": -0.1}}, "malformed_calls=-0.1"),
        (RewardConfig, {"penalties": {"rudeness": 0.1}}, "rudeness is not a behaviour"),
        (RewardConfig, {"behaviors": {"malformed_calls": "a:b"}}, "malformed_calls has the name"),
        (RLConfig, {"max_staleness": -1}, "max_staleness=-1"),
        (RLConfig, {"late_groups": "lose"}, "late_groups='lose'"),
        (RLConfig, {"late_groups": "drop", "deterministic": True}, "depends on timing"),
        (RLConfig, {"router_replay": "maybe"}, "router_replay='maybe'"),
        (RLConfig, {"groups": {"one": 1, "three": 2}, "curriculum": ON_A_LADDER}, "rl.groups.three=2"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_named(make, fields, word):
    with pytest.raises(UserError, match=word):
        make(**fields)
