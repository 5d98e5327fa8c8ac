"""Traffic that servers have written becomes labels, the rows of a canary, a page, and is forgotten."""

import asyncio
import json
import time

import numpy as np
import pytest

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.weight_chain import Shard, WeightPublisher
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.realtime.release.releases import ReleaseFolder
from composer_jax.sampler.policy import Sample
from composer_jax.serve.traffic.consent import TrafficHeaders
from composer_jax.serve.traffic.events import EventBody, EventLog
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.serve.traffic.writer import TrafficLimits, TrafficWriter
from composer_jax.stages.traffic import read_labels, rows_of_canary, traffic_folders
from launch import hosts, traffic
from tests.launch.in_process import run_here
from tests.stages.base_model import write_base

AGO = 5 * 3600.0
"""Sessions are so old, which is more than the horizon and the grace."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return f"hf:{write_base(tmp_path_factory.mktemp('traffic') / 'model')}"


@pytest.fixture
def write(tmp_path, model):
    """(folder, users, kept, arm=, began=, salt=, session=) writes a session per user, who keeps `kept` of ten lines."""
    text = open_checkpoint(model).text

    def run(name, users, kept, *, arm="", began=None, salt="of this test", session="{name} {user}", horizons=(3600,)):
        (tmp_path / "policy.json").write_text(json.dumps({"consent_text": "We store it.", "salt": salt}))
        now = [time.time() - AGO if began is None else began]
        limits, clock = TrafficLimits(flush_seconds=0.01), lambda: now[0]
        writer = TrafficWriter(
            tmp_path / name, str(tmp_path / "policy.json"), text, arm=arm, limits=limits, clock=clock
        )
        for user in users:
            headers = TrafficHeaders("training", "main", user)
            named = session.format(name=name, user=user)
            request = writer.open_request("key", named, headers, "chatcmpl-" + "0" * 24, [])
            sample = Sample([5, 6], [-1.0, -1.0], [3, 3], "stop", [-1.0, -1.0])
            writer.offer(request, 0, [1, 2, 3], sample, SamplingParams(max_tokens=2), 0)
        began, log = now[0], EventLog(writer, clock)
        for horizon in horizons:
            now[0] = began + horizon
            payload = {"horizon": horizon, "added": 10, "added_kept": kept, "deleted": 0, "deleted_kept": 0}
            payload |= {"censored": 0, "others": 0, "others_kept": 0}
            for user in users:
                named = session.format(name=name, user=user)
                event = EventBody(id=f"kept{horizon}", session=named, kind="edited_after", payload=payload)
                assert asyncio.run(log.add("key", [event])) == 1
        log.close()
        writer.close()
        return TrafficFolder(tmp_path / name)

    return run


@pytest.fixture
def run(capsys, tmp_path):
    """Runs a command on the workdir of the test; returns (exit code, stdout, stderr)."""
    return lambda name, *words: run_here(
        capsys, traffic, name, f"--workdir={tmp_path}", *words, arguments="COMMAND", processes=hosts.NO_DEVICES
    )


@pytest.fixture
def canary(tmp_path):
    """A release whose canary has begun just before the sessions, at 5 %, and has 25 % an hour later."""
    publisher, now = WeightPublisher(str(tmp_path / "weights")), [time.time() - AGO - 60]
    for version in (3, 4):
        publisher.publish({Shard("w", (0,), (3,)): np.full(3, version, np.float32)}, version)
    with ReleaseFolder(tmp_path, by="test", clock=lambda: now[0]) as releases:
        releases.adopt(str(tmp_path / "weights"), 4, 3)
        releases.record_gate({"verdict": "pass", "reasons": []})
        for fraction in (0.05, 0.25):
            release = releases.move("canary", "", fraction=fraction)
            now[0] += 3600
    return release


def test_labels_of_two_servers_are_the_rows_of_a_canary(write, run, canary):
    names = [f"user{i}" for i in range(4)]
    folders = [write("anchor", names[:3], 8, arm="anchor"), write("candidate", names[3:], 5, arm="candidate")]
    late = write("later", ["user0"], 2, arm="candidate", began=time.time() - AGO + 3600 - 30)
    early = write("before", ["user1"], 9, began=time.time() - AGO - 3600)
    words = [f"--traffic={folder.path}" for folder in (*folders, late, early)]
    code, out, err = run("label", *words)
    assert code == 0 and "3 sessions labelled" in out, err
    rows = rows_of_canary([*folders, early], 3600.0, canary)
    assert [(row.arm, row.fraction, row.value) for row in rows if row.metric == "keep"] == [
        *[("anchor", 0.05, 0.8)] * 3,
        ("candidate", 0.05, 0.5),
    ]
    assert len({row.user for row in rows}) == 4, "the session before the canary has no row"
    code, out, err = run("canary", *words[:3])
    assert code == 0, err
    seen = json.loads(out.splitlines()[-1])["releases"][0]["canary"][-1]
    assert (seen["fraction"], seen["users"], seen["candidates"], seen["decision"]) == (0.25, 1, 1, "wait")


def test_a_session_that_went_on_at_another_server_counts_where_it_opened(write, run, canary):
    """The fraction has risen or a release has ended in the middle of it."""
    second = write("candidate", ["ann"], 2, arm="candidate", began=time.time() - AGO + 600, session="one")
    first = write("anchor", ["ann"], 8, arm="anchor", session="one")
    folders = [second, first]
    code, out, err = run("label")
    assert code == 0 and out.count("1 sessions labelled") == 2, err
    labels, records = read_labels(folders, 3600.0)
    assert [label.signals["keep"].value for label in labels] == [0.8] and records["one"].arm == "anchor"
    rows = [row for row in rows_of_canary(folders, 3600.0, canary) if row.metric == "keep"]
    assert [(row.arm, row.fraction, row.value) for row in rows] == [("anchor", 0.05, 0.8)]
    code, out, err = run("status")
    assert code == 0 and len(json.loads(out.splitlines()[-1])["traffic"]) == 2, err


def test_all_folders_of_the_workdir_are_labelled_and_forgotten_from(write, run, tmp_path):
    """Also one from before the arms, whose users have other hashes."""
    for name in ("traffic", "anchor", "candidate"):
        write(name, ["ann"], 8, salt="older" if name == "traffic" else "of this test")
    code, out, err = run("label")
    assert code == 0 and out.count("1 sessions labelled") == 3, err
    assert run("status")[0] == 0
    code, out, err = run("forget", "--user=ann")
    assert sorted(json.loads(out)["forgotten"]) == ["anchor ann", "candidate ann", "traffic ann"], err
    assert json.loads(run("forget", "--session=one")[1]) == {"forgotten": ["one"]}


def test_a_run_prints_the_labels_that_it_has_made(write, run):
    write("traffic", ["ann"], 8)
    assert " keep " in run("label")[1]
    assert " keep " not in run("label")[1]


def test_kept_lines_of_ten_minutes_are_compared_with_those_of_a_day(write, run):
    horizons = (600, 86_400)
    for kept in range(4):
        write(f"folder{kept}", ["ann"], kept, began=time.time() - 2 * 86_400, horizons=horizons)
    for horizon in horizons:
        assert run("label", f"--horizon_s={horizon}")[0] == 0
    shown = json.loads(run("status")[1].splitlines()[-1])
    assert shown["keep_correlations"] == {"3": {"correlation": pytest.approx(1), "sessions": 4, "left_out": 0}}


def test_a_session_of_the_canary_without_an_arm_is_named(write, run, canary):
    folder = write("traffic", ["user0"], 8)
    assert run("label")[0] == 0
    with pytest.raises(UserError, match="session 'traffic user0' opened in the canary on a server without an arm"):
        rows_of_canary([folder], 3600.0, canary)


def test_a_user_has_one_hash_on_two_servers_or_is_refused(write, tmp_path):
    one, two = write("one", ["ann"], 8), write("two", ["ann"], 8)
    assert one.sessions()[0].user == two.sessions()[0].user
    assert len(traffic_folders(tmp_path, [str(one.path), str(two.path)])) == 2
    three = write("three", ["ann"], 8, salt="another")
    with pytest.raises(UserError, match="different salts"):
        traffic_folders(tmp_path, [str(one.path), str(three.path)])
    assert len(traffic_folders(tmp_path, [], compares_users=False)) == 3
    with pytest.raises(UserError, match="another salt"):
        write("three", ["ann"], 8, salt="of this test")


def test_the_page_shows_releases_signals_and_what_was_dropped(write, run, canary, tmp_path, model):
    write("traffic", ["user0", "user1"], 8, arm="anchor")
    own = "--signal=twice=composer_jax.realtime.labels.edits:keep"
    code, out, err = run("label", f"--checkpoint={model}", own)
    assert code == 0 and "2 sessions labelled" in out and " twice " in out, err
    code, out, err = run("status")
    shown = json.loads(out.splitlines()[-1])
    assert (code, shown["releases"][0]["state"]) == (0, "canary"), err
    (counts,) = shown["traffic"]
    assert (counts["sessions"], counts["users"], counts["tombstones"]) == (2, 2, {})
    page = (tmp_path / "report.html").read_text()
    assert "canary 25%" in page and ">0.8</td>" in page and "Not in this run yet" not in page
    code, out, err = run("forget", "--user=user1")
    assert json.loads(out) == {"forgotten": ["traffic user1"]}, err
    code, out, err = run("status")
    (counts,) = json.loads(out.splitlines()[-1])["traffic"]
    assert (counts["sessions"], counts["tombstones"]) == (1, {"forgotten": 1})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("label", "--workdir={folder}"), "has no folder that a server writes traffic into"),
        (("label", "--traffic={folder}/x"), "is not a traffic folder"),
        (("label", "--traffic={folder}", "--horizon_s=0"), "a horizon of 0.0 s"),
        (("label", "--traffic={folder}", "--judge=http://127.0.0.1:1/v1"), "--judge_model=''"),
        (("label", "--traffic={folder}", "--horizon_s=9e9"), "longer than the retention"),
        (("label", "--traffic={folder}", "--signal=keep=math:sqrt"), "the signal 'keep' exists"),
        (("forget", "--traffic={folder}"), "give one of the two"),
        (("forget", "--user=ann", "--checkpoint=hf:x"), "--checkpoint is not a flag of forget"),
        (("canary", "--traffic={folder}", "--labels=x"), "two sources of labels"),
        (("status", "--traffic={folder}", "--traffic={folder}/."), "is named twice"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(write, run, words, sentence):
    folder = write("old", ["ann"], 8).path
    code, _, err = run(*(word.format(folder=folder) for word in words))
    assert code == 2 and sentence in err, err


def test_labels_need_the_tokenizer_that_wrote_the_traffic(write, run, tmp_path):
    write("traffic", ["ann"], 8)
    other = write_base(tmp_path / "other", chat="harmony")
    code, _, err = run("label", f"--checkpoint=hf:{other}")
    assert code == 2 and "another tokenizer or template" in err, err
