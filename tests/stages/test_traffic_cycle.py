"""The cycle of releases: which transition follows, for what it waits, and what a kill at any of its calls changes."""

import contextlib
import dataclasses
import json
import types
from pathlib import Path

import numpy as np
import pytest

from benchmarks.traffic_kills import LearnerFiles
from composer_jax.checkpoint.weight_chain import ChainFiles, Shard, WeightPublisher
from composer_jax.errors import UserError
from composer_jax.realtime.batches.store import SessionForgotten
from composer_jax.realtime.config import TrafficConfig
from composer_jax.realtime.labels.judge import JudgeUnavailable
from composer_jax.realtime.release import steps
from composer_jax.realtime.release.canary import CanaryRules, LabelRow, ServerNotReady, ServiceSample
from composer_jax.realtime.release.gate import GateRules
from composer_jax.realtime.release.releases import ReleaseFolder, read_releases
from composer_jax.realtime.release.steps import approve
from composer_jax.serve.traffic.database import NAME
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.stages import traffic_cycle
from composer_jax.stages.traffic_batch import BatchProgress
from composer_jax.stages.traffic_cycle import Deployment, advance, run_cycle
from composer_jax.stages.traffic_update import NothingLearned

USERS = 2000
RULES = TrafficConfig(
    gate=GateRules(margin=0.5, monitors=()), canary=CanaryRules(horizon_s=10, min_users=5, planned_users=400)
)


class Killed(BaseException):
    """As a kill: the next call finds what is on disk."""


class FakeStages:
    """What the cycle calls, without networks, servers and users. A version has its number as weights."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, 0.0
        self.chain, self.learner = str(path / "weights"), LearnerFiles(str(path / "learner"))
        self.labelled, self.worse, self.learns, self.harm, self.ready = USERS, False, True, 0.0, True
        self.run = types.SimpleNamespace(
            path=path,
            config=types.SimpleNamespace(rl=types.SimpleNamespace(publish=self.chain), traffic=RULES),
        )

    def publish(self, version, labels=None):
        self.learner.save(version, version)
        weights = {Shard("w", (0,), (8,)): np.full(8, version, np.float32)}
        WeightPublisher(self.chain).publish(weights, version, labels)

    def open_chain(self, run):
        if not ChainFiles(self.chain).versions():
            self.publish(0)
        return self.learner.latest()[0]

    def learner_of(self, run):
        return str(self.path / "learner")

    def train_release(self, run, release, batch):
        assert batch == f"the batch of release {release.number}"
        assert self.learner.latest()[0] == release.anchor, "the learner holds what users have"
        if not self.learns:
            raise NothingLearned("nothing to learn")
        self.publish(release.anchor + 1, {"release": release.number})
        return release.anchor + 1

    def evaluate_version(self, run, version):
        file = self.path / f"{version}.json"
        solved = {f"task{i}": float(not (self.worse and version % 2)) for i in range(40)}
        file.write_text(json.dumps({"suites": {"bugs": {"attempts": 1, "solved": solved}}}))
        return file

    def rows_of_canary(self, folders, horizon, release):
        rng, every = np.random.default_rng(0), round(1 / release.fraction)
        arms = ["candidate" if i % every == 0 else "anchor" for i in range(USERS)]
        effect = {"candidate": -self.harm, "anchor": 0.0}
        return [LabelRow(str(i), arm, release.fraction, float(rng.normal(effect[arm]))) for i, arm in enumerate(arms)]

    def require_version(self, servers, version):
        if not self.ready:
            raise ServerNotReady(f"{servers[0]} serves version 0, not {version}")

    def make_batch(self, folder, workdir, traffic, rules, rows):
        taken = sum(len(release.sessions) for release in folder.releases)
        free, file = self.labelled - taken, self.path / f"batch{folder.last.number}"
        if folder.last.state == "collecting":
            if free < rules.min_sessions:
                return BatchProgress(free, rules.min_sessions - free, None)
            folder.claim([f"session{taken + i}" for i in range(rules.min_sessions)])
        self.between_claim_and_batch()
        file.write_text("")
        return BatchProgress(rules.min_sessions, 0, {})

    def between_claim_and_batch(self):
        """Where a process can die."""

    def read_batch(self, workdir, number):
        assert (self.path / f"batch{number}").exists()
        return f"the batch of release {number}"


CALLS = (
    *("open_chain", "make_batch", "read_batch", "train_release", "evaluate_version", "rows_of_canary"),
    *("canary_step", "gate_step"),
)
"""Of the cycle's module, at which it is killed. The first six are fakes."""


