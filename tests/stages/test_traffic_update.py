"""The update of a release: it gives one version, whatever kills it, and learns from sessions and simulated groups."""

import contextlib
import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.checkpoint.weight_chain import ChainFiles, WeightPublisher, WeightReceiver
from composer_jax.errors import UserError
from composer_jax.observe.metrics import read_metrics
from composer_jax.realtime.batches.store import write_batch
from composer_jax.realtime.config import TrafficConfig
from composer_jax.realtime.release.gate import read_evaluation
from composer_jax.realtime.release.releases import ReleaseFolder, read_releases
from composer_jax.rl.ledger import RolloutLedger
from composer_jax.rl.played_group import PlayedGroup
from composer_jax.rl.policy_update import PolicyUpdate
from composer_jax.stages.evaluate_version import evaluate_version
from composer_jax.stages.released_learner import LearnerCheckpoints
from composer_jax.stages.run import Run
from composer_jax.stages.run_model import RunModel
from composer_jax.stages.traffic_update import NothingLearned, learner_of, open_chain, split_batch, train_release
from composer_jax.stages.train_rl import train_rl
from composer_jax.train.loop import STATE
from launch import hosts, traffic
from tests.launch.in_process import run_here
from tests.stages.traffic_run import batch_of, get_config, sample_sessions, with_advantage

SESSIONS = 10


class Killed(BaseException):
    """As a kill: nothing but the context managers of the test itself runs."""


@pytest.fixture(autouse=True, scope="module")
def one_learner():
    """One learner for all calls: each would compile its own."""
    made, original = {}, RunModel.learner
    RunModel.learner = lambda model, stage, training=None: made.setdefault(
        (model.path, stage, training and training.optimizer), original(model, stage, training)
    )
    yield
    RunModel.learner = original


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, sessions): a run with version 0, and in FOLDER/before a copy of it; release 1 was trained in it."""
    folder = tmp_path_factory.mktemp("traffic")
    with opened(folder) as (run, releases):
        sessions = sample_sessions(run, folder / "scratch", SESSIONS)
        releases.begin(run.config.rl.publish, open_chain(run), learner=learner_of(run))
        releases.claim([f"session{i}" for i in range(SESSIONS)])
    for name in ("run", "weights"):
        shutil.copytree(folder / name, folder / "before" / name)
    with opened(folder) as (run, releases):
        releases.record_candidate(train_release(run, releases.last, batch_of(releases.last, sessions)))
    for name in ("run", "weights"):
        shutil.copytree(folder / name, folder / "trained" / name)
    return folder, sessions


@contextlib.contextmanager
def opened(folder, **traffic):
    config = get_config(str(folder))
    with Run(config, folder / "run") as run:
        run.config = dataclasses.replace(run.config, traffic=dataclasses.replace(run.config.traffic, **traffic))
        learner = functools.partial(LearnerCheckpoints, holder=run.workdir.holder)
        with ReleaseFolder(run.path, by="test", learner=learner) as releases:
            yield run, releases


def back_to(folder, state):
    """Makes the run what it was when it was copied."""
    for name in ("run", "weights"):
        shutil.rmtree(folder / name)
        shutil.copytree(folder / state / name, folder / name)


def learned(folder):
    """(bits of the learner's latest state, its JSON values)."""
    with CheckpointStore(folder / "run" / "checkpoints" / "rl") as store:
        arrays = store.restore_to_host()
        assert set(arrays) == set(STATE)
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(arrays)], store.read_json()


def published(folder, version):
    receiver = WeightReceiver(str(folder / "weights"))
    receiver.receive(version)
    return {name: array.tobytes() for name, array in receiver.arrays.items()}


def rows(folder):
    return read_metrics(folder / "run" / "metrics" / "rl.jsonl")


@pytest.mark.slow
def test_an_update_leaves_one_version_one_checkpoint_and_a_row_for_each_minibatch(whole):
    folder, sessions = whole
    back_to(folder, "trained")
    manifests = ChainFiles(str(folder / "weights")).manifests()
    assert set(manifests) == {0, 1} and manifests[1]["release"] == 1 and manifests[1]["base"] == 0
    assert published(folder, 1) != published(folder, 0)
    _, saved = learned(folder)
    assert saved["cursor"] == {"task_step": 3, "weight_version": 1, "optimizer_step": 3} and saved["release"] == 1
    written = rows(folder)
    assert [row["step"] for row in written] == [1, 2, 3] and {row["release"] for row in written} == {1}
    assert sum(row["sessions"] for row in written) == len(sessions)
    # Three of four episodes are simulated: 30 to the nearest group of four.
    assert [row["simulated_episodes"] for row in written] == [8, 12, 12]
    assert all(row["trained_tokens"] > 0 and row["sampler_kl"] is not None for row in written)
    assert abs(written[0]["sampler_kl"]) < 1e-5 < abs(written[-1]["sampler_kl"]), "the first one has not moved"
    assert not list((folder / "run" / "rl" / "groups").iterdir())


