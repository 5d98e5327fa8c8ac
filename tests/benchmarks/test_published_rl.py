"""benchmarks.published_rl: what is made of its rows, and all of its runs in small on a small published model."""

import json
import subprocess
import sys

import pytest

from benchmarks import published_choice_config, published_rl
from benchmarks.published_rl import SIZES, VARIANTS, PublishedSeed
from configs import smollm2_135m
from launch.flags import parse
from tests.stages.base_model import write_base

SUITES = ("two_bugs", "unnamed_bugs", "unseen_bugs")


def row(seed, variant, *rates, **more):
    """Of a suite each: the fractions of attempts at its tasks that solved them."""
    suites = {
        name: {"family": name, "solved": {f"{name}-{seed}-{i}": rate for i, rate in enumerate(of)}}
        for name, of in zip(SUITES, rates, strict=True)
    }
    return {"seed": seed, "variant": variant, "sampled_tokens": 10.0, "suites": suites, **more}


TIMES = dict.fromkeys(published_rl.TIMES, 2.0)
ROWS = [
    row(0, "sft", [0.5, 0.0, 0.25], [0.5], [0.0, 0.0]),
    row(0, "rl", [1.0, 0.0, 0.5], [0.5], [0.5, 0.0], times=TIMES),
    row(1, "rl", [1.0, 1.0, 1.0], [0.5], [1.0, 1.0], times={**TIMES, "step_s": 4.0}),
]


def test_rl_is_compared_by_task_with_what_a_policy_solves_at_once_and_in_any_attempt(tmp_path, capsys):
    file, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    file.write_text(json.dumps(ROWS))
    published_rl.main(["--base=hf:x", "--seeds=0", "--variants=", f"--rows={file}", f"--picture={picture}"])
    *lines, last = capsys.readouterr().out.splitlines()
    measured = json.loads(last)
    assert measured["sft"]["pass_at_1"]["two_bugs"]["pass"] == 0.25
    assert measured["sft"]["pass_at_k"]["two_bugs"]["pass"] == pytest.approx(2 / 3)
    at_once, any_attempt = (measured["sft"][kind]["two_bugs"]["rl_minus"] for kind in ("pass_at_1", "pass_at_k"))
    assert at_once["difference"] == 0.25 and at_once["tasks"] == 3 and any_attempt["difference"] == 0
    assert measured["sft"]["pass_at_k"]["unseen_bugs"]["rl_minus"]["difference"] == 0.5
    assert measured["rl"]["seeds"] == [0, 1] and "rl_minus" not in measured["rl"]["pass_at_1"]["two_bugs"]
    assert measured["rl"]["times"]["step_s"] == 3 and "times" not in measured["sft"]
    assert len(lines) == 2 + 3 * 2 and lines[2].startswith("| two_bugs | sft | 0 | 0.250 [")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--variants=sft,ppo"], "--variants names 'ppo'; use some of sft, greedy, rl, rft, more_sft"),
        (["--steps=3"], "--steps=3 is not a flag; --help names them"),
        (["--variants="], "no variant has been measured; name some with --variants"),
    ],
)
def test_bad_flags_are_refused_in_one_sentence(tmp_path, capsys, arguments, sentence):
    with pytest.raises(SystemExit):
        published_rl.main(["--base=hf:x", f"--rows={tmp_path / 'rows.json'}", *arguments])
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("size", SIZES.values())
def test_the_tasks_of_the_choice_are_of_another_seed_and_not_those_of_rl_or_of_the_suites(size):
    config = published_choice_config.get_config(size)
    assert set(config.evaluate.suites) == {"bugs", "two_bugs", "unnamed_bugs"}
    assert {(suite.split, suite.attempts) for suite in config.evaluate.suites.values()} == {("train", 1)}
    assert config.evaluate.temperature == 0 and config.stages == () and published_choice_config.SEED


def test_the_controls_train_as_many_steps_as_rl_and_further_traces(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(PublishedSeed, "run", lambda self, control, *_, **fields: made.append(fields) or tmp_path)
    PublishedSeed(tmp_path, "card", 0, "hf:x").more_sft("more_sft")
    (_, fields), config = made, smollm2_135m.get_config("card")
    assert fields["sft__steps"] == config.rl.steps == 50
    expert = config.sft.sources.bugs.options
    assert fields["sft__sources__bugs__options__first"] == expert.first + expert.count
    assert fields["sft__sources__bugs__options__count"] == 8 * 50


@pytest.mark.slow
def test_every_variant_runs_and_the_same_command_measures_nothing_again(tmp_path):
    base = write_base(tmp_path / "model", chat="qwen")
    fields = {"sft.seq_len": 4096, "sampler.max_model_len": 4096, "rl.batches": "((4096, 2),)", "rl.group_size": 2}
    fields |= {"agent.limits.max_turns": 2, "agent.limits.max_turn_tokens": 16, "agent.limits.max_episode_tokens": 8192}
    command = [sys.executable, "-m", "benchmarks.published_rl", f"--base=hf:{base}", "--size=smoke", "--seeds=3"]
    command += [f"--workdir={tmp_path}", *(f"--config.{name}={value}" for name, value in fields.items())]

    def run(*arguments):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=900)
        assert not done.returncode, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    assert run("--choose")[0].keys() == {"bugs", "two_bugs", "unnamed_bugs"}
    measured, _ = run()
    assert measured.keys() == set(VARIANTS) and measured["rl"]["times"].keys() == TIMES.keys()
    assert all(measured[name]["pass_at_1"]["two_bugs"]["rl_minus"]["tasks"] == 1 for name in measured if name != "rl")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["variant"]: row["sampled_tokens"] > 0 for row in rows if row["variant"] != "rft"} == {
        **dict.fromkeys(["sft", "greedy", "more_sft"], False),
        "rl": True,
    }
    again, said = run()
    assert again == measured and not said


def test_its_sizes_are_those_of_the_config():
    for size in SIZES.values():
        config, _ = parse(["x", f"--config={published_rl.CONFIG}:{size}", "--workdir=x", "--config.base=hf:x"])
        assert set(config.evaluate.suites) == set(SUITES)
