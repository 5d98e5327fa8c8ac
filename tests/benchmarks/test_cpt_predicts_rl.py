"""What benchmarks.cpt_predicts_rl makes of the results of its runs."""

import json

import pytest

from benchmarks import cpt_predicts_rl
from benchmarks.cpt_predicts_rl import VARIANTS, spearman, summarize


def row(seed, variant, loss, reward, before=0.1):
    return {
        "seed": seed,
        "variant": variant,
        "steps": round(100 * float(variant)),
        "loss": loss,
        "reward": reward,
        "reward_before": before,
    }


@pytest.mark.parametrize(
    ("losses", "rewards", "expected"),
    [
        ([4.0, 3.0, 2.0], [0.1, 0.2, 0.9], -1.0),
        ([4.0, 3.0, 2.0], [0.9, 0.2, 0.1], 1.0),
        # Ranks 1 2 3 4 and 2 1 4 3: 1 - 6 * 4 / (4 * 15) = 0.6.
        ([1.0, 2.0, 3.0, 4.0], [0.2, 0.1, 0.4, 0.3], 0.6),
        ([4.0, 3.0], [0.1, 0.2], None),
        ([4.0, 3.0, 2.0], [0.5, 0.5, 0.5], None),
    ],
)
def test_spearman(losses, rewards, expected):
    assert spearman(losses, rewards) == (None if expected is None else pytest.approx(expected))


def test_runs_of_complete_seeds_are_correlated():
    rows = [
        row(seed, variant, 4.0 - index - 0.1 * seed, 0.2 + 0.01 * seed + (0.2 + 0.02 * seed) * index)
        for seed in (0, 1)
        for index, variant in enumerate(VARIANTS)
    ]
    out = summarize([*rows, row(2, VARIANTS[0], 9.0, 0.99)])
    assert json.loads(json.dumps(out)) == out
    assert out["seeds"] == [0, 1] and len(out["points"]) == 6
    assert out["spearman"] == pytest.approx(-1.0) and out["spearman_before"] is None
    assert (out["low"], out["high"]) == pytest.approx((-1.0, -1.0))
    assert out["gain"] == pytest.approx([0.42, 0.4, 0.44]) and out["gain_before"] == [0, 0, 0]
    one = summarize(rows[: len(VARIANTS)])
    assert one["seeds"] == [0] and one["gain"] is None
    assert summarize(rows[:2])["spearman"] is None


def test_a_run_has_its_budget_and_pools_suites_of_different_tasks(tmp_path, monkeypatch):
    calls = []

    def run_pipeline(workdir, size, seed, **fields):
        calls.append(fields)
        config = cpt_predicts_rl.tiny.get_config(size)
        suites = {
            name: {"before": {"pass_at_1": 0.25}, "after": {"pass_at_1": 0.0 if suite.compare_to else 0.5}}
            for name, suite in config.evaluate.suites.items()
        }
        workdir.mkdir(parents=True)
        result = {"cpt": {"heldout_nll_last": 4.0 - len(calls)}, "suites": suites}
        (workdir / "results.json").write_text(json.dumps(result))

    monkeypatch.setattr(cpt_predicts_rl, "run_pipeline", run_pipeline)
    cpt_predicts_rl.main([f"--workdir={tmp_path}", "--seeds=0"])
    assert [fields["pretrain__steps"] for fields in calls] == [40, 120, 400]
    assert {(fields["sft__steps"], fields["rl__steps"]) for fields in calls} == {(300, 22)}
    assert {fields["evaluate__suites__two_bugs__attempts"] for fields in calls} == {2}
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["loss"], row["reward"], row["reward_before"]) for row in rows] == [
        (3.0, 0.5, 0.25),
        (2.0, 0.5, 0.25),
        (1.0, 0.5, 0.25),
    ]