PLACES = ("play", "second wave", "learn", "save", "saved", "publish", "published")


def kill_at(place, monkeypatch):
    """Kills the next update at a place."""
    if place in ("play", "second wave"):
        store, left = RolloutLedger.store, [1 if place == "play" else 3]  # waves of 2, 3 and 3 groups

        def store_or_die(ledger, group):
            if not left[0]:
                raise Killed
            left[0] -= 1
            store(ledger, group)

        monkeypatch.setattr(RolloutLedger, "store", store_or_die)
    elif place == "learn":
        step = PolicyUpdate.step

        def step_and_die(update, state, groups, episodes, number):
            if number:
                raise Killed
            return step(update, state, groups, episodes, number)

        monkeypatch.setattr(PolicyUpdate, "step", step_and_die)
    elif place in ("save", "saved"):
        save = CheckpointStore.save

        def save_and_die(store, *args, **options):
            if place == "saved":
                save(store, *args, **options)
                store.wait()
            raise Killed

        monkeypatch.setattr(CheckpointStore, "save", save_and_die)
    else:
        publish, write = WeightPublisher.publish, ChainFiles.write

        def write_or_die(files, name, data):
            if name.endswith("00000001/manifest.json"):
                raise Killed
            write(files, name, data)

        def publish_and_die(publisher, shards, version, labels=None):
            publish(publisher, shards, version, labels)
            if labels:
                raise Killed

        if place == "publish":
            monkeypatch.setattr(ChainFiles, "write", write_or_die)
        else:
            monkeypatch.setattr(WeightPublisher, "publish", publish_and_die)


@pytest.mark.slow
def test_an_update_that_is_killed_anywhere_gives_the_same_bits_and_one_version(whole, monkeypatch):
    """Each attempt gets a bit further than the one before."""
    folder, sessions = whole
    back_to(folder, "trained")
    expected, weights, expected_rows = learned(folder), published(folder, 1), rows(folder)
    back_to(folder, "before")
    for place in PLACES:
        with monkeypatch.context() as patches, pytest.raises(Killed), opened(folder) as (run, releases):
            kill_at(place, patches)
            train_release(run, releases.last, batch_of(releases.last, sessions))
    with opened(folder) as (run, releases):
        assert releases.last.state == "trained", "the manifest of the version names the release"
        assert releases.last.version == 1
        assert train_release(run, releases.last, batch_of(releases.last, sessions)) == 1
    assert learned(folder) == expected and published(folder, 1) == weights
    assert set(ChainFiles(str(folder / "weights")).versions(is_complete=False)) == {0, 1}
    for name in ("step", "sampler_kl", "grad_norm", "reward", "simulated_episodes"):
        assert [row[name] for row in rows(folder)] == [row[name] for row in expected_rows]


@pytest.mark.slow
def test_launch_traffic_train_learns_from_the_batch_on_disk(whole, capsys):
    folder, sessions = whole
    back_to(folder, "trained")
    expected = learned(folder), published(folder, 1)
    back_to(folder, "before")
    train = ("train", f"--workdir={folder / 'run'}")
    command = functools.partial(run_here, capsys, traffic, arguments="COMMAND", processes=hosts.NO_DEVICES)
    code, _, err = command(*train)
    assert code == 2 and "has no batch; make it with launch.traffic batch" in err
    manifest = {"release": 1, "chain": str(folder / "weights"), "anchor": 0}
    named = [{"session": f"session{i}"} for i in range(SESSIONS)]
    write_batch(folder / "run", 1, manifest | {"sessions": named}, sessions)
    code, out, err = command(*train)
    assert code == 0, err
    shown = json.loads(out.splitlines()[-1])["releases"][0]
    assert (shown["state"], shown["version"]) == ("trained", 1)
    assert (learned(folder), published(folder, 1)) == expected
    code, _, err = command(*train)
    assert code == 2 and "release 1 is trained, and this is for one that is labelled" in err


