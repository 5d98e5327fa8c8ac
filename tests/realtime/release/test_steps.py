"""Steps of a release: what a look reads, and where a person's approval leads."""

import numpy as np
import pytest

from composer_jax.checkpoint.weight_chain import Shard, WeightPublisher
from composer_jax.realtime.release.canary import CanaryRules, LabelRow, arm_of
from composer_jax.realtime.release.releases import ReleaseFolder
from composer_jax.realtime.release.steps import approve, canary_step

RULES = CanaryRules(horizon_s=10)


@pytest.fixture
def clock():
    """Every reading is an hour after the one before."""
    now = [0.0]

    def read() -> float:
        now[0] += 3600
        return now[0]

    return read


@pytest.fixture
def folder(tmp_path, clock):
    """A release that is gated, of version 2 against 1."""
    publisher = WeightPublisher(str(tmp_path / "weights"))
    for version in (1, 2):
        publisher.publish({Shard("w", (0,), (4,)): np.full(4, version, np.float32)}, version)
    with ReleaseFolder(tmp_path, by="test", clock=clock) as folder:
        folder.adopt(str(tmp_path / "weights"), 2, 1)
        folder.record_gate({"verdict": "pass", "reasons": []})
        yield folder


def labels(salt, fraction, *, assigned=None, harm=0.0, users=6000):
    """A label of each user, who returns in every step."""
    rng, rows = np.random.default_rng(0), []
    for i in range(users):
        arm = arm_of(salt, str(i), fraction if assigned is None else assigned)
        rows.append(LabelRow(str(i), arm, fraction, float(rng.normal(-harm if arm == "candidate" else 0.0))))
    return rows


def test_a_step_tests_users_who_return_with_the_arm_that_they_have_in_it(folder, clock):
    salt = folder.last.salt
    rows = labels(salt, 0.01) + labels(salt, 0.05) + labels(salt, 0.25, harm=0.5)
    folder.move("canary", "", fraction=0.05)
    assert canary_step(folder, rows, RULES, clock=clock)[0].fraction == 0.25, "the harm is not in this step"
    release, reason = canary_step(folder, rows, RULES, clock=clock)
    assert release.state == "rolled_back" and "over 6000 users" in reason
    assert release.canary[-1]["candidates"] == pytest.approx(1500, rel=0.1)


def test_users_of_a_step_before_do_not_end_the_next(folder, clock):
    rows = labels(folder.last.salt, 0.05)
    folder.move("canary", "", fraction=0.25)
    release, reason = canary_step(folder, rows, RULES, clock=clock)
    assert (release.fraction, reason) == (0.25, "an arm has 0 users, of at least 50")


def test_an_approved_canary_goes_on_though_its_labels_stay(folder, clock):
    rows = labels(folder.last.salt, 0.25, assigned=0.3)
    folder.move("canary", "", fraction=0.25)
    release, reason = canary_step(folder, rows, RULES, clock=clock)
    assert release.state == "held" and "assignment is broken" in reason
    approve(folder, "a client sends two names")
    assert canary_step(folder, rows, RULES, clock=clock)[0].state == "released"
