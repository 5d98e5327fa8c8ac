"""A release claims its sessions and gets its batch: whole or absent, the same after a kill, and nothing on an error."""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import stat

import numpy as np
import pytest

from composer_jax.checkpoint.checkpoint import describe_versions
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.realtime.batches import build, store
from composer_jax.realtime.batches.build import SessionsGone
from composer_jax.realtime.batches.rules import BatchRules
from composer_jax.realtime.batches.store import (
    SessionForgotten,
    batch_folder,
    forget_sessions,
    read_batch,
    require_batch_of,
)
from composer_jax.realtime.labels.store import LabelStore
from composer_jax.realtime.release.releases import ReleaseFolder
from composer_jax.rl.algorithm import GivenAdvantage
from composer_jax.rl.batch import Group
from composer_jax.serve.traffic.database import open_database
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.serve.traffic.retention import forget
from composer_jax.stages.traffic import forget_traffic
from composer_jax.stages.traffic_batch import LearnerRows, describe_progress, make_batch
from launch import hosts
from launch import traffic as traffic_command
from tests.launch.in_process import run_here
from tests.realtime.batches.conftest import BEGAN, H
from tests.realtime.batches.test_turn_tree import SHAPE, routes_of
from tests.stages.base_model import NETWORK, write_base

RULES = BatchRules(min_sessions=6, cap_user=1.0, cap_repository=1.0, cap_organisation=1.0)