@pytest.fixture
def stages(tmp_path, monkeypatch):
    fakes = FakeStages(tmp_path)
    for name in (*CALLS[:6], "learner_of"):
        monkeypatch.setattr(traffic_cycle, name, getattr(fakes, name))
    monkeypatch.setattr(steps, "require_version", fakes.require_version)
    monkeypatch.setattr(traffic_cycle, "provenance", lambda run: {"code": "of a test"})
    monkeypatch.setattr(traffic_cycle, "label_traffic", lambda *_, **__: [])
    monkeypatch.setattr(traffic_cycle, "learner_rows", lambda _: None)
    monkeypatch.setattr(traffic_cycle, "require_learning_rate", lambda _: None)
    monkeypatch.setattr(traffic_cycle, "traffic_hash", lambda _: "of a test")
    return fakes


def turn(stages, folders=(), **deployment):
    """Takes one step in a process of its own, an hour after the one before."""
    stages.now += 3600
    clock = lambda: stages.now  # noqa: E731
    options = {"servers": ["http://candidate"], "skip_aa": True, "clock": clock} | deployment
    with ReleaseFolder(stages.path, by="test", clock=clock, learner=lambda _: stages.learner) as folder:
        return advance(stages.run, folder, Deployment(folders, **options))


def turns(stages, count, **deployment):
    return [turn(stages, **deployment) for _ in range(count)]


def states(done):
    return [(step.release, step.state) for step in done]


ONE_RELEASE = ["collecting", "labelled", "trained", "gated", *["canary"] * 3, "released"]


def test_releases_follow_each_other(stages):
    done = turns(stages, 16)
    assert states(done) == [(number, state) for number in (1, 2) for state in ONE_RELEASE]
    assert all(step.moved for step in done)
    releases = read_releases(stages.path)
    assert [(one.anchor, one.version) for one in releases] == [(0, 1), (1, 2)]
    assert [row["fraction"] for row in releases[0].transitions if row["state"] == "canary"] == [0.01, 0.05, 0.25]
    assert set(releases[0].sessions).isdisjoint(releases[1].sessions)


def test_the_first_release_is_an_aa_test(stages):
    done = turns(stages, 5, skip_aa=False)
    assert states(done) == [(1, "trained"), (1, "gated"), (1, "canary"), (1, "released"), (2, "collecting")]
    assert read_releases(stages.path)[0].is_aa


def test_what_the_gate_refuses_is_rolled_back_and_the_learner_with_it(stages):
    stages.worse = True
    done = turns(stages, 5)
    assert states(done)[3:] == [(1, "failed"), (1, "rolled_back")]
    assert "the gate refused version 1: bugs: worse" in read_releases(stages.path)[0].transitions[-1]["reason"]
    stages.worse = False
    turns(stages, 3)
    last = read_releases(stages.path)[-1]
    assert (last.anchor, last.version, last.state) == (2, 3, "trained")
    assert stages.learner.latest() == (3, 3)


def test_a_harmful_canary_is_rolled_back(stages):
    turns(stages, 6)
    stages.harm = 5.0
    assert turn(stages).state == "rolled_back"
    assert turn(stages).state == "collecting" and read_releases(stages.path)[-1].anchor == 2


