"""Which versions are trained: the last ones that served everybody, none that was rolled back, each arm its own."""

import pytest

from composer_jax.realtime.batches.versions import trainable_versions
from composer_jax.realtime.release.releases import Release
from composer_jax.serve.traffic.records import SessionRecord


def release(number, anchor, version, *states, rollback=None):
    """states: (name, time) or (name, time, {fields})."""
    rows = tuple({"state": row[0], "time": row[1], **(row[2] if len(row) > 2 else {})} for row in states)
    return Release(number, "chain", anchor, "salt", version, transitions=rows, rollback=rollback)


def served(number, anchor, version):
    time = 1000.0 * number
    return release(number, anchor, version, ("trained", time), ("gated", time + 100), ("canary", time + 200),
                   ("released", time + 500))  # fmt: skip


def back(number, anchor, version, to, as_version):
    time = 1000.0 * number
    return release(number, anchor, version, ("trained", time), ("gated", time + 100), ("canary", time + 200),
                   ("rolled_back", time + 300, {"as": as_version}), rollback={"to": to, "as": as_version})  # fmt: skip


COLLECTING = ("collecting", 9000.0)


@pytest.mark.parametrize(
    ("releases", "by_lag"),
    [
        ([release(1, 4, None, COLLECTING)], {0: {4}, 2: {4}}),
        ([served(1, 4, 5), served(2, 5, 6), release(3, 6, None, COLLECTING)], {0: {6}, 1: {5, 6}, 9: {4, 5, 6}}),
        # 6 was rolled back to 5 as 7: the weights of 5 and 7 are one version.
        ([served(1, 4, 5), back(2, 5, 6, 5, 7), release(3, 7, None, COLLECTING)], {0: {5, 7}, 1: {4, 5, 7}}),
        # 6 served everybody before 7 was rolled back to 5.
        (
            [served(1, 4, 5), served(2, 5, 6), back(3, 6, 7, 5, 8), release(4, 8, None, COLLECTING)],
            {0: {5, 8}, 1: {4, 5, 8}, 9: {4, 5, 8}},
        ),
        # An A/A test serves one version twice, also when it is rolled back.
        ([served(1, 4, 4), release(2, 4, None, COLLECTING)], {0: {4}, 1: {4}}),
        ([served(1, 3, 4), back(2, 4, 4, 4, 5), release(3, 5, None, COLLECTING)], {0: {4, 5}, 1: {3, 4, 5}}),
        # Twice back: 8 has the weights of 7, which has those of 5.
        (
            [served(1, 4, 5), back(2, 5, 6, 5, 7), back(3, 7, 9, 7, 10), release(4, 10, None, COLLECTING)],
            {0: {5, 7, 10}, 1: {4, 5, 7, 10}},
        ),
        # Back to what it had released itself: its weights are not what was taken back.
        (
            [
                served(1, 3, 4),
                release(
                    2,
                    4,
                    5,
                    ("canary", 2000.0),
                    ("released", 2100.0),
                    ("rolled_back", 2200.0, {"as": 6}),
                    rollback={"to": 5, "as": 6},
                ),
                release(3, 6, None, COLLECTING),
            ],
            {0: {5, 6}, 1: {4, 5, 6}},
        ),
        ([served(1, 4, 5), release(2, 5, 6, ("trained", 2000.0), ("failed", 2100.0))], {0: {5}, 1: {4, 5}}),
    ],
)
def test_the_last_versions_that_served_and_none_that_was_rolled_back(releases, by_lag):
    for lag, versions in by_lag.items():
        assert trainable_versions(releases, lag).versions == versions, lag


def record(opened, arm=""):
    return SessionRecord("s", "key", "u", "", "", opened, arm)


def test_a_session_of_a_canary_trains_its_own_arm_only():
    trainable = trainable_versions([served(1, 4, 5), release(2, 5, None, COLLECTING)], 1)
    in_canary = [trainable.of_session(record(1300.0, arm)) for arm in ("anchor", "candidate", "")]
    assert in_canary == [{4}, {5}, set()]
    for opened in (1199.0, 1500.0):
        assert trainable.of_session(record(opened, "candidate")) == {4, 5}
    held = release(1, 4, 5, ("gated", 0.0), ("canary", 100.0), ("held", 200.0), ("canary", 300.0), ("released", 400.0))
    trainable = trainable_versions([held], 0)
    assert trainable.of_session(record(250.0, "candidate")) == {5}
    assert trainable.of_session(record(250.0, "anchor")) == set()
