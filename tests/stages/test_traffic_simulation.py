"""Cycles of simulated users in small: base, sessions, release, truth, and what a kill changes."""

import json
import types

import numpy as np
import pytest

from composer_jax.checkpoint.weight_chain import ChainFiles, Shard, WeightPublisher, WeightReceiver
from composer_jax.demo.users import SimulatedUsers
from composer_jax.errors import UserError
from composer_jax.observe.metrics import read_metrics
from composer_jax.realtime.release.releases import ReleaseFolder, read_releases
from composer_jax.realtime.release.steps import refuse
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.stages import simulated_traffic, traffic_simulation
from composer_jax.stages.run import Run
from composer_jax.stages.simulated_traffic import Arms, SimulatedTraffic
from composer_jax.stages.traffic_simulation import catch_up, collect, simulate
from tests.demo.expert_engine import small_config

SESSIONS = 8


class Killed(BaseException):
    """As a kill: what is on disk stays."""


@pytest.fixture
def start(tmp_path):
    """name -> config and folder of a run that learns from users."""

    def config(name):
        config = small_config()
        config.rl.publish, config.rl.group_size = str(tmp_path / name / "weights"), 2
        return config, tmp_path / name

    return config


def weights_of(folder):
    """Version -> its weights."""
    versions = {}
    for version in sorted(ChainFiles(str(folder / "weights")).versions()):
        receiver = WeightReceiver(str(folder / "weights"))
        receiver.receive(version)
        versions[version] = {name: np.array(array) for name, array in receiver.arrays.items()}
    return versions


@pytest.mark.slow
def test_a_killed_simulation_ends_with_the_same_sessions_and_weights(start, monkeypatch):
    config, whole = start("whole")
    with Run(config, whole) as run:
        rows = simulate(run, 1, SESSIONS)
    assert [row["step"] for row in rows] == [1] and rows[0]["version"] == 0 and rows[0]["sessions"] <= SESSIONS
    (release,) = read_releases(whole)
    assert release.state == "released" and release.version == 1 and len(release.canary) == 3
    sessions = TrafficFolder(whole / "traffic").sessions()
    assert {record.arm for record in sessions} <= {"", "anchor", "candidate"}
    assert set(release.sessions) <= {record.session for record in sessions if record.arm == ""}

    config, cut = start("cut")
    kills = [after_rows(3), in_call(SimulatedTraffic, "_send"), in_call(traffic_simulation, "watch")]
    for kill in kills:
        with monkeypatch.context() as patch, pytest.raises(Killed), Run(config, cut) as run:
            kill(patch)
            simulate(run, 1, SESSIONS)
    with Run(config, cut) as run:
        assert drop_time(simulate(run, 1, SESSIONS)) == drop_time(rows)
    one, two = weights_of(whole), weights_of(cut)
    assert one.keys() == two.keys() == {0, 1}
    for version, arrays in one.items():
        assert all(np.array_equal(array, two[version][name]) for name, array in arrays.items()), version
    assert any(not np.array_equal(one[0][name], one[1][name]) for name in one[0]), "something was learned"
    truths = [truth_of(folder) for folder in (whole, cut)]
    assert truths[0] == truths[1] and len(truths[0]) == SESSIONS


def after_rows(count):
    """A kill after so many sessions are on disk."""

    def patch_journal(patch):
        append, written = simulated_traffic.Journal.append, []

        def killed(self, row):
            if len(written) == count:
                raise Killed
            written.append(row)
            append(self, row)

        patch.setattr(simulated_traffic.Journal, "append", killed)

    return patch_journal


def in_call(owner, name):
    """A kill in the middle of a call."""

    def patch_call(patch):
        def killed(*arguments):
            raise Killed

        patch.setattr(owner, name, killed)

    return patch_call


def drop_time(rows):
    return [{name: value for name, value in row.items() if name != "time"} for row in rows]


def truth_of(folder):
    """The truths of the sessions of the batch's cycle, by their numbers."""
    lines = (folder / "users" / "0001.jsonl").read_text().splitlines()
    return {row["number"]: row["truth"] for row in map(json.loads, lines) if row["number"] < SESSIONS}


def test_a_config_without_users_or_with_wrong_options_is_refused(start):
    for field, value, sentence in (
        ("users", "", "traffic.users is empty"),
        ("users_options", {"crowd": 1}, "users_options={'crowd': 1} do not fit"),
        ("users_options", {"population": "none"}, "the population .* cannot be read"),
    ):
        config, folder = start(f"run{len(sentence)}")
        config.traffic[field] = value
        with Run(config, folder) as run, pytest.raises(UserError, match=sentence):
            simulate(run, 1, SESSIONS)
    with Run(*start("numbers")) as run, pytest.raises(UserError, match="cycles=0 and sessions=8"):
        simulate(run, 0, SESSIONS)
    assert read_metrics(folder / "metrics" / "users.jsonl") == []


def test_the_simulated_time_goes_on_after_the_decision_of_a_person(start):
    config, folder = start("held")
    chain = config.rl.publish
    with Run(config, folder) as run:
        for version in (0, 1):
            WeightPublisher(chain).publish({Shard("w", (0,), (8,)): np.full(8, version, np.float32)}, version)
        traffic = SimulatedTraffic(run, SimulatedUsers(0), chain)
        with ReleaseFolder(run.path, by="a person") as releases:
            decided = releases.adopt(chain, 1, 0).transitions[-1]["time"]
        assert traffic.clock() < decided
        catch_up(run, traffic)
        with ReleaseFolder(run.path, by="simulation", clock=traffic.clock) as releases:
            assert refuse(releases, "no").state == "failed"
        assert SimulatedTraffic(run, SimulatedUsers(0), chain).clock() == decided


def test_the_truth_of_a_cycle_is_that_of_all_its_sessions(start):
    """The first call has too few for a batch."""
    with Run(*start("more")) as run:
        truths = {}

        def play(cycle, numbers, arms):
            truths.update({number: {"truth": {"number": number}} for number in numbers})

        traffic = types.SimpleNamespace(
            play=play,
            rows=lambda cycle: truths,
            closed=lambda cycle: 0.0,
            pass_until=lambda time: None,
            users=types.SimpleNamespace(summarize=lambda rows: {"sessions": len(rows)}, shown=("sessions",)),
        )
        for cycle, sessions in ((1, 3), (1, 5), (2, 4)):
            if cycle == 2:
                truths.clear()
            collect(run, traffic, types.SimpleNamespace(number=cycle, anchor=0), sessions)
        rows = read_metrics(run.path / "metrics" / "users.jsonl")
    assert [(row["step"], row["sessions"]) for row in rows] == [(1, 5), (2, 4)]


def test_the_journal_of_a_cycle_is_read_once(start, monkeypatch):
    with Run(*start("once")) as run:
        traffic, reads = SimulatedTraffic(run, SimulatedUsers(0), run.config.rl.publish), []
        monkeypatch.setattr(traffic, "rows", lambda cycle: reads.append(cycle) or dict.fromkeys(range(50)))
        traffic.play(1, range(50), Arms(0))
    assert len(reads) == 1
