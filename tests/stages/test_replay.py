"""launch.replay: a recorded run of RL is trained on, scored and played again, each without the other two."""

import json
import shutil

import jax
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.observe.episodes import read_episodes
from composer_jax.observe.metrics import read_metrics
from composer_jax.rl.records import RolloutRecords
from composer_jax.sampler.sampler import Sampler
from composer_jax.stages import rollout_services
from composer_jax.stages.replay_rollout import play_records
from composer_jax.stages.replay_train import train_on_records
from composer_jax.stages.run import Run
from composer_jax.stages.train_rl import train_rl
from launch import flags, hosts, replay
from tests.stages.base_model import write_base
from tests.stages.two_hosts_config import get_config

pytestmark = pytest.mark.slow


def rl_config(folder, **fields):
    """RL from the small base in `folder`."""
    config = get_config(str(folder / "model"))
    config.mesh.update({"data": 2, "expert": 1})
    config.rl.groups.bugs = 2
    kept = {"keep_groups": True, "record_tokens": True, "record_every": 1}
    config.rl.update({"steps": 2, "max_staleness": 0, **kept, **fields})
    config.evaluate.during = ()
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with `model`, a small base, and `rl`, two steps of RL that go on from there."""
    folder = tmp_path_factory.mktemp("replay")
    write_base(folder / "model")
    with Run(rl_config(folder), folder / "rl") as run:
        train_rl(run)
    return folder


def base_of(folder) -> str:
    return f"hf:{folder / 'model'}"


def weights(config, folder):
    with Run(config, folder) as run:
        return run.model.weights_of("rl")


def command(*arguments):
    with pytest.raises(SystemExit) as ended:
        flags.run(
            replay.main,
            ["replay", *map(str, arguments)],
            define=replay.define,
            arguments="rollout|score|train",
            processes=hosts.SINGLE_PROCESS,
        )
    return ended.value.code


def test_learning_alone_takes_the_same_steps_bit_for_bit(folder, profiler):
    config = rl_config(folder)
    config.profile.steps = "2:2"
    with Run(config, folder / "trained") as run:
        records = RolloutRecords(folder / "rl", run.model.tokenizer.fingerprint)
        train_on_records(run, records)
    assert profiler == [("start", folder / "trained" / "profile" / "rl"), ("stop", None)]
    want, got = (weights(rl_config(folder), folder / name) for name in ("rl", "trained"))
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)
    rows, again = (read_metrics(folder / name / "metrics" / "rl.jsonl") for name in ("rl", "trained"))
    assert len(rows) == len(again) == 2 and any(row["trained_tokens"] for row in rows)
    assert any(row["feedback_turns"] for row in rows) and any(row["feedback_kl"] for row in rows)
    assert all(row["sft_replay_tokens"] and row["cross_entropy"] for row in rows), "of the sources of the config"
    columns = ["reward", "grade", "trained_tokens", "ratio_max", "grad_norm", "sampled_tokens"]
    columns += ["sft_replay_tokens", "cross_entropy", *(name for name in rows[0] if name.startswith("feedback_"))]
    for name in columns:
        assert [row[name] for row in rows] == [row[name] for row in again]


def test_the_report_gets_the_advantages_of_the_tokens(folder):
    episodes = read_episodes(folder / "rl" / "episodes" / "rl.jsonl")
    assert len(episodes) == 2 * 2, "two of the family in each step"
    advantages = []
    for episode in episodes:
        tokens = [token for segment in episode.segments for message in segment for token in message.sampled_tokens]
        assert len(tokens) == episode.sampled_tokens
        advantages += [token.advantage for token in tokens]
    assert any(advantages) and None not in advantages


def test_the_scores_of_the_weights_that_sampled_are_those_of_the_sampler(folder, capsys):
    assert command("score", f"--workdir={folder / 'rl'}", f"--policy={base_of(folder)}") == 0
    scored = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (scored["groups"], scored["episodes"]) == (4, 16)
    rows = read_metrics(folder / "rl" / "metrics" / "rl.jsonl")
    assert sum(part["tokens"] for part in scored["by_version"].values()) == scored["gaps"]["tokens"]
    assert scored["gaps"]["tokens"] == sum(row["sampled_tokens"] for row in rows)
    assert scored["reward"] != 0 and scored["reward"] == pytest.approx(np.mean([row["reward"] for row in rows]))
    assert scored["by_version"]["0"]["max"] < 1e-3
    assert command("score", f"--workdir={folder / 'rl'}") == 0
    after = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert after["by_version"]["0"]["k3"] > 100 * scored["by_version"]["0"]["k3"], "the trained weights have moved"


def test_a_rollout_with_the_same_weights_samples_the_same_tokens(folder, capsys, monkeypatch):
    policy, out, samplers = f"--policy={base_of(folder)}", folder / "again", []
    new_sampler = lambda *args, **options: samplers.append(options) or Sampler(*args, **options)  # noqa: E731
    monkeypatch.setattr(rollout_services, "Sampler", new_sampler)
    assert command("rollout", f"--workdir={folder / 'rl'}", policy, f"--out={out}") == 0
    assert [options["only_fitting"] for options in samplers] == [True], "no bit may depend on how long tools take"
    played = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (played["steps"], played["groups"], played["episodes"], played["compared"]) == (2, 4, 16, 16)
    # The first step of the run was played with these weights, the second one with those that it had learned.
    assert 8 <= played["same_tokens"] < 16
    with Run(rl_config(folder), folder / "rl") as run:
        new, old = (RolloutRecords(folder / name, run.model.tokenizer.fingerprint) for name in ("again", "rl"))
    assert new.batches[0].tokens == old.batches[0].tokens and new.batches[1].tokens != old.batches[1].tokens
    assert new.places == old.places
    # What is there is not played again.
    written = {path: path.stat().st_mtime_ns for path in (out / "rl" / "groups").iterdir()}
    assert command("rollout", f"--workdir={folder / 'rl'}", policy, f"--out={out}") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == played
    assert written == {path: path.stat().st_mtime_ns for path in (out / "rl" / "groups").iterdir()}


def test_bad_input_ends_with_a_sentence(folder, tmp_path, capsys):
    def sentence(*arguments):
        assert command(*arguments) != 0
        return capsys.readouterr().err

    run = f"--workdir={folder / 'rl'}"
    shutil.copytree(folder / "rl", tmp_path / "rl")
    assert "the command is missing; use one of rollout, score, train" in sentence(run)
    assert "train needs --records" in sentence("train", run)
    assert "rollout needs --out" in sentence("rollout", run)
    assert "--out is not a flag of score" in sentence("score", run, f"--out={tmp_path}")
    assert "holds no records of RL" in sentence("score", run, f"--records={tmp_path}")
    assert "is the folder of the records" in sentence("rollout", run, f"--out={folder / 'rl'}")
    assert "is the folder of a run" in sentence(
        "rollout", run, f"--records={tmp_path / 'rl'}", f"--out={folder / 'rl'}"
    )
    claimed = tmp_path / "claimed"
    claimed.mkdir()
    (claimed / "policy.txt").write_text("hf:other")
    assert "has episodes of the policy hf:other" in sentence("rollout", run, f"--out={claimed}")
    (tmp_path / "rl" / "rl" / "tokenizer.txt").write_text("0123")
    assert "have the ids of another tokenizer (0123)" in sentence("score", run, f"--records={tmp_path / 'rl'}")


def test_other_tasks_than_the_recorded_ones_are_refused(folder, tmp_path):
    config = rl_config(folder)
    config.seed = 1
    with Run(config, tmp_path / "run") as run:
        records = RolloutRecords(folder / "rl", run.model.tokenizer.fingerprint)
        with pytest.raises(UserError, match=r"Group 0 of .* played the task .* use the seed and the tasks"):
            play_records(run, records, base_of(folder), tmp_path / "out")


def test_deleted_groups_and_too_many_steps_are_refused(folder, tmp_path):
    with Run(rl_config(folder, steps=3), tmp_path / "run") as run:
        records = RolloutRecords(folder / "rl", run.model.tokenizer.fingerprint)
        with pytest.raises(UserError, match="has records of 2 steps and rl.steps=3"):
            train_on_records(run, records)
    shutil.copytree(folder / "rl", tmp_path / "rl")
    next(iter(sorted((tmp_path / "rl" / "rl" / "groups").iterdir()))).unlink()
    with Run(rl_config(folder), tmp_path / "other") as run:
        records = RolloutRecords(tmp_path / "rl", run.model.tokenizer.fingerprint)
        with pytest.raises(UserError, match="has deleted group 0; only a run with --config.rl.keep_groups=True"):
            train_on_records(run, records)
