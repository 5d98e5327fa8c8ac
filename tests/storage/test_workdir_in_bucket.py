"""Run folders in a bucket: one config, one process, and stages whose record comes after what they left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_jax.errors import UserError
from composer_jax.storage.bucket import BucketFolder
from composer_jax.storage.lease import NAME
from composer_jax.storage.workdir import Workdir, read_run_config

ROOT = Path(__file__).parents[2]
CONFIG = {"seed": 0, "rl": {"steps": 60}}


def complaint(url, config=CONFIG) -> str:
    with pytest.raises(UserError) as error:
        Workdir(url, config)
    return str(error.value)


def test_a_run_goes_on_where_its_last_process_published(bucket_url):
    with Workdir(bucket_url + "/", CONFIG) as workdir:
        assert workdir.url == workdir.location() == bucket_url
        assert workdir.checkpoints("sft") == f"{bucket_url}/checkpoints/sft"
        (workdir.path / "metrics").mkdir()
        (workdir.path / "metrics" / "sft.jsonl").write_text("1\n")
        assert workdir.location(workdir.path / "metrics" / "sft.jsonl") == f"{bucket_url}/metrics/sft.jsonl"
        workdir.mark_done("sft", {"loss": 1.0})
        (workdir.path / "report.html").write_text("page")  # published at the end
    assert BucketFolder(bucket_url).names() == ["config.json", "metrics/", "report.html", "stages/"]
    assert read_run_config(bucket_url)["config"] == CONFIG
    with Workdir(bucket_url, CONFIG) as again:
        assert again.stage_done("sft") and again.stage_result("sft") == {"loss": 1.0}
        assert (again.path / "metrics" / "sft.jsonl").read_text() == "1\n"
        with pytest.raises(UserError, match=f"stage 'rl' is not done in {bucket_url}; run it first"):
            again.stage_result("rl")


def test_another_config_and_a_foreign_folder_are_refused(bucket_url):
    Workdir(bucket_url, CONFIG).close()
    assert f"{bucket_url} belongs to a run with another config: seed: 0 -> 1" in complaint(
        bucket_url, CONFIG | {"seed": 1}
    )
    Workdir(bucket_url, CONFIG).close()  # the refusal gave the lease back
    BucketFolder(f"{bucket_url}-thesis").write("thesis.tex", b"x", 0)
    assert "is not empty (thesis.tex) and not the folder of a run" in complaint(f"{bucket_url}-thesis")
    assert BucketFolder(f"{bucket_url}-thesis").names() == ["thesis.tex"]
    assert "the bucket gs://no-such-bucket does not exist" in complaint("gs://no-such-bucket/run")


def test_two_runs_never_share_a_folder(bucket_url):
    code = (
        "import sys; from composer_jax.storage.workdir import Workdir\n"
        f"workdir = Workdir(sys.argv[1], {CONFIG!r}); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, bucket_url]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    assert f"{bucket_url} is in use by process {process.pid} on" in complaint(bucket_url)
    process.kill()
    process.wait()
    with Workdir(bucket_url, CONFIG):  # on the same machine a dead process is seen at once
        assert f"is in use by process {os.getpid()} on" in complaint(bucket_url)
    Workdir(bucket_url, CONFIG).close()


def test_other_processes_see_what_process_0_publishes(bucket_url):
    with Workdir(bucket_url, CONFIG) as first, Workdir(bucket_url, CONFIG, holder=first.holder) as second:
        assert first.path != second.path
        (first.path / "tokenizer.json").write_text("tokens")
        (second.path / "mine").write_text("x")
        second.publish()  # only process 0 publishes
        first.publish()
        second.fetch()
        assert (second.path / "tokenizer.json").read_text() == "tokens"
        first.fetch()  # process 0 keeps what it has not published yet
        assert "mine" not in BucketFolder(bucket_url).names()
        with pytest.raises(UserError, match="is not the folder that process 0 works in"):
            Workdir(bucket_url, CONFIG, holder="another")


def test_a_run_that_was_taken_over_writes_nothing_more(bucket_url):
    workdir = Workdir(bucket_url, CONFIG)
    folder = BucketFolder(bucket_url)
    theirs = {"host": "elsewhere", "pid": 3, "token": "theirs"}
    folder.write(NAME, json.dumps(theirs).encode(), folder.read(NAME)[1])
    workdir._bucket._lease.renew()
    (workdir.path / "results.json").write_text("{}")
    for call in (workdir.publish, workdir.require_held, lambda: workdir.mark_done("rl", {})):
        with pytest.raises(UserError, match="has been taken over by process 3 on elsewhere"):
            call()
    workdir.close()
    assert folder.names() == [NAME, "config.json"]
    assert json.loads(folder.read(NAME)[0]) == theirs


def test_what_a_stage_left_is_published_before_its_record(bucket_url, monkeypatch):
    written = []
    real = BucketFolder.write
    monkeypatch.setattr(
        BucketFolder, "write", lambda self, name, *rest: written.append(name) or real(self, name, *rest)
    )
    with Workdir(bucket_url, CONFIG) as workdir:
        (workdir.path / "results.json").write_text("{}")
        workdir.mark_done("a", {})
        assert written == [NAME, "config.json", "results.json", "stages/a.json"]


def test_an_error_is_not_hidden_by_one_of_the_last_publish(bucket_url):
    with pytest.raises(ZeroDivisionError), Workdir(bucket_url, CONFIG) as workdir:
        workdir._bucket._mirror.publish = lambda: (_ for _ in ()).throw(UserError("no network"))
        raise ZeroDivisionError
    assert BucketFolder(bucket_url).names() == ["config.json"], "the lease was given back"
