"""launch.traffic: a release from two versions and two evaluations, and sentences for wrong flags."""

import contextlib
import hashlib
import http.server
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from composer_jax.checkpoint.weight_chain import Shard, WeightPublisher, WeightReceiver
from composer_jax.errors import UserError
from composer_jax.realtime.release.releases import ReleaseFolder
from composer_jax.stages import traffic_cycle, traffic_simulation
from launch import flags, hosts, traffic
from tests.launch.in_process import run_here


@pytest.fixture
def run(capsys, tmp_path):
    """Runs a command on the workdir of the test; returns (exit code, its JSON or None, stderr)."""

    def command(name, *words):
        code, out, err = run_here(
            capsys, traffic, name, f"--workdir={tmp_path}", *words, arguments="COMMAND", processes=hosts.NO_DEVICES
        )
        return code, json.loads(out.splitlines()[-1]) if out else None, err

    return command


@pytest.fixture
def weights(tmp_path):
    publisher = WeightPublisher(str(tmp_path / "weights"))
    for version in range(4):
        publisher.publish({Shard("w", (0,), (3,)): np.full(3, version, np.float32)}, version)
    return str(tmp_path / "weights")


def evaluation(tmp_path, name, seed):
    solved = np.random.default_rng(seed).integers(0, 2, 900).astype(float)
    suite = {"attempts": 1, "attempted": 0.9, "solved": {f"task{i}": share for i, share in enumerate(solved)}}
    (tmp_path / name).write_text(json.dumps({"suites": {"bugs": suite}}))
    return str(tmp_path / name)


@contextlib.contextmanager
def server_of_version(version):
    """The address of a server that says which weights it serves."""

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"weight_version": version}).encode())

        def log_message(self, format, *args):
            del format, args

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_a_release_and_its_rollback(tmp_path, run, weights):
    anchor, candidate = evaluation(tmp_path, "a.json", 0), evaluation(tmp_path, "b.json", 0)
    code, shown, err = run("begin", f"--weights={weights}", "--version=3", "--serving=1")
    assert (code, shown["releases"][0]["state"], shown["serving"]) == (0, "trained", 1), err
    code, shown, _ = run("gate", f"--anchor={anchor}", f"--candidate={candidate}")
    assert code == 0 and shown["releases"][0]["gate"]["suites"]["bugs"]["passed"]
    hashes = json.loads((tmp_path / "releases" / "0001.json").read_text())["gate"]["evaluations"]
    files = {"anchor": anchor, "candidate": candidate}
    assert hashes == {arm: hashlib.sha256(Path(file).read_bytes()).hexdigest() for arm, file in files.items()}
    code, _, err = run("canary", "--skip_aa")
    assert code == 2 and "canary needs --server" in err
    with server_of_version(3) as server:
        code, _, err = run("canary", f"--server={server}")
        assert code == 2 and "no A/A test" in err
        assert run("canary", f"--server={server}", "--skip_aa")[1]["releases"][0]["fraction"] == 0.01
    code, shown, _ = run("canary")
    assert (code, shown["releases"][0]["canary"][0]["decision"]) == (0, "wait")
    code, shown, _ = run("rollback", "--reason=users complain")
    assert (code, shown["serving"], shown["arms"]) == (0, 4, {"anchor": 4, "candidate": 4})
    receiver = WeightReceiver(weights)
    receiver.receive()
    assert receiver.arrays["w"].tolist() == [1, 1, 1]
    status = run("status")[1]
    assert status == shown | {"traffic": [], "page": str(tmp_path / "report.html"), "keep_correlations": {}}


def test_a_rollback_that_was_given_again_is_made_once(run, weights, monkeypatch, tmp_path):
    class Learner:
        is_locked = True

        def keep(self, versions):
            del versions

        def has(self, version):
            return version == 1

        def restore(self, version, as_version):
            assert (version, as_version) == (1, 4)
            if self.is_locked:
                raise UserError("the run is in use.")

    learner = Learner()
    monkeypatch.setattr(traffic, "_learner", lambda _: learner)
    run("begin", f"--weights={weights}", "--version=3", "--serving=1", f"--learner={tmp_path}")
    with ReleaseFolder(tmp_path, by="test", learner=lambda _: learner) as folder:
        folder.record_gate({"verdict": "pass", "reasons": []})
        folder.move("canary", "", fraction=0.01)
    code, shown, err = run("rollback", "--reason=users complain")
    assert code == 2 and shown is None and "the learner has not gone back: the run is in use." in err
    learner.is_locked = False
    code, shown, err = run("rollback", "--reason=users complain")
    assert (code, shown["serving"], shown["releases"][0]["state"]) == (0, 4, "rolled_back"), err
    assert len(shown["releases"][0]["transitions"]) == 4


def test_a_person_without_a_name_decides(run, weights, tmp_path, monkeypatch):
    """In a container there may be neither a name nor an entry of the user."""

    def unknown():
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(traffic.getpass, "getuser", unknown)
    assert run("begin", f"--weights={weights}", "--version=3", "--serving=1")[0] == 0
    assert f'"by": "user {os.getuid()}"' in (tmp_path / "releases" / "0001.json").read_text()