@pytest.mark.slow
def test_stored_groups_are_not_played_again(whole, monkeypatch):
    folder, sessions = whole
    back_to(folder, "before")
    with monkeypatch.context() as patches, pytest.raises(Killed), opened(folder) as (run, releases):
        kill_at("learn", patches)
        train_release(run, releases.last, batch_of(releases.last, sessions))
    admitted = (folder / "run" / "rl" / "admitted.jsonl").read_bytes()
    groups = {file: file.stat().st_mtime_ns for file in (folder / "run" / "rl" / "groups").iterdir()}
    assert groups
    with monkeypatch.context() as patches, pytest.raises(Killed), opened(folder) as (run, releases):
        kill_at("save", patches)
        train_release(run, releases.last, batch_of(releases.last, sessions))
    assert groups == {file: file.stat().st_mtime_ns for file in (folder / "run" / "rl" / "groups").iterdir()}
    assert (folder / "run" / "rl" / "admitted.jsonl").read_bytes() == admitted


@pytest.mark.slow
def test_a_rollback_takes_the_learner_along_and_the_next_update_starts_there(whole):
    folder, sessions = whole
    back_to(folder, "trained")
    with opened(folder) as (run, releases):
        releases.record_gate({"verdict": "fail", "reasons": ["worse"]})
        releases.begin(run.config.rl.publish, learner=learner_of(run))
        with pytest.raises(UserError, match="version 1, which somebody has published since release 2 began at"):
            train_release(run, releases.last, batch_of(releases.last, sessions))
    back_to(folder, "trained")
    with opened(folder) as (run, releases):
        releases.record_gate({"verdict": "fail", "reasons": ["worse"]})
        releases.roll_back("the gate refuses it")
        assert published(folder, 2) == published(folder, 0)
        release = releases.begin(run.config.rl.publish, learner=learner_of(run))
        assert release.anchor == 2
        releases.claim(["another"])
        assert train_release(run, releases.last, batch_of(release, sessions)) == 3
    _, saved = learned(folder)
    assert saved["cursor"] == {"task_step": 6, "weight_version": 3, "optimizer_step": 3}
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6]
    places = [json.loads(line) for line in (folder / "run" / "rl" / "admitted.jsonl").read_text().splitlines()]
    assert len({(row["family"], row["index"]) for row in places}) == len(places), "a task is played by one group"


@pytest.mark.slow
def test_there_is_no_rl_after_traffic(whole):
    folder, _ = whole
    back_to(folder, "trained")
    before = learned(folder), rows(folder)
    with opened(folder) as (run, _), pytest.raises(UserError, match="has learned from traffic, after which there is"):
        train_rl(run)
    with opened(folder) as (run, releases):
        releases.record_gate({"verdict": "fail", "reasons": ["worse"]})
        releases.roll_back("the gate refuses it")
        with pytest.raises(UserError, match="has learned from traffic"):
            train_rl(run)
    back_to(folder, "trained")
    assert (learned(folder), rows(folder)) == before


@pytest.mark.slow
def test_the_epoch_ends_where_the_policy_is_too_far(whole):
    """A batch that asks for the impossible moves it further with every minibatch."""
    folder, sessions = whole
    back_to(folder, "before")
    far = [PlayedGroup(group.number, [with_advantage(group.episodes[0], 300.0)], 0, 0) for group in sessions]
    options = {"kl_limit": 1e-4, "minibatch_sessions": 2, "simulated_fraction": 0.0}
    with opened(folder, **options) as (run, releases):
        assert train_release(run, releases.last, batch_of(releases.last, far)) == 1
    written = rows(folder)
    kl = [row["sampler_kl"] - written[0]["sampler_kl"] for row in written]
    assert 1 < len(written) < 5, "five minibatches"
    assert all(one <= 1e-4 for one in kl[:-1]) and kl[-1] > 1e-4
    assert learned(folder)[1]["cursor"]["task_step"] == len(written)


@pytest.mark.slow
def test_a_batch_without_advantages_trains_no_candidate(whole):
    folder, sessions = whole
    back_to(folder, "before")
    nothing = [PlayedGroup(group.number, [with_advantage(group.episodes[0], 0.0)], 0, 0) for group in sessions]
    bits = learned(folder)
    with opened(folder, simulated_fraction=0.0) as (run, releases):
        with pytest.raises(NothingLearned, match="release 1 has learned nothing: none of its 3 minibatches"):
            train_release(run, releases.last, batch_of(releases.last, nothing))
    assert learned(folder) == bits and set(ChainFiles(str(folder / "weights")).versions()) == {0}