def write_sessions(traffic, count=8, users=3):
    """Sessions of two answers; the users keep from 0 to 10 lines. Then an answer at another temperature."""
    for i in range(count):
        name, user = f"s{i}", f"user{i % users}"
        prompt = [1, 2, 100 + i]
        ids = [*prompt, 10 + i, 11]
        traffic.answer(name, prompt, ids[3:], user=user, routing=routes_of(ids)[:-1])
        ids = [*ids, 3, 30 + i, 31, 32]
        traffic.answer(name, ids[:-3], ids[-3:], user=user, routing=routes_of(ids)[:-1])
    traffic.answer("hot", [1, 2], [10], temperature=0.7, user="user0")
    traffic.now += H
    for i in range(count):
        traffic.measured(f"s{i}", i * 10 // count)


@pytest.fixture
def folder(new_traffic):
    traffic = new_traffic(routing=True)
    write_sessions(traffic)
    return traffic.label()


def files_of(path):
    return {file.relative_to(path): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_a_batch_has_the_tokens_of_its_sessions_and_an_advantage_for_each_answer(folder, collecting, tmp_path):
    rows = LearnerRows(longest=64, route_shape=SHAPE)
    progress = make_batch(collecting, tmp_path, [folder], RULES, rows)
    assert (progress.sessions, progress.missing) == (8, 0) and collecting.last.state == "labelled"
    batch = read_batch(tmp_path, 1)
    manifest = batch.manifest
    assert collecting.last.sessions == tuple(row["session"] for row in manifest["sessions"])
    assert manifest["drops"] == {"sessions": {"sampling": 1}, "turns": {"sampling": 1}}
    assert manifest["inputs"]["trainable_versions"] == [3] and manifest["anchor"] == 3
    for row, group in zip(manifest["sessions"], batch.groups, strict=True):
        (episode,) = group.episodes
        (one,) = episode.transcript.rows()
        turns = folder.read(row["session"]).turns
        assert one.tokens.tolist() == [*turns[0].suffix, *turns[0].tokens, *turns[1].suffix, *turns[1].tokens]
        sampled = [logprob for turn in turns for logprob in turn.logprobs]
        np.testing.assert_array_equal(one.logprobs[one.trained], np.float32(sampled))
        assert set(one.versions[one.trained].tolist()) == {3} and not len(one.tokens_without_routes())
        np.testing.assert_array_equal(one.routes[:-1], routes_of(one.tokens)[:-1])
        ((weighted,),) = GivenAdvantage().weigh(Group([episode], [episode.reward]), 0)
        expected = np.repeat(episode.advantages, [len(turn.tokens) for turn in turns])
        np.testing.assert_array_equal(weighted.advantages[one.trained], np.float32(expected))
        assert episode.reward == row["reward"] and group.resolved_version == 3
        assert list(episode.advantages) == [turn["advantage"] for turn in row["turns"]]


def test_the_advantage_is_the_return_minus_the_baseline_in_deviations_of_the_batch(folder, collecting, tmp_path):
    make_batch(collecting, tmp_path, [folder], RULES)
    turns = [turn for row in read_batch(tmp_path, 1).manifest["sessions"] for turn in row["turns"]]
    residuals = np.array([turn["return"] - turn["baseline"] for turn in turns])
    expected = np.clip(residuals / residuals.std(), -3, 3)
    np.testing.assert_allclose([turn["advantage"] for turn in turns], expected, rtol=1e-12)
    kept = [row["terms"]["keep_corrected"] for row in read_batch(tmp_path, 1).manifest["sessions"]]
    assert np.corrcoef(kept, expected[::2])[0, 1] > 0.8


def test_an_answer_that_was_rejected_is_compared_with_the_one_that_was_preferred(new_traffic, collecting, tmp_path):
    traffic = new_traffic()
    write_sessions(traffic)
    rejected, _ = traffic.answer("again", [1, 2], [10, 11], user="user7")
    traffic.event("again", "regenerate", rejected)
    traffic.answer("again", [1, 2], [12], user="user7")
    rules = dataclasses.replace(RULES, cap_user=0.34)
    make_batch(collecting, tmp_path, [traffic.label()], rules)
    batch = read_batch(tmp_path, 1)
    row = batch.manifest["sessions"][-1]
    other, chosen = row["turns"]
    turns = [turn for one in batch.manifest["sessions"] for turn in one["turns"] if turn["return"] is not None]
    deviation = np.std([turn["return"] - turn["baseline"] for turn in turns])
    assert (other["preference"], chosen["preference"], other["return"]) == (-0.5, 0.5, None)
    assert other["advantage"] == pytest.approx(-0.5 * row["weight"])
    standard = (chosen["return"] - chosen["baseline"]) / deviation
    assert chosen["advantage"] == pytest.approx(row["weight"] * np.clip(standard + 0.5, -3, 3))
    rows = batch.groups[len(batch.groups) - 1].episodes[0].transcript.rows()
    assert [one.tokens.tolist() for one in rows] == [[1, 2, 10, 11], [1, 2, 12]]
    weights = {one["user"]: one["weight"] for one in batch.manifest["sessions"]}
    assert min(weights.values()) < 1 and row["weight"] == 1
    for one in batch.manifest["sessions"][:-1]:
        values = [np.clip((turn["return"] - turn["baseline"]) / deviation, -3, 3) for turn in one["turns"]]
        assert [turn["advantage"] for turn in one["turns"]] == pytest.approx([one["weight"] * v for v in values])
    assert batch.manifest["monitors"]["largest_shares"]["cap_user"] == pytest.approx(0.34)


def test_the_commands_begin_a_release_and_make_its_batch(new_traffic, chain, tmp_path, capsys):
    def run(name, *words):
        return run_here(
            capsys, traffic_command, name, f"--workdir={tmp_path}", *words, arguments="C", processes=hosts.NO_DEVICES
        )

    traffic = new_traffic()
    write_sessions(traffic)
    traffic.label()
    code, out, err = run("begin", f"--weights={chain}", "--serving=3")
    assert code == 0 and json.loads(out.splitlines()[-1])["releases"][0]["state"] == "collecting", err
    caps = [f"--cap_{name}=1" for name in ("user", "repository", "organisation")]
    code, out, err = run("batch", *caps)
    assert code == 0 and "8 of 256 sessions are labelled and can be trained; 248 more are needed." in err
    assert json.loads(out.splitlines()[-1])["releases"][0]["state"] == "collecting"
    code, out, err = run("batch", "--min_sessions=8", "--cap_user=1")
    assert code == 0 and "release 1 learns from 8 sessions." in err, err
    shown = json.loads(out.splitlines()[-1])["releases"][0]
    assert (shown["state"], shown["sessions"]) == ("labelled", 8) and len(read_batch(tmp_path, 1).groups) == 8


def test_too_few_sessions_change_nothing(folder, collecting, tmp_path):
    rules = dataclasses.replace(RULES, min_sessions=20)
    before = files_of(tmp_path)
    progress = make_batch(collecting, tmp_path, [folder], rules)
    assert (progress.sessions, progress.missing, progress.manifest) == (8, 12, None)
    assert describe_progress(collecting.last, progress, rules).startswith("8 of 20 sessions are labelled")
    assert files_of(tmp_path) == before and collecting.last.state == "collecting"


@pytest.mark.parametrize("baseline", ["shrinkage", "ridge"])
def test_a_batch_is_equal_bit_for_bit_after_a_kill(folder, chain, tmp_path, monkeypatch, baseline):
    """Killed before the claim, between the claim and the folder, in the middle of the folder; and built again."""
    rules, rows = dataclasses.replace(RULES, baseline=baseline), LearnerRows(64, SHAPE)
    release = tmp_path / "releases" / "0001.json"
    with ReleaseFolder(tmp_path, by="test", clock=lambda: BEGAN + 100 * H) as releases:
        releases.begin(chain, 3)
        before = release.read_bytes()
        make_batch(releases, tmp_path, [folder], rules, rows)
    expected = files_of(batch_folder(tmp_path, 1))
    assert len(expected) == 9
    release.write_bytes(before)
    shutil.rmtree(tmp_path / "batches")

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    points = [(ReleaseFolder, "claim"), (store, "encode_group"), (store, "_sync"), (build, "weigh_sessions")]
    for place, name in points:
        with monkeypatch.context() as patch, ReleaseFolder(tmp_path, by="test", clock=lambda: BEGAN + 100 * H) as again:
            patch.setattr(place, name, killed)
            patch.setattr(store.shutil, "rmtree", lambda *_, **__: None)  # a killed process tidies nothing
            with pytest.raises(Killed):
                make_batch(again, tmp_path, [folder], rules, rows)
            assert not batch_folder(tmp_path, 1).exists()
    with ReleaseFolder(tmp_path, by="test", clock=lambda: BEGAN + 100 * H) as again:
        assert again.last.state == "labelled"
        make_batch(again, tmp_path, [folder], rules, rows)
        assert files_of(batch_folder(tmp_path, 1)) == expected
        assert make_batch(again, tmp_path, [folder], rules, rows).sessions == 8  # it is there
        shutil.rmtree(batch_folder(tmp_path, 1))
        make_batch(again, tmp_path, [folder], rules, rows)
    assert files_of(batch_folder(tmp_path, 1)) == expected
    assert [file.name for file in (tmp_path / "batches").iterdir() if file.name.startswith(".")] == []


def test_a_session_that_is_forgotten_meanwhile_is_in_no_batch(folder, collecting, tmp_path, monkeypatch):
    read = build.read_window

    def forgets(candidate, horizon):
        if candidate.record.session == "s3":
            forget(folder.path, session="s4")
        return read(candidate, horizon)

    monkeypatch.setattr(build, "read_window", forgets)
    make_batch(collecting, tmp_path, [folder], RULES)
    batch = read_batch(tmp_path, 1)
    names = [row["session"] for row in batch.manifest["sessions"]]
    assert names == [f"s{i}" for i in range(8) if i != 4] and len(collecting.last.sessions) == 8
    assert [group.episodes[0].task_id for group in batch.groups] == names
    assert batch.manifest["drops"]["sessions"] == {"forgotten": 1, "sampling": 1}
    assert make_batch(collecting, tmp_path, [folder], RULES).sessions == 7
    shutil.rmtree(batch_folder(tmp_path, 1))
    monkeypatch.undo()
    make_batch(collecting, tmp_path, [folder], RULES)  # built again, it knows of the tombstone from the beginning
    manifest = read_batch(tmp_path, 1).manifest
    assert manifest["drops"] == batch.manifest["drops"] and manifest["sessions"] == batch.manifest["sessions"]
    hashes = [one["inputs"]["sha256"]["tombstones"] for one in (batch.manifest, manifest)]
    assert hashes == [hashlib.sha256(b'["s4"]').hexdigest()] * 2


def test_a_session_that_is_forgotten_after_it_was_read_is_in_no_batch(folder, collecting, tmp_path, monkeypatch):
    read = build.read_window

    def forgets(candidate, horizon):
        if candidate.record.session == "s3":
            forget_traffic(tmp_path, [folder], session="s2")  # which finds no batch: it is not there yet
        return read(candidate, horizon)

    monkeypatch.setattr(build, "read_window", forgets)
    assert make_batch(collecting, tmp_path, [folder], RULES).sessions == 7
    batch = read_batch(tmp_path, 1)
    assert [row["session"] for row in batch.manifest["sessions"]] == [f"s{i}" for i in range(8) if i != 2]
    assert len(list((batch_folder(tmp_path, 1) / "groups").iterdir())) == 7


def test_other_users_of_the_machine_do_not_reach_batches(folder, collecting, tmp_path):
    (tmp_path / "batches").mkdir(mode=0o755)  # of a program that left it open
    make_batch(collecting, tmp_path, [folder], RULES)
    assert stat.S_IMODE((tmp_path / "batches").stat().st_mode) == 0o700
    store.note_claim(tmp_path / "new", 1, {})
    assert stat.S_IMODE((tmp_path / "new" / "batches").stat().st_mode) == 0o700


def test_forgetting_deletes_groups_and_rows_of_batches(folder, collecting, tmp_path):
    make_batch(collecting, tmp_path, [folder], RULES)
    file = store.group_file(batch_folder(tmp_path, 1), 2)
    in_use = read_batch(tmp_path, 1).groups
    assert file.exists() and forget_sessions(tmp_path, lambda row: row["session"] == "s2") == ["s2"]
    batch = read_batch(tmp_path, 1)
    assert not file.exists() and len(batch.groups) == 7 and batch.manifest["forgotten"] == 1
    with pytest.raises(SessionForgotten, match="was forgotten while its batch was in use"):
        in_use[2]
    assert in_use[3].number == 3
    assert [group.number for group in batch.groups] == [0, 1, 3, 4, 5, 6, 7]
    assert b'"s2"' not in (batch_folder(tmp_path, 1) / "batch.json").read_bytes()
    assert forget_sessions(tmp_path, lambda row: row["session"] == "s2") == []
    file.write_bytes(b"left by a process that was killed")
    forget_sessions(tmp_path, lambda row: False)
    assert not file.exists()


def test_forgotten_users_and_old_sessions_leave_batches(folder, collecting, tmp_path):
    make_batch(collecting, tmp_path, [folder], RULES)
    names = lambda: [row["session"] for row in read_batch(tmp_path, 1).manifest["sessions"]]  # noqa: E731
    assert len(names()) == 8
    user = read_batch(tmp_path, 1).manifest["sessions"][1]["user"]
    forget_traffic(tmp_path, [folder], user=user)
    assert names() == ["s0", "s2", "s3", "s5", "s6"]
    forget(folder.path, session="s2")  # by a process that was killed before the batches
    make_batch(collecting, tmp_path, [folder], RULES)
    assert names() == ["s0", "s3", "s5", "s6"] and len(list((batch_folder(tmp_path, 1) / "groups").iterdir())) == 4
    days = folder.policy.retention_days
    for after, left in (((days + 1) * 24 * H - 1, 4), ((days + 2) * 24 * H, 0)):
        collecting.clock = lambda after=after: BEGAN + after
        make_batch(collecting, tmp_path, [folder], RULES)
        assert len(names()) == left


def test_a_session_is_kept_as_long_as_its_own_folder_keeps_it(folder, new_traffic, collecting, tmp_path):
    long = new_traffic("long")
    long.answer("t", [1, 2], [10], user="v")
    short_policy, long_policy = (path / "policy.json" for path in (folder.path, long.path))
    policies = [TrafficFolder(folder.path), long.label()]
    for file, days in ((short_policy, 7), (long_policy, 90)):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"retention_days": days}))
    policies = [TrafficFolder(one.path) for one in policies]
    make_batch(collecting, tmp_path, policies, RULES)
    names = lambda: [row["session"] for row in read_batch(tmp_path, 1).manifest["sessions"]]  # noqa: E731
    assert len(names()) == 9
    collecting.clock = lambda: BEGAN + 9 * 24 * H
    make_batch(collecting, tmp_path, policies, RULES)
    assert names() == ["t"]