def test_an_update_that_learns_nothing_ends_its_release(stages):
    stages.learns = False
    assert states(turns(stages, 4)) == [(1, "collecting"), (1, "labelled"), (1, "failed"), (2, "collecting")]
    assert read_releases(stages.path)[0].transitions[-1]["reason"] == "nothing to learn"
    assert read_releases(stages.path)[1].anchor == 0


def test_a_user_who_withdraws_while_an_update_learns_does_not_end_the_cycle(stages, monkeypatch):
    turns(stages, 2)

    def forgets(*_):
        raise SessionForgotten("a session was forgotten")

    with monkeypatch.context() as patch:
        patch.setattr(traffic_cycle, "train_release", forgets)
        assert states(turns(stages, 1)) == [(1, "labelled")]
    assert states(turns(stages, 1)) == [(1, "trained")]


def test_it_says_for_what_it_waits(stages):
    stages.labelled = 118
    turn(stages)
    step = turn(stages)
    assert not step.moved and step.state == "collecting"
    assert str(step) == (
        "release 1 is collecting: 118 of 256 sessions are labelled and can be trained; 138 more are needed."
    )
    stages.labelled, stages.ready = 300, False
    turns(stages, 3)
    assert turn(stages).waits_for == "http://candidate serves version 0, not 1"
    stages.ready = True
    turn(stages)
    stages.now -= 3599
    assert turn(stages).waits_for == "1% of the users have it; the step is 1 s old, of at least 10 s"
    turns(stages, 3)
    began = read_releases(stages.path)[0].transitions[0]["time"]
    hours = (stages.now + 3600 - began) / 3600 + 2
    assert turn(stages, every_s=hours * 3600).waits_for == "it has ended, and the next one begins in 120 minutes"
    assert read_releases(stages.path)[-1].number == 1
    assert turn(stages, every_s=hours * 3600 - 7200).state == "collecting"


def test_a_router_and_a_judge_that_do_not_answer_are_waited_for(stages, monkeypatch):
    turns(stages, 5)
    assert "is not the router" in turn(stages, router="http://127.0.0.1:1").waits_for

    def label(*_, **__):
        raise UserError("the judge does not answer") from JudgeUnavailable("no")

    monkeypatch.setattr(traffic_cycle, "label_traffic", label)
    assert turn(stages).waits_for == "1% of the users have it; the judge does not answer"


def test_a_harmful_canary_is_rolled_back_while_the_judge_or_the_router_is_down(stages, monkeypatch):
    def label(*_, **__):
        raise UserError("the judge does not answer") from JudgeUnavailable("no")

    turns(stages, 5)
    with monkeypatch.context() as patches:
        patches.setattr(traffic_cycle, "label_traffic", label)
        samples = {"anchor": ServiceSample(1000, 0, 1000, 1.0), "candidate": ServiceSample(1000, 500, 500, 1.0)}
        patches.setattr(traffic_cycle, "read_service", lambda _: samples)
        assert turn(stages, router="http://router").state == "rolled_back"
    turns(stages, 6)
    stages.harm = 5.0
    assert turn(stages, router="http://127.0.0.1:1").state == "rolled_back"


def test_each_transition_has_the_policies_of_now(stages, monkeypatch):
    """The server has been restarted with another policy since the cycle began."""
    path, consents = stages.path / "traffic", []
    path.mkdir()
    (path / NAME).touch()

    def write_policy(consent):
        organisations = {"acme": {"consent": consent}}
        (path / "policy.json").write_text(json.dumps({"consent_text": "yes", "organisations": organisations}))

    def note(folders, *_, **__):
        consents.append(folders[0].policy.organisations["acme"].consent)
        return []

    monkeypatch.setattr(traffic_cycle, "label_traffic", note)
    write_policy("training")
    folders, stages.labelled = [TrafficFolder(path)], 100
    turn(stages, folders)
    turn(stages, folders)
    write_policy("none")
    turn(stages, folders)
    assert consents == ["training", "none"]