@pytest.mark.slow
def test_an_update_has_a_learning_rate_of_its_own_and_refuses_one_of_0(whole):
    folder, sessions = whole
    back_to(folder, "before")
    with opened(folder) as (run, releases):
        faded = dataclasses.replace(run.config.rl.optimizer, final=0.0)
        run.model.config = run.config = dataclasses.replace(
            run.config, rl=dataclasses.replace(run.config.rl, optimizer=faded)
        )
        with CheckpointStore(folder / "run" / "checkpoints" / "rl") as store:
            cursor = store.read_json()["cursor"] | {"task_step": 6, "optimizer_step": 6}
            store.save(6, arrays=store.restore_to_host(), json={"cursor": cursor})
        with pytest.raises(UserError, match=r"a learning rate of 0 after RL .*; give --config.traffic.learning_rate"):
            train_release(run, releases.last, batch_of(releases.last, sessions))
    with opened(folder, learning_rate=1e-4) as (run, releases):
        assert train_release(run, releases.last, batch_of(releases.last, sessions)) == 1
    assert [row["learning_rate"] for row in rows(folder)] == [1e-4] * 3


@pytest.mark.slow
def test_what_does_not_fit_is_refused(whole, tmp_path):
    folder, sessions = whole
    back_to(folder, "before")
    with opened(folder) as (run, releases):
        release = releases.last
        with pytest.raises(UserError, match="the batch of release 1 is for version 0 of /there, and this is version 0"):
            train_release(run, release, batch_of(release, sessions, chain="/there"))
        with pytest.raises(UserError, match="the batch of release 1 is for version 7 of .*, and this is version 0"):
            train_release(run, release, batch_of(release, sessions, anchor=7))
        with pytest.raises(UserError, match="the batch is that of release 3, not 1"):
            train_release(run, release, batch_of(dataclasses.replace(release, number=3), sessions))
        elsewhere = dataclasses.replace(release, chain=str(tmp_path))
        with pytest.raises(UserError, match=f"release 1 is of versions in {tmp_path}, and rl.publish is"):
            train_release(run, elsewhere, batch_of(elsewhere, sessions))
        with CheckpointStore(folder / "run" / "checkpoints" / "rl") as store:
            state, cursor = store.restore_to_host(), store.read_json()["cursor"]
            store.save(5, arrays=state, json={"cursor": cursor | {"weight_version": 4}})
        with pytest.raises(UserError, match="has version 4, and release 1 goes on from version 0; end the release"):
            train_release(run, release, batch_of(release, sessions))


@pytest.mark.slow
def test_a_version_is_evaluated_once_in_the_form_that_the_gate_reads(whole):
    folder, _ = whole
    back_to(folder, "trained")
    with opened(folder) as (run, _):
        file = evaluate_version(run, 1)
        assert file == folder / "run" / "evaluations" / "1.json"
        suites, written = read_evaluation(file)["suites"], file.stat().st_mtime_ns
        assert set(suites) == {"bugs"} and len(suites["bugs"]["solved"]) == 4
        assert evaluate_version(run, 1).stat().st_mtime_ns == written
        stale = json.loads(file.read_text()) | {"weights": "of another version 1"}
        file.write_text(json.dumps(stale))
        assert evaluate_version(run, 1).stat().st_mtime_ns != written
        with pytest.raises(UserError, match="versions 0, 1 of the weights, not 2"):
            evaluate_version(run, 2)


@pytest.mark.slow
def test_the_gate_evaluates_both_versions_of_a_run_by_itself(whole, capsys):
    folder, _ = whole
    back_to(folder, "trained")
    words = ("gate", f"--workdir={folder / 'run'}", "--margin=0.95")
    code, out, err = run_here(capsys, traffic, *words, arguments="COMMAND", processes=hosts.NO_DEVICES)
    assert code == 0, err
    gate = json.loads(out.splitlines()[-1])["releases"][0]["gate"]
    assert gate["verdict"] and set(gate["suites"]) == {"bugs"}
    assert {file.name for file in (folder / "run" / "evaluations").iterdir()} == {"0.json", "1.json"}
    assert read_releases(folder / "run")[0].gate["joint"]["margin"] == 0.95


@pytest.mark.parametrize("count", [1, 7, 64, 200])
@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.8])
def test_simulated_groups_have_their_share_and_lie_in_all_minibatches(count, fraction):
    config = TrafficConfig(simulated_fraction=fraction, minibatch_sessions=8)
    parts = split_batch(count, config, 4, seed=1)
    taken = [place for places, _ in parts for place in places]
    assert sorted(taken) == list(range(count)) and (count < 20 or taken != sorted(taken))
    assert all(0 < len(places) <= 8 for places, _ in parts)
    simulated = 4 * sum(number for _, number in parts)
    # To the nearest group, and one at least.
    assert abs(simulated - count * fraction / (1 - fraction)) <= (2 if count > 3 or not fraction else 4)
    numbers = [number for _, number in parts]
    assert max(numbers) - min(numbers) <= 1
    assert split_batch(count, config, 4, seed=1) == parts
    assert count < 20 or split_batch(count, config, 4, seed=2) != parts
