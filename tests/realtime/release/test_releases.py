"""Releases: states, one owner, what is pinned and served, and the way back."""

import json
from pathlib import Path

import numpy as np
import pytest

from composer_jax.checkpoint.pinned_versions import restore_version, weights_hash
from composer_jax.checkpoint.weight_chain import ChainFiles, Shard, WeightPublisher, WeightReceiver
from composer_jax.errors import UserError
from composer_jax.realtime.release import releases
from composer_jax.realtime.release.canary import CanaryRules, LabelRow, arm_of
from composer_jax.realtime.release.gate import GateRules
from composer_jax.realtime.release.releases import ReleaseFolder, read_releases, served_versions
from composer_jax.realtime.release.steps import approve, canary_step, gate_step, refuse, status

PASS = {"verdict": "pass", "reasons": []}
RULES = CanaryRules(horizon_s=10, min_users=5)


class Clock:
    """Seconds that the test sets; every reading takes one."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


class States:
    """The states of a learner, by version."""

    def __init__(self) -> None:
        self.kept, self.calls = set(), []

    def keep(self, versions):
        self.kept = set(versions)

    def has(self, version):
        return version in self.kept

    def restore(self, version, as_version):
        assert version in self.kept
        self.calls.append((version, as_version))


@pytest.fixture
def chain(tmp_path):
    """Versions 0 to 7, with one in full among ten."""
    folder = str(tmp_path / "weights")
    publish(folder, range(8))
    return folder


def publish(folder, versions, labels=None):
    publisher = WeightPublisher(folder)
    for version in versions:
        publisher.publish({Shard("w", (0,), (4,)): np.full(4, version, np.float32)}, version, labels)


@pytest.fixture
def clock():
    return Clock()


def opened(tmp_path, clock, **options) -> ReleaseFolder:
    return ReleaseFolder(tmp_path, by="test", clock=clock, **options)


def arms(chain):
    return json.loads((Path(chain) / "arms.json").read_text())


def pins(chain):
    return ChainFiles(chain).pins()


def labels(release, users=200, effect=0.0):
    rng, rows = np.random.default_rng(0), []
    for i in range(users):
        arm = arm_of(release.salt, str(i), release.fraction)
        value = float(rng.normal(effect if arm == "candidate" else 0, 0.1))
        rows.append(LabelRow(str(i), arm, release.fraction, value))
    return rows


def look(folder, clock, **options):
    clock.now += 100
    return canary_step(folder, labels(folder.last, **options), RULES, clock=clock, skip_aa=True)[0]


def released(folder, clock):
    while folder.last.state in ("gated", "canary"):
        look(folder, clock, users=3000)
    return folder.last


def test_a_release_goes_through_every_state(tmp_path, chain, clock):
    with opened(tmp_path, clock) as folder:
        folder.adopt(chain, 5, 3, hashes={"commit": "abc"})
        assert (arms(chain), pins(chain)) == ({"anchor": 3, "candidate": 3}, {3, 5})
        folder.record_gate(PASS)
        assert arms(chain) == {"anchor": 3, "candidate": 5}
        assert released(folder, clock).state == "released"
        assert arms(chain) == {"anchor": 5, "candidate": 5}
    (release,) = read_releases(tmp_path)
    assert [row["state"] for row in release.transitions] == [
        "trained",
        "gated",
        "canary",
        "canary",
        "canary",
        "released",
    ]
    assert [row.get("fraction") for row in release.transitions[2:5]] == [0.01, 0.05, 0.25]
    assert all(row["by"] == "test" and row["time"] > 1000 for row in release.transitions)
    assert release.hashes == {"anchor": weights_hash(chain, 3), "weights": weights_hash(chain, 5), "commit": "abc"}
    assert status([release])["serving"] == 5 and json.dumps(status([release]))


def test_harm_rolls_back_weights_and_learner_at_once(tmp_path, chain, clock):
    states = States()
    server = WeightReceiver(chain)
    with opened(tmp_path, clock, learner=lambda _: states) as folder:
        folder.adopt(chain, 7, 4, learner=str(tmp_path))
        assert states.kept == {4, 7}
        folder.record_gate(PASS)
        folder.move("canary", "", fraction=0.5)
        server.receive(arms(chain)["candidate"])
        assert look(folder, clock, users=2000, effect=-0.2).state == "rolled_back"
    assert arms(chain) == {"anchor": 8, "candidate": 8} and states.calls == [(4, 8)]
    server.receive(arms(chain)["candidate"])
    assert server.arrays["w"].tolist() == [4, 4, 4, 4]
    assert weights_hash(chain, 8) == weights_hash(chain, 4)
    (release,) = read_releases(tmp_path)
    assert release.canary[-1]["decision"] == "roll back" and served_versions([release]) == [4, 8]


class Died(Exception):
    """A process was killed."""


@pytest.fixture
def canary(tmp_path, chain, clock):
    """Release 1 of version 7 in its canary at 1 %; version 4 serves the others."""
    with opened(tmp_path, clock) as folder:
        folder.adopt(chain, 7, 4)
        folder.record_gate(PASS)
        folder.move("canary", "", fraction=0.01)
        yield folder


def test_a_version_that_came_between_a_rollback_and_its_publication(chain, canary, monkeypatch):
    def restore(*arguments):
        publish(chain, [8])
        return restore_version(*arguments)

    monkeypatch.setattr(releases, "restore_version", restore)
    with pytest.raises(UserError, match="version 8 cannot restore"):
        canary.roll_back("")
    assert arms(chain) == {"anchor": 4, "candidate": 7}, "nothing serves what is not published"
    for state in ("released", "canary"):
        with pytest.raises(UserError, match="it can become rolled_back"):
            canary.move(state, "", fraction=1.0)
    monkeypatch.undo()
    canary.reconcile()
    assert (canary.last.state, arms(chain)["candidate"]) == ("rolled_back", 9)
    assert weights_hash(chain, 9) == weights_hash(chain, 4)


def test_a_rollback_that_died_after_its_publication_while_a_trainer_went_on(chain, canary, monkeypatch):
    def restore(*arguments):
        restore_version(*arguments)
        publish(chain, [9])
        raise Died

    monkeypatch.setattr(releases, "restore_version", restore)
    with pytest.raises(Died):
        canary.roll_back("")
    monkeypatch.undo()
    canary.reconcile()
    assert canary.last.state == "rolled_back" and arms(chain) == {"anchor": 8, "candidate": 8}


def test_a_rollback_leaves_a_version_alone_that_is_being_written(chain, canary):
    Path(chain, "version-00000008").mkdir()
    assert canary.roll_back("").transitions[-1]["as"] == 9


def test_users_go_back_before_a_learner_that_is_locked(tmp_path, chain, clock):
    class Locked(States):
        is_locked = True

        def restore(self, version, as_version):
            if self.is_locked:
                raise UserError("the run is in use")
            super().restore(version, as_version)

    states = Locked()
    with opened(tmp_path, clock, learner=lambda _: states) as folder:
        folder.adopt(chain, 7, 4, learner=str(tmp_path))
        folder.record_gate(PASS)
        with pytest.raises(UserError, match="in use"):
            folder.roll_back("")
    assert arms(chain) == {"anchor": 8, "candidate": 8} and 8 in pins(chain)
    states.is_locked = False
    opened(tmp_path, clock, learner=lambda _: states).close()
    assert read_releases(tmp_path)[0].state == "rolled_back" and states.calls == [(4, 8)]


@pytest.mark.parametrize("kind", [UserError, OSError])
def test_a_learner_whose_folder_is_gone_stops_no_release(tmp_path, chain, clock, kind):
    def gone(_):
        raise kind("the folder is not there.")

    with opened(tmp_path, clock, learner=lambda _: States()) as folder:
        folder.adopt(chain, 7, 4, learner=str(tmp_path))
    with opened(tmp_path, clock, learner=gone) as folder:
        with pytest.raises(UserError, match="release 1 is gated, but the learner's states were not kept: the folder"):
            folder.record_gate(PASS)
        with pytest.raises(UserError, match="release 1 is canary"):
            folder.move("canary", "", fraction=0.01)
        assert look(folder, clock, users=9).state == "canary"
        with pytest.raises(UserError, match="all users have version 8, .* --leave_learner goes on without it"):
            folder.roll_back("users complain")
    assert arms(chain) == {"anchor": 8, "candidate": 8} and 8 in pins(chain)
    with pytest.raises(UserError, match="all users have version 8"):
        opened(tmp_path, clock, learner=gone)
    with opened(tmp_path, clock, learner=gone, leaves_learner=True) as folder:
        assert (folder.last.state, folder.resumed_rollback, folder.last.learner) == ("rolled_back", True, "")
        assert folder.last.transitions[-1]["reason"].endswith("users complain; the learner stays as it was")
        folder.adopt(chain, 8)
    with opened(tmp_path, clock, learner=gone) as folder:
        assert not folder.resumed_rollback


def test_states_that_a_killed_process_has_not_kept_are_kept_by_the_next(tmp_path, chain, clock):
    states = States()
    with opened(tmp_path, clock, learner=lambda _: states) as folder:
        folder.adopt(chain, 7, 4, learner=str(tmp_path))
    states.kept = set()
    opened(tmp_path, clock, learner=lambda _: states).close()
    assert states.kept == {4, 7}


def test_a_canary_that_is_looked_at_often_has_a_file_that_does_not_grow(tmp_path, canary, clock, monkeypatch):
    monkeypatch.setattr(releases, "MOST_WAITS", 3)
    canary.note_look({"decision": "hold", "held_by": ["arm sizes"]})
    for number in range(9):
        canary.note_look({"decision": "wait", "number": number})
    assert [seen.get("number") for seen in read_releases(tmp_path)[0].canary] == [None, 6, 7, 8]


def test_a_learner_without_the_state_is_refused_at_the_beginning(tmp_path, chain, clock):
    class Empty(States):
        def keep(self, versions):
            self.kept = set(versions) - {4}

    with opened(tmp_path, clock, learner=lambda _: Empty()) as folder:
        with pytest.raises(UserError, match="has no state of version 4"):
            folder.adopt(chain, 7, 4, learner=str(tmp_path))
        assert read_releases(tmp_path) == []


def test_only_what_served_all_users_is_gone_back_to(chain, canary):
    with pytest.raises(UserError, match="version 6 has not served all users; roll back to one that has: 4"):
        canary.roll_back("", to=6)
    canary.roll_back("")
    assert canary.roll_back("the restoration was bad", to=4).state == "rolled_back"
    assert arms(chain) == {"anchor": 9, "candidate": 9} and served_versions(canary.releases) == [4, 8, 9]


def test_a_second_rollback_goes_on_after_a_crash(tmp_path, chain, canary, clock, monkeypatch):
    def die(*_):
        raise Died

    canary.roll_back("")
    monkeypatch.setattr(releases, "restore_version", die)
    with pytest.raises(Died):
        canary.roll_back("again")
    monkeypatch.undo()
    assert canary.last.is_open
    canary.reconcile()
    assert arms(chain)["anchor"] == 9 and not canary.last.is_open


def test_a_rollback_does_not_wait_for_the_clock(canary, clock):
    before = canary.last.transitions[-1]["time"]
    clock.now = 10
    assert canary.roll_back("").transitions[-1]["time"] == before


def test_no_step_of_the_way_forward_is_left_out(tmp_path, chain, clock):
    with opened(tmp_path, clock) as folder:
        folder.adopt(chain, 7, 4)
        with pytest.raises(UserError, match="has not been through the gate"):
            folder.move("gated", "")
        folder.record_gate(PASS)
        with pytest.raises(UserError, match="by roll_back, which restores its weights"):
            folder.move("rolled_back", "")
        folder.move("canary", "", fraction=0.01)
        with pytest.raises(UserError, match="cannot become released"):
            folder.move("released", "", fraction=1.0)


def test_a_chain_is_released_from_one_folder(tmp_path, chain, clock, canary):
    with opened(tmp_path / "other", clock) as other:
        with pytest.raises(UserError, match="are released from .*, not .*other"):
            other.adopt(chain, 6, 5)
        assert other.releases == []
    assert arms(chain) == {"anchor": 4, "candidate": 7} and pins(chain) == {4, 7}


def test_the_last_two_versions_that_served_all_stay(tmp_path, chain, clock):
    with opened(tmp_path, clock) as folder:
        for version in (1, 2, 5):
            folder.adopt(chain, version, 0 if version == 1 else None)
            folder.record_gate(PASS)
            released(folder, clock)
        assert pins(chain) == {2, 5}
        folder.roll_back("a person", to=2)
        assert (pins(chain), arms(chain)["anchor"]) == ({5, 8}, 8)
        folder.adopt(chain, 8)
        assert folder.last.is_aa and pins(chain) == {5, 8}


def test_sessions_are_in_one_release_only(tmp_path, chain, clock):
    with opened(tmp_path, clock) as folder:
        folder.begin(chain, 3)
        assert folder.claim(["a", "b", "a", "c"], most=2) == ("a", "b")
        publish(chain, [8], {"release": 1})
    with opened(tmp_path, clock) as folder:  # a process that died after it published
        assert (folder.last.state, folder.last.version) == ("trained", 8)
        folder.record_gate({"verdict": "fail", "reasons": ["worse"]})
        folder.begin(chain)
        assert folder.claim(["a", "b", "c"]) == ("c",)
        with pytest.raises(UserError, match="cannot become labelled"):
            folder.claim(["d"])


def test_no_state_is_skipped(tmp_path, chain, clock):
    with opened(tmp_path, clock) as folder:
        with pytest.raises(UserError, match="has no release"):
            folder.record_gate(PASS)
        folder.adopt(chain, 5, 3)
        for state in ("canary", "released", "rolled_back", "collecting", "trained"):
            with pytest.raises(UserError, match=f"is trained, from which it cannot become {state}"):
                folder.move(state, "")
        with pytest.raises(UserError, match="nothing to roll back; end it with gate --refuse=REASON"):
            folder.roll_back("")
        with pytest.raises(
            UserError, match="release 1 is trained; end it with gate --refuse=REASON before another begins"
        ):
            folder.adopt(chain, 6)
        with pytest.raises(UserError, match="for one that is canary"):
            canary_step(folder, [], RULES)


def test_a_person_decides_on_a_held_release(tmp_path, chain, clock):
    hold = {"verdict": "hold", "reasons": ["edit rate"]}
    with opened(tmp_path, clock) as folder:
        folder.adopt(chain, 5, 3)
        folder.record_gate(hold)
        with pytest.raises(UserError, match="cannot become canary"):
            folder.move("canary", "")
        assert approve(folder, "looked at it").state == "gated"
        folder.move("canary", "", fraction=0.25)
        assert folder.move("held", "monitor").fraction == 0.25
        assert arms(chain) == {"anchor": 3, "candidate": 5}, "users keep their arms"
        with pytest.raises(UserError, match="held in its canary"):
            refuse(folder, "")
        assert approve(folder, "").fraction == 0.25
        folder.move("held", "again")
        folder.roll_back("a person")
        folder.adopt(chain, 8)  # the restored version serves
        folder.record_gate(hold)
        assert refuse(folder, "no").state == "failed"


def test_a_release_that_was_begun_by_mistake_has_a_way_out(tmp_path, chain, clock):
    with opened(tmp_path, clock) as folder:
        folder.adopt(chain, 5, 3)
        with pytest.raises(UserError, match="is trained; end it with gate --refuse=REASON before another begins"):
            folder.adopt(chain, 6, 3)
        assert refuse(folder, "6 was meant").state == "failed"
        folder.adopt(chain, 6)
        folder.record_gate(PASS)
        with pytest.raises(UserError, match="is gated; release it or roll it back before another begins"):
            folder.begin(chain)
        with pytest.raises(UserError, match="is gated, and --refuse is for one that has not passed the gate; roll it"):
            refuse(folder, "")


def test_a_release_that_cannot_be_trained_has_a_way_out(tmp_path, chain, clock):
    """Another process has published a version since it began."""
    with opened(tmp_path, clock) as folder:
        folder.begin(chain, 5)
        folder.claim(["a"])
        with pytest.raises(UserError, match="is labelled; there is nothing to roll back; end it with gate --refuse"):
            folder.roll_back("")
        assert refuse(folder, "version 8 is not ours").state == "failed"
        newest = max(ChainFiles(chain).versions())
        assert newest > 5
        folder.roll_back("version 8 is not ours", 5)
        release = folder.begin(chain)
        assert release.anchor == max(ChainFiles(chain).versions()) == newest + 1
        assert arms(chain) == {"anchor": newest + 1, "candidate": newest + 1}


def test_an_a_a_test_comes_first(tmp_path, chain, clock):
    with opened(tmp_path, clock) as folder:
        folder.adopt(chain, 3, 3)
        gate_step(folder, None, None, GateRules())
        released(folder, clock)
        assert [row.get("fraction") for row in folder.last.transitions][2:] == [0.5, None]
        folder.adopt(chain, 5)
        with pytest.raises(UserError, match="needs --anchor and --candidate"):
            gate_step(folder, None, None, GateRules())
        folder.record_gate(PASS)
        assert canary_step(folder, [], RULES, clock=clock)[0].fraction == 0.01


def test_without_an_a_a_test_no_canary_starts(tmp_path, chain, clock):
    with opened(tmp_path, clock) as folder:
        folder.adopt(chain, 5, 3)
        folder.record_gate(PASS)
        with pytest.raises(UserError, match="begin a release with --version=3 first, or give --skip_aa"):
            canary_step(folder, [], RULES, clock=clock)


def test_a_second_owner_is_refused(tmp_path, chain, clock):
    with opened(tmp_path, clock), pytest.raises(UserError, match="is in use by process"):
        opened(tmp_path, clock)
    opened(tmp_path, clock).close()


def test_a_clock_that_goes_backwards_is_refused(tmp_path, chain, clock):
    with opened(tmp_path, clock) as folder:
        folder.adopt(chain, 5, 3)
        clock.now = 500
        with pytest.raises(UserError, match="the clock says 501, which is 500 s before the last transition"):
            folder.record_gate(PASS)
        assert read_releases(tmp_path)[0].state == "trained"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((5,), "the first release needs --serving"),
        ((2, 3), "version 2 is older than the anchor 3"),
        ((9, 3), "has versions .* of the weights, not 9"),
        ((5, 9), "has versions .* of the weights, not 9"),
    ],
)
def test_versions_that_cannot_be_released(tmp_path, chain, clock, arguments, sentence):
    with opened(tmp_path, clock) as folder, pytest.raises(UserError, match=sentence):
        folder.adopt(chain, *arguments)
    assert read_releases(tmp_path) == []


def test_versions_that_do_not_fit_the_releases_before(tmp_path, chain, clock):
    with opened(tmp_path, clock) as folder:
        folder.adopt(chain, 5, 3)
        folder.record_gate({"verdict": "fail", "reasons": []})
        with pytest.raises(UserError, match="version 3 serves now, not 5; leave --serving out"):
            folder.adopt(chain, 6, 5)
        with pytest.raises(UserError, match="use another --workdir"):
            folder.adopt(f"{chain}2", 6)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 9}', '{"format": 1, "state": "gated"}'])
def test_a_damaged_file(tmp_path, chain, clock, content):
    with opened(tmp_path, clock) as folder:
        folder.adopt(chain, 5, 3)
    (tmp_path / "releases" / "0001.json").write_text(content)
    with pytest.raises(UserError, match=r"0001.json is"):
        opened(tmp_path, clock)
    with pytest.raises(UserError, match=r"0001.json is"):
        opened(tmp_path, clock)  # the lock was given back