def test_a_held_release_waits_for_a_person(stages, monkeypatch):
    gate = dataclasses.replace(RULES.gate, monitors=("attempted",))
    stages.run.config.traffic = dataclasses.replace(RULES, gate=gate)
    evaluate, attempted = stages.evaluate_version, iter((0.5, 0.6))

    def evaluate_oddly(run, version):
        file = evaluate(run, version)
        content = json.loads(file.read_text())
        content["suites"]["bugs"]["attempted"] = next(attempted)
        file.write_text(json.dumps(content))
        return file

    monkeypatch.setattr(traffic_cycle, "evaluate_version", evaluate_oddly)
    turns(stages, 4)
    step = turn(stages)
    assert (
        step.state == "held" and "attempted 0.5 -> 0.6" in step.waits_for and "gate` with --approve" in step.waits_for
    )
    with ReleaseFolder(
        stages.path, by="a person", clock=lambda: stages.now, learner=lambda _: stages.learner
    ) as folder:
        approve(folder, "it is fine")
    assert turn(stages).state == "canary"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", [*CALLS, "between_claim_and_batch"])
def test_a_kill_at_any_call_changes_nothing(stages, monkeypatch, name, after):
    """A release that the gate refuses and one that is released, each killed at its first call of one function."""
    target, killed = stages if name == "between_claim_and_batch" else traffic_cycle, set()
    original = getattr(target, name)

    def die(*arguments, **options):
        number = len(read_releases(stages.path))
        dies = number not in killed
        killed.add(number)
        if dies and not after:
            raise Killed
        result = original(*arguments, **options)
        if dies:
            raise Killed
        return result

    monkeypatch.setattr(target, name, die)
    kills = 0
    while not (releases := read_releases(stages.path)) or releases[-1].number < 3:
        stages.worse = not releases or releases[-1].number == 1
        try:
            turn(stages)
        except Killed:
            kills += 1
    assert kills == 1 if name in ("rows_of_canary", "canary_step") else kills >= 2
    assert [one.state for one in releases] == ["rolled_back", "released", "collecting"]
    assert [(one.anchor, one.version) for one in releases] == [(0, 1), (2, 3), (3, None)]
    claimed = [session for one in releases for session in one.sessions]
    assert len(claimed) == len(set(claimed)) == 2 * 256
    assert set(ChainFiles(stages.chain).versions()) == {0, 1, 2, 3}
    for one in releases[:2]:
        passed = [row["state"] for row in one.transitions]
        assert passed == [*ONE_RELEASE[:3], "failed", "rolled_back"] if one.number == 1 else ONE_RELEASE


def test_a_cycle_says_everything_once_and_lets_go_of_the_releases_while_it_sleeps(stages, monkeypatch, capsys):
    stages.labelled = 300
    clock = lambda: stages.now  # noqa: E731

    @contextlib.contextmanager
    def open_releases(workdir, *, by, config, clock):
        with ReleaseFolder(workdir, by=by, clock=clock, learner=lambda _: stages.learner) as folder:
            yield stages.run, folder

    def sleep(seconds):
        if read_releases(stages.path)[-1].number == 2:
            raise Killed
        with ReleaseFolder(stages.path, by="another", clock=clock, learner=lambda _: stages.learner):
            stages.now += seconds

    monkeypatch.setattr(traffic_cycle, "open_releases", open_releases)
    with pytest.raises(Killed):
        run_cycle(stages.path, Deployment([], skip_aa=True, every_s=3600.0, clock=clock), by="test", sleep=sleep)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("release")]
    assert said[:4] == [f"release 1 is {state}" for state in ONE_RELEASE[:4]]
    assert "release 1 is canary: 1% of the users have it; the step is 0 s old, of at least 10 s" in said
    assert said[-1] == (
        "release 2 is collecting: 44 of 256 sessions are labelled and can be trained; 212 more are needed."
    )
    assert len(said) == len(set(said)) + 2, "the canary has three steps"