def test_a_release_whose_sessions_have_gone_is_failed(folder, collecting, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(store, "encode_group", killed)
        make_batch(collecting, tmp_path, [folder], RULES)
    assert collecting.last.state == "labelled"
    for i in range(1, 8):
        forget(folder.path, session=f"s{i}")
    with pytest.raises(SessionsGone, match="1 of the 8 sessions that release 1 has claimed can still be trained"):
        make_batch(collecting, tmp_path, [folder], RULES)
    assert collecting.last.state == "failed"
    assert collecting.begin(collecting.last.chain).state == "collecting"


def test_a_batch_beside_a_release_that_collects_is_named(folder, chain, tmp_path):
    file = tmp_path / "releases" / "0001.json"
    with ReleaseFolder(tmp_path, by="test", clock=lambda: BEGAN + 100 * H) as releases:
        releases.begin(chain, 3)
        before = file.read_bytes()
        make_batch(releases, tmp_path, [folder], RULES)
    file.write_bytes(before)  # a copy of before the claim
    with ReleaseFolder(tmp_path, by="test", clock=lambda: BEGAN + 100 * H) as releases:
        refuses("release 1 collects, and .*batches/0001 has a batch of it", releases, tmp_path, [folder])


def test_a_folder_in_the_way_of_a_batch_is_named(folder, collecting, tmp_path):
    (batch_folder(tmp_path, 1) / "groups").mkdir(parents=True)
    with pytest.raises(UserError, match="batches/0001: a folder without batch.json is there; move it away"):
        make_batch(collecting, tmp_path, [folder], RULES)


def test_the_progress_says_what_to_look_at(folder, collecting, tmp_path):
    progress = make_batch(collecting, tmp_path, [folder], RULES)
    said = describe_progress(collecting.last, progress, RULES)
    assert "effective users. Sessions that were left out, by reason: 1 sampling." in said and "Without" not in said
    monitors = progress.manifest["monitors"] | {"direction": {"changes_sign": ["one", "two"]}}
    turned = dataclasses.replace(progress, manifest=progress.manifest | {"monitors": monitors})
    assert "Without one, two it would move kept edits the other way" in describe_progress(
        collecting.last, turned, RULES
    )


def test_traffic_of_another_tokenizer_than_the_chain_is_refused(folder, collecting, chain, tmp_path):
    write_base(tmp_path / "run" / "base")
    describe_versions(chain, ModelDef(NETWORK), str(tmp_path / "run"))
    assert make_batch(collecting, tmp_path, [folder], dataclasses.replace(RULES, min_sessions=20)).sessions == 8
    file = folder.path / "policy.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"fingerprint": "other"}))
    other = TrafficFolder(folder.path)
    refuses(r"weights has another tokenizer or template .* \(other\)", collecting, tmp_path, [other])


def test_the_next_release_does_not_learn_from_the_same_sessions(folder, collecting, tmp_path):
    make_batch(collecting, tmp_path, [folder], RULES)
    collecting.move("failed", "for the test")
    collecting.begin(collecting.last.chain)
    progress = make_batch(collecting, tmp_path, [folder], RULES)
    assert (progress.sessions, progress.missing) == (0, 6)


def test_damaged_and_foreign_batches_are_named(folder, collecting, tmp_path, chain):
    with pytest.raises(UserError, match="0001 has no batch; make it with launch.traffic batch"):
        read_batch(tmp_path, 1)
    make_batch(collecting, tmp_path, [folder], RULES)
    batch = read_batch(tmp_path, 1)
    require_batch_of(batch, chain, 3)
    for other in ((chain, 4), ("elsewhere", 3)):
        with pytest.raises(UserError, match=f"for version 3 of {chain}, and this is version {other[1]} of {other[0]}"):
            require_batch_of(batch, *other)
    one, two = (store.group_file(batch_folder(tmp_path, 1), number) for number in (0, 1))
    shutil.copy(one, two)
    with pytest.raises(UserError, match="is not the group that"):
        batch.groups[1]
    two.write_bytes(b"x")
    with pytest.raises(UserError, match="is not the group that"):
        batch.groups[1]
    two.unlink()
    with pytest.raises(UserError, match="00000001.frames is missing; restore it"):
        batch.groups[1]
    assert batch.groups[0].number == 0 and [group.number for group in batch.groups[2:4]] == [2, 3]
    file = batch_folder(tmp_path, 1) / "batch.json"
    file.write_text(json.dumps(dict(batch.manifest) | {"format": 9}))
    with pytest.raises(UserError, match="another format than 2"):
        read_batch(tmp_path, 1)


def refuses(sentence, collecting, tmp_path, folders, rules=RULES):
    before = files_of(tmp_path)
    with pytest.raises(UserError, match=sentence):
        make_batch(collecting, tmp_path, folders, rules)
    assert files_of(tmp_path) == before


def test_caps_that_leave_nothing_change_nothing(folder, collecting, tmp_path):
    rules = dataclasses.replace(RULES, cap_user=0.01)
    refuses("cap_user=0.334 in place of 0.01", collecting, tmp_path, [folder], rules)


def test_labels_of_other_labellers_are_refused(folder, new_traffic, collecting, tmp_path):
    with contextlib.closing(open_database(folder.path)) as database:
        label = LabelStore(database).read(H)[0]
        (ours,) = {one.labeller for one in LabelStore(database).read(H)}
    other = new_traffic("other")
    other.answer("t", [1, 2], [10], user="v")
    second = other.label()
    with contextlib.closing(open_database(second.path)) as database:
        late = dataclasses.replace(label, session="t", labeller="1-0000", made=label.made + 9e9)
        LabelStore(database).insert([late])
    refuses(f"different labellers.*{ours} in .*1-0000 in", collecting, tmp_path, [folder, TrafficFolder(second.path)])
    with contextlib.closing(open_database(folder.path)) as database:
        LabelStore(database).insert([dataclasses.replace(label, labeller="7-0000", made=label.made + 9e9)])
    refuses("of labeller 7-0000, and this program has version 2; label again", collecting, tmp_path, [folder])


def test_traffic_of_another_chain_and_a_release_in_another_state_are_refused(new_traffic, collecting, tmp_path):
    traffic = new_traffic()
    traffic.answer("s", [1, 2], [10], version=9)
    refuses("session 's' was sampled by version 9, and the newest version of .* is 5", collecting, tmp_path,
            [traffic.label()])  # fmt: skip
    collecting.move("failed", "for the test")
    refuses("release 1 is failed, and a batch is for one that collects", collecting, tmp_path, [])
