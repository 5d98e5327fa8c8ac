"""What a batch's manifest says of organisations: their shares, and whether one of them turns the batch around."""

from types import SimpleNamespace

import numpy as np
import pytest

from composer_jax.realtime.batches.monitors import direction, moved_by_session
from composer_jax.realtime.labels.signal_types import censored, observed


def batch(*rows):
    """rows: (organisation, advantage, kept share or None); every session has an answer of ten tokens."""
    sessions = [
        SimpleNamespace(
            candidate=SimpleNamespace(
                record=SimpleNamespace(organisation=organisation),
                label=SimpleNamespace(signals={"keep": censored("lost") if kept is None else observed(kept)}),
            ),
            turns=[SimpleNamespace(tokens=10)],
            tokens=10,
        )
        for organisation, _, kept in rows
    ]
    numbers = SimpleNamespace(turns=[[SimpleNamespace(advantage=advantage)] for _, advantage, _ in rows])
    return sessions, numbers


def test_an_organisation_without_which_the_sign_is_another_one_is_named():
    ours = [("", 0.5, 0.0), ("", -0.5, 1.0), ("", 9.0, None)]  # away from kept edits; one without a measurement
    found = direction(*batch(*ours, ("a", 1.0, 1.0), ("a", -1.0, 0.0), ("b", 0.1, 0.5)))
    rows = np.array([[0.5, 0.0], [-0.5, 1.0], [1.0, 1.0], [-1.0, 0.0], [0.1, 0.5]])
    mean = lambda part: (part[:, 0] * (part[:, 1] - part[:, 1].mean())).mean()  # noqa: E731
    assert found.all == pytest.approx(mean(rows)) and found.all > 0
    assert found.without == {"a": pytest.approx(mean(rows[[0, 1, 4]])), "b": pytest.approx(mean(rows[:4]))}
    assert found.changes_sign == ("a",)
    assert direction(*batch(("", 1.0, 0.5))).all is None


def test_what_a_session_moves_is_the_sum_over_its_tokens():
    assert moved_by_session(*batch(("", -0.5, 1.0), ("a", 0.25, 1.0))).tolist() == [5.0, 2.5]
