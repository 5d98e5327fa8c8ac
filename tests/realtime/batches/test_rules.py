"""BatchRules refuses what cannot be meant, by name."""

import pytest

from composer_jax.errors import UserError
from composer_jax.realtime.batches.features import CAUSED, FEATURES, AnswerFacts, resolve_features
from composer_jax.realtime.batches.rules import BatchRules

FACTS = AnswerFacts("change/small", 10, 500, 2, 1e9 + 3600.0 * 5, 0.25)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"min_sessions": 1}, "min_sessions=1; a baseline needs 2"),
        ({"horizon_s": float("inf")}, "horizon_s=inf is out of range"),
        ({"lag": -1}, "lag=-1 is negative"),
        ({"baseline": "mean"}, "baseline='mean' is unknown; use one of shrinkage, ridge"),
        ({"cap_user": 0.0}, "cap_user=0.0 is not a share above 0"),
        ({"cap_repository": 1.5}, "cap_repository=1.5"),
        ({"cap_organisation": float("nan")}, "cap_organisation=nan"),
        ({"gamma": 1.1}, "gamma=1.1 is not between"),
        ({"advantage_limit": 0.0}, "advantage_limit=0.0 is out of range"),
        ({"advantage_limit": float("inf")}, "advantage_limit=inf is out of range"),
        ({"features": ()}, "features is empty"),
        ({"features": ("hour", "hour")}, "has 'hour' twice"),
        ({"features": ("hours",)}, "'hours' is unknown; use one of kind"),
    ],
)
def test_values_out_of_range_are_named(fields, sentence):
    with pytest.raises(UserError, match=sentence):
        BatchRules(**fields)


@pytest.mark.parametrize("name", ["calls", "tokens", "seconds", "edit_weight", "keep", "edit_size"])
def test_what_the_answer_causes_is_refused_by_name(name):
    assert name in CAUSED
    with pytest.raises(UserError, match=f"has {name!r}, which the answer causes"):
        BatchRules(features=("hour", name))


def test_features_are_columns_of_what_is_known_before_and_of_a_users_own():
    assert not CAUSED & FEATURES.keys()
    own = resolve_features(["kind", f"{__name__}:size_in_kilo"])
    assert [list(feature(FACTS)) for feature in own] == [[1.0, 0.0, 0.0], [0.5]]
    assert all(len(feature(FACTS)) >= 1 for feature in FEATURES.values())


def size_in_kilo(facts):
    return (facts.prompt_tokens / 1000,)
