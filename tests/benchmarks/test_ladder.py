"""What benchmarks.ladder makes of the runs that it starts."""

import json
from typing import Any

import pytest

from benchmarks import controls, fixed_mix_config, ladder
from composer_jax.observe.metrics import MetricsWriter
from composer_jax.schema.run_config import run_config
from configs import tiny


def row(seed, variant, one, two, rung=()):
    def suite(rates):
        return {"pass_at_1": sum(rates) / len(rates), "solved": {f"task{i}": rate for i, rate in enumerate(rates)}}

    suites = {"one_bug": suite(one), "two_bugs": suite(two), "three_bugs": suite([0.0])}
    return {"seed": seed, "variant": variant, "rung": list(rung), "suites": suites}


ROWS = [
    row(1, "ladder", [1.0, 0.5], [0.75, 0.75], [1.0, 2.5]),
    row(1, "fixed", [1.0, 1.0], [0.25, 0.25]),
    row(0, "fixed", [1.0, 1.0], [0.5, 0.5]),
    row(0, "ladder", [1.0, 1.0], [0.5, 1.0], [1.0, 1.5]),
    row(2, "ladder", [0.0], [0.0], [1.0, 1.0]),
]
"""Seed 2 has not finished."""


def test_suites_have_both_rates_and_their_difference_by_task():
    out = ladder.summarize(ROWS)
    assert json.loads(json.dumps(out)) == out
    assert out["seeds"] == [0, 1] and out["rung"] == [[1.0, 1.5], [1.0, 2.5]]
    one, two = out["suites"]["one_bug"], out["suites"]["two_bugs"]
    assert (two["fixed"]["pass_at_1"], two["ladder"]["pass_at_1"]) == (0.375, 0.75)
    assert two["fixed"]["low"] < 0.375 < two["fixed"]["high"]
    difference = two["ladder_minus_fixed"]
    assert difference["difference"] == 0.375 and difference["tasks"] == 4
    assert difference["low"] < 0.375 < difference["high"]
    assert one["ladder_minus_fixed"]["difference"] == -0.125
    assert out["suites"]["three_bugs"]["ladder_minus_fixed"]["difference"] == 0.0


def test_without_a_whole_seed_there_is_nothing_to_report():
    assert ladder.summarize(ROWS[-1:]) == {"suites": {}, "rung": [], "seeds": []}


@pytest.mark.parametrize("size", [size for size in tiny.SIZES if size not in tiny.WITH_USERS])
def test_both_configs_play_as_many_groups_of_the_same_families(size):
    configs: Any = (
        fixed_mix_config.get_config(size),
        tiny.get_config(size),
    )
    fixed, climbing = map(run_config, configs)
    assert climbing.rl.curriculum.ladders == {"one_bug": ("two_bugs", "three_bugs")}
    assert sum(climbing.rl.groups.values()) == sum(fixed.rl.groups.values())
    assert climbing.rl.groups["memory_chain"] == fixed.rl.groups["memory_chain"]
    assert climbing.rl.families >= fixed.rl.families and climbing.rl.steps == fixed.rl.steps
    assert fixed.rl.curriculum.ladders == {} and set(ladder.SUITES) <= set(fixed.evaluate.suites)


@pytest.fixture
def started(monkeypatch):
    """Replaces the runs by folders with their results; returns the (folder, config, fields) of each."""
    started = []

    def run_pipeline(workdir, size, seed, *, config="configs/tiny.py", **fields):
        started.append((workdir, config, fields))
        suites = dict.fromkeys(ladder.SUITES, {"pass_at_1": 0.5, "solved": {"a": 0.5}})
        (workdir / "stages").mkdir(parents=True, exist_ok=True)
        if workdir.name == "sft":
            return
        (workdir / "stages" / "evaluate_after.json").write_text(json.dumps({"suites": suites}))
        with MetricsWriter(workdir / "metrics" / "rl.jsonl") as metrics:
            for step in range(20):
                rung = {"rung_one_bug": 1 + step // 10} if config == "configs/tiny.py" else {}
                metrics.write(step + 1, grade=0.5, **rung)

    monkeypatch.setattr(controls, "run_pipeline", run_pipeline)
    return started


def test_both_runs_start_from_one_sft_policy_and_differ_in_the_config(started, tmp_path, capsys):
    for _ in range(2):  # the second time all rows are there
        ladder.main(["--seeds=3", f"--workdir={tmp_path}"])
    out = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert out["seeds"] == [3] and out["rung"] == [[1.0] * 5 + [2.0] * 5]
    (_, fixed, _, climbing) = started
    assert (fixed[0].name, fixed[1]) == ("rl_fixed_mix", "benchmarks/fixed_mix_config.py")
    assert (climbing[0].name, climbing[1]) == ("rl", "configs/tiny.py")
    assert fixed[2] == {key: climbing[2][key] for key in fixed[2]} and climbing[2].keys() - fixed[2].keys() == KEEPING
    assert fixed[2]["base"] == tmp_path / "seed3" / "sft" / "checkpoints" / "sft"


KEEPING = {"rl__keep_groups"}
"""What benchmarks.controls stores of RL for rejection sampling."""


def test_sft_policies_are_taken_from_a_folder(started, tmp_path, capsys):
    base, workdir = tmp_path / "others", tmp_path / "mine"
    arguments = ["--seeds=3", f"--workdir={workdir}", f"--base={base}"]
    with pytest.raises(SystemExit) as ended:
        ladder.main(arguments)
    assert ended.value.code == 2 and "no policy that was evaluated before RL" in capsys.readouterr().err and not started
    (base / "seed3" / "sft" / "stages").mkdir(parents=True)
    (base / "seed3" / "sft" / "stages" / "evaluate_before.json").touch()
    ladder.main(arguments)
    assert [folder.name for folder, _, _ in started] == ["rl_fixed_mix", "rl"]
    assert {fields["base"] for _, _, fields in started} == {base / "seed3" / "sft" / "checkpoints" / "sft"}
