"""benchmarks.forgetting: what its variants change, and what is made of their rows."""

import json

import pytest

from benchmarks import controls, forgetting
from benchmarks.forgetting import KEPT, LEARNED, VARIANTS
from benchmarks.seeded_runs import SIZES
from composer_jax.schema.run_config import run_config
from launch.flags import parse


def row(seed, variant, kept, learned, **measures):
    rates = {**dict.fromkeys(KEPT, kept), **dict.fromkeys(LEARNED, learned)}
    suites = {name: {"solved": {f"{name}-{seed}-{i}": r for i, r in enumerate(of)}} for name, of in rates.items()}
    return {"seed": seed, "variant": variant, "suites": suites, **measures}


ROWS = [
    row(0, "sft", [0.75, 0.75], [0.0, 0.0]),
    row(0, "rl", [0.0, 0.5], [1.0, 0.5], step_s=300.0, learner_tokens=1000.0, kl_reference=None),
    row(1, "rl", [0.25, 0.25], [0.5, 0.5], step_s=100.0, learner_tokens=2000.0, kl_reference=None),
    row(0, "replay", [0.5, 0.5], [1.0, 0.25], sft_replay_tokens=500.0),
    row(1, "replay", [0.5, 0.5], [0.5, 0.5], sft_replay_tokens=700.0),
    row(1, "kl_0.1", [0.25, 0.5], [0.5, 0.25], kl_reference=0.25),
]


def test_differences_to_rl_are_paired_by_task_over_the_seeds_of_both(tmp_path, capsys):
    file, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    file.write_text(json.dumps(ROWS))
    measured = forgetting.summarize(ROWS)
    assert list(measured) == ["sft", "rl", "replay", "kl_0.1"]
    assert measured["rl"]["minus_rl"] == {} and measured["rl"]["step_s"] == 200 and measured["rl"]["seeds"] == [0, 1]
    replay = measured["replay"]["minus_rl"]
    # By task: 0.5, 0, 0.25, 0.25 and 0, -0.25, 0, 0.
    for suite in (*KEPT, "kept"):
        difference, low, high = replay[suite]
        assert difference == 0.25 and 0 <= low < 0.25 < high <= 0.5
    assert replay["learned"][0] == -0.0625 and replay["kept"][2] - replay["kept"][1] < replay[KEPT[0]][2]
    assert measured["replay"]["sft_replay_tokens"] == 600 and measured["replay"]["kl_reference"] is None
    assert measured["kl_0.1"]["minus_rl"]["kept"][0] == 0.125 and measured["kl_0.1"]["kl_reference"] == 0.25
    assert measured["sft"]["minus_rl"]["learned"][0] == -0.75, "of the one seed that both have"
    assert measured["replay"]["suites"]["chain_long"][0] == 0.5
    forgetting.main(["--seeds=1", "--variants=rl,replay", f"--rows={file}", f"--picture={picture}"])
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == measured
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| sft", "| replay", "| kl_0.1"]
    assert "+0.250 [" in lines[3] and picture.read_bytes().startswith(b"\x89PNG")


def test_other_tasks_and_unknown_variants_are_refused_in_one_sentence(tmp_path, capsys):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([ROWS[1], row(0, "replay", [0.5], [0.5])]))
    for arguments, sentence in (
        (["--variants=rl,replay"], "the control 'replay' was measured on 1 tasks"),
        (["--variants=rl,kl"], "--variants names 'kl'; use some of sft, rl, replay"),
    ):
        with pytest.raises(SystemExit) as ended:
            forgetting.main([*arguments, "--seeds=0", f"--rows={file}"])
        assert ended.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.parametrize("size", SIZES)
def test_variants_differ_from_rl_in_their_remedy_only(size, tmp_path, monkeypatch):
    runs = {}
    monkeypatch.setattr(controls, "run_pipeline", lambda workdir, *_, **fields: runs.update({workdir.name: fields}))
    monkeypatch.setattr(controls.Seed, "row", lambda self, variant, workdir: {"variant": variant})
    monkeypatch.setattr(forgetting, "step_measures", lambda _: {"step_s": 1.0})
    for variant in VARIANTS:
        made = forgetting.measure(tmp_path, size, None, 0, variant)
        assert made == {"variant": variant} | ({} if variant == "sft" else {"step_s": 1.0})
    assert list(runs) == list(VARIANTS) and runs["sft"]["stages"] == "('pretrain','sft')"
    changed = {}
    for variant in [name for name in VARIANTS if name != "sft"]:
        assert runs[variant].pop("base") == tmp_path / "seed0" / "sft" / "checkpoints" / "sft"
        flags = [f"--config.{key.replace('__', '.')}={value}" for key, value in runs[variant].items()]
        config, _ = parse(["prog", f"--config=configs/tiny.py:{size}", f"--workdir={tmp_path}", *flags])
        rl = run_config(config).rl
        changed[variant] = (rl.algorithm.kl.coefficient, rl.replay.fraction)
        config.rl.algorithm.kl.coefficient = config.rl.replay.fraction = 0.0
        config.rl.update({"keep_groups": False, "replay": {"weight": 1.0}})
        plain, _ = parse(["prog", f"--config=configs/tiny.py:{size}", f"--workdir={tmp_path}"])
        assert config.rl.to_dict() == plain.rl.to_dict()
    low, middle, high = forgetting.KL_COEFFICIENTS
    assert changed["rl"] == (0.0, 0.0) and 5 < high / low < 20 and low < middle < high
    assert [changed[f"kl_{value}"] for value in (low, middle, high)] == [(low, 0.0), (middle, 0.0), (high, 0.0)]
    fraction = changed["replay"][1]
    assert fraction > 0 and changed["replay"][0] == 0 and changed["replay_and_kl"] == (middle, fraction)


def test_measures_are_those_of_the_steps(tmp_path):
    (tmp_path / "metrics").mkdir()
    steps = [
        {
            "step": step,
            "step_s": 2.0,
            "train_s": 0.5,
            "tokens_per_s": None if step == 1 else 100.0,
            "kl_reference": step,
        }
        for step in range(1, 21)
    ]
    (tmp_path / "metrics" / "rl.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    assert forgetting.step_measures(tmp_path) == {
        "step_s": 40.0,
        "train_s": 10.0,
        "learner_tokens": 47.5,
        "sft_replay_tokens": None,
        "kl_reference": 19.5,
    }
