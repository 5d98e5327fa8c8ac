"""benchmarks.parallel_calls: its runs, which differ in a price, and what is made of their rows."""

import json

import pytest

from benchmarks import claims, parallel_calls, parallel_calls_config
from composer_jax.rl.rewards import LENGTHS
from composer_jax.schema.run_config import run_config
from configs.memory_chain import SIZES

CALLS = {"sft": 1.5, "free": 1.6, "priced": 2.4, "tiny_price": 1.6, "tiny_price_std": 2.0}
TURNS = {"sft": 5.0, "free": 5.0, "priced": 2.5, "tiny_price": 5.0, "tiny_price_std": 3.0}


def suite(name, variant, seed, turns=None):
    measures = {"pass_at_1": 0.75, "calls_per_turn": CALLS[variant], "turns": turns or TURNS[variant], "tokens": 100.0}
    return {**measures, "solved": {f"{name}-{seed}-a": 1.0, f"{name}-{seed}-b": 0.5}}


def row(seed, variant):
    """The price halves the messages of tasks with many files, and saves a fifth of those with few."""
    few = suite("few", variant, seed, 4.0 if variant == "priced" else None)
    return {
        "seed": seed,
        "variant": variant,
        "suites": {"few_lookups": few, "many_lookups": suite("many", variant, seed)},
    }


ROWS = [row(seed, variant) for seed in (0, 1) for variant in parallel_calls.VARIANTS]


def test_rise_and_shortening_compare_rl_with_and_without_the_price():
    out = parallel_calls.summarize([*ROWS, row(2, "sft")])
    assert json.loads(json.dumps(out)) == out and out["seeds"] == [0, 1]
    assert out["priced"]["many_lookups"] == {
        "pass_at_1": 0.75,
        "calls_per_turn": 2.4,
        "turns": 2.5,
        "tokens": 100.0,
    }
    assert out["rise"] == {"few_lookups": [0.5, 0.5], "many_lookups": [0.5, 0.5]}
    assert out["rise_by_std"] == {"few_lookups": [0.25, 0.25], "many_lookups": [0.25, 0.25]}
    assert out["shortening"] == {"few_lookups": [0.2, 0.2], "many_lookups": [0.5, 0.5]}
    for name in ("pass_difference", "pass_difference_by_std"):
        assert out[name]["many_lookups"] == {"difference": 0.0, "low": 0.0, "high": 0.0, "tasks": 4}
    assert parallel_calls.summarize(ROWS[:2]) == {"seeds": []}


def test_a_policy_without_calls_has_no_rise():
    made = [row(0, variant) for variant in parallel_calls.VARIANTS]
    for one in made:
        for measures in one["suites"].values():
            measures["calls_per_turn"] = 0.0
    assert parallel_calls.summarize(made)["rise"] == {"few_lookups": [0.0], "many_lookups": [0.0]}


def test_both_claims_read_the_rows(tmp_path, capsys):
    (tmp_path / "parallel_calls.json").write_text(json.dumps(ROWS))
    claims.main([f"--data={tmp_path}", f"--pictures={tmp_path / 'pictures'}"])
    out = json.loads(capsys.readouterr().out)
    assert out["price_raises_parallel_calls"] == {
        "holds": True,
        "effect": 0.2,
        "low": 0.2,
        "high": 0.2,
        "seeds": [0, 1],
    }
    assert out["price_shortens_easy_tasks_more"]["effect"] == pytest.approx(-0.3)
    assert not out["price_shortens_easy_tasks_more"]["holds"]
    assert out["std_normalisation_costs_solved_tasks"] == {
        "holds": False,
        "effect": 0.0,
        "low": 0.0,
        "high": 0.0,
        "seeds": [0, 1],
    }
    assert out["std_normalisation_inflates_small_differences"]["effect"] == pytest.approx(0.25)
    drawn = {path.stem for path in (tmp_path / "pictures").iterdir()}
    assert drawn == {name for name, claim in out.items() if claim} and len(drawn) == 4
    claims.main([f"--data={tmp_path}", "--seeds=0"])
    assert not any(json.loads(capsys.readouterr().out).values())


@pytest.mark.parametrize("size", SIZES)
def test_messages_are_all_that_has_a_price(size):
    config = run_config(parallel_calls_config.get_config(size))
    reward = config.rl.reward
    assert [name for name in LENGTHS if getattr(reward, name)] == ["turn"]
    assert reward.weight == parallel_calls.PRICE > 0 and reward.q == 0.5
    assert set(config.rl.groups) == set(config.evaluate.suites) == {"few_lookups", "many_lookups"}


def test_rl_starts_from_one_policy_and_differs_in_the_price(tmp_path, monkeypatch, capsys):
    started = []

    def run_pipeline(workdir, size, seed, *, config, **fields):
        started.append((workdir.relative_to(tmp_path).as_posix(), fields))

    monkeypatch.setattr(parallel_calls, "run_pipeline", run_pipeline)
    monkeypatch.setattr(
        parallel_calls,
        "final_suites",
        lambda workdir: {name: suite(name, workdir.name, 3) for name in parallel_calls.LOOKUPS},
    )
    for _ in range(2):  # the second time all rows are there
        parallel_calls.main(["--seeds=3", f"--workdir={tmp_path}"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["seeds"] == [3]
    runs = [(folder, fields) for folder, fields in started if not folder.endswith("sft")]
    names = ["free", "priced", "tiny_price", "tiny_price_std"]
    assert [folder for folder, _ in runs] == [f"seed3/{name}" for name in names] and len(started) == 1 + 2 * len(names)
    assert {fields["base"] for _, fields in runs} == {tmp_path / "seed3" / "sft" / "checkpoints" / "sft"}
    free, priced, tiny, divided = (fields for _, fields in runs)
    assert free == {**priced, "rl__reward__weight": 0.0} != priced
    assert 0 < tiny["rl__reward__weight"] <= parallel_calls.PRICE / 100
    assert divided == {**tiny, "rl__algorithm__options__divide_by_std": True}