def test_the_key_of_a_judge_need_not_be_on_the_command_line(run, tmp_path, monkeypatch):
    keys = []
    monkeypatch.setenv("COMPOSER_JAX_API_KEY", "of the environment")
    monkeypatch.setattr("composer_jax.stages.traffic.judge_at", lambda url, model, key: keys.append(key))
    run("label")
    run("label", "--judge_key=of the flag")
    assert keys == ["of the environment", "of the flag"]


def test_a_worse_candidate_fails(tmp_path, run, weights):
    anchor = evaluation(tmp_path, "a.json", 0)
    worse = json.loads((tmp_path / "a.json").read_text())
    worse["suites"]["bugs"]["solved"] = {task: 0.0 for task in worse["suites"]["bugs"]["solved"]}
    (tmp_path / "b.json").write_text(json.dumps(worse))
    run("begin", f"--weights={weights}", "--version=3", "--serving=1")
    code, shown, err = run("gate", f"--anchor={anchor}", f"--candidate={tmp_path / 'b.json'}", "--margin=0.06")
    assert (code, shown["releases"][0]["state"]) == (0, "failed"), err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("fly",), "the command is fly; use one of label, forget, batch, begin, train, gate"),
        (("begin", "--version=3"), "begin needs --weights"),
        (("gate", "--harm=0.1"), "--harm is not a flag of gate"),
        (("rollback",), "rollback needs --reason"),
        (("status", "--workdir=gs://ours/run"), "--workdir=gs://ours/run is a bucket; releases and traffic need locks"),
        (("gate",), "has no release"),
        (("batch", "--traffic={weights}"), "is not a traffic folder"),
        (("batch", "--lag=-1"), "traffic.batch.lag=-1 is negative"),
        (("batch", "--version=3"), "--version is not a flag of batch"),
        (("train",), "has no config.json; give the folder of the run whose weights are released"),
        (("cycle",), "cycle needs --server"),
        (("cycle", "--server=http://candidate", "--traffic={weights}", "--every=5"), "--every=5 is no duration"),
        (("begin", "--weights={weights}", "--version=9", "--serving=1"), "versions 0, 1, 2, 3 of the weights, not 9"),
    ],
)
def test_wrong_flags_are_one_sentence(run, weights, words, sentence):
    name, *rest = (word.format(weights=weights) for word in words)
    code, out, err = run(name, *rest)
    assert code == 2 and out is None and sentence in err and len(err.strip().splitlines()) == 1


def test_simulate_has_a_config_and_publishes_beside_the_run(tmp_path, capsys, monkeypatch):
    seen = []

    def simulate(run, cycles, sessions):
        seen.append((run.config.rl.publish, run.config.traffic.users_options, cycles, sessions))
        return [{"step": 1}]

    monkeypatch.setattr(traffic_simulation, "simulate", simulate)

    def command(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            argv, define = ["launch.traffic", "simulate", *words], traffic.define_with_config
            flags.run(traffic.main, argv, define=define, arguments="simulate", processes=hosts.SINGLE_PROCESS)
        return end.value.code, *capsys.readouterr()

    option = "--config.traffic.users_options.population=mine.json"
    code, out, err = command("--config=tiny:traffic_smoke", option, f"--workdir={tmp_path / 'run'}", "--cycles=2")
    assert code == 0 and json.loads(out.splitlines()[-1]) == {"cycles": [{"step": 1}]}, err
    assert seen == [(str(tmp_path / "run" / "weights"), {"population": "mine.json"}, 2, 256)]
    code, _, err = command(f"--workdir={tmp_path / 'other'}")
    assert code == 2 and "--config is missing" in err
    code, _, err = command("--config=tiny:traffic_smoke", f"--workdir={tmp_path / 'run'}", "--server=x")
    assert code == 2 and "--server is not a flag of simulate" in err


def test_train_has_fields_of_the_section_traffic_in_place_of_those_of_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(traffic_simulation, "simulate", lambda *_: [])
    limits = []
    monkeypatch.setattr(traffic_cycle, "train_labelled", lambda run, _: limits.append(run.config.traffic.kl_limit))

    def command(*words):
        capsys.readouterr()
        argv = ["launch.traffic", *words, f"--workdir={tmp_path / 'run'}"]
        has_config = "simulate" in words or traffic.has_config(argv)
        define = traffic.define_with_config if has_config else traffic.define
        with pytest.raises(SystemExit) as end:
            flags.run(traffic.main, argv, define=define, arguments="COMMAND", processes=hosts.NO_DEVICES)
        return end.value.code, capsys.readouterr().err

    assert command("simulate", "--config=tiny:traffic_smoke")[0] == 0
    assert command("train", "--config.traffic.kl_limit=0.5")[0] == 0
    assert command("train")[0] == 0
    assert limits == [0.5, 10.0], "the second one is that of the run"
    code, err = command("train", "--config.seed=5")
    assert code == 2 and "another config: seed: 0 -> 5" in err
