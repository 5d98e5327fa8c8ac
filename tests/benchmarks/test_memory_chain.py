"""What benchmarks.memory_chain makes of the runs that it starts."""

import json

import pytest

from benchmarks import memory_chain
from composer_jax.observe.metrics import MetricsWriter
from composer_jax.schema.run_config import run_config
from configs.memory_chain import get_config


def row(seed, variant, passed, *, kept=0.5, last=0.25, minutes=2.0):
    measures = {"pass_at_1": passed, "facts_kept": kept, "facts_kept_last": last, "minutes": minutes}
    return {"seed": seed, "variant": variant, **measures}


ROWS = [
    row(1, "sft", 0.1),
    row(1, "joint", 0.99123, kept=1.0, last=1.0, minutes=5.0),
    row(1, "frozen", 0.2),
    row(0, "sft", 0.1, minutes=1.0),
    row(0, "frozen", 0.3),
    row(0, "joint", 1.0, kept=0.5, last=0.0),
    row(2, "joint", 1.0),
]
"""Seed 2 has not finished."""


def test_lists_are_in_the_order_of_the_seeds_that_have_all_variants():
    out = memory_chain.summarize(ROWS)
    assert (out["joint"], out["frozen"], out["sft"]) == ([1.0, 0.9912], [0.3, 0.2], [0.1, 0.1])
    assert out["seeds"] == [0, 1] and out["chance"] == 1 / 8
    assert out["minutes"] == 9.0, "those of the slowest seed"
    assert out["facts_kept"] == {"joint": 0.75, "frozen": 0.5, "sft": 0.5}
    assert out["facts_kept_last"] == {"joint": 0.5, "frozen": 0.25, "sft": 0.25}


def test_without_a_whole_seed_there_is_nothing_to_report():
    out = memory_chain.summarize(ROWS[-1:])
    assert (out["joint"], out["minutes"], out["facts_kept"]["joint"]) == ([], None, None)


@pytest.fixture
def started(monkeypatch):
    """Replaces the runs by folders with their results; returns the (folder, fields) of each."""
    started = []

    def run_pipeline(workdir, size, seed, *, config, **fields):
        started.append((workdir.name, fields))
        which = "before" if workdir.name == "sft" else "after"
        suite = dict.fromkeys(memory_chain.MEASURES, 0.5) | {"solved": {"a": 0.5}}
        (workdir / "stages").mkdir(parents=True, exist_ok=True)
        (workdir / "stages" / f"evaluate_{which}.json").write_text(json.dumps({"suites": {"chain": suite}}))
        (workdir / "results.json").write_text(json.dumps({"wall_seconds": 120.0}))
        if which == "after":
            with MetricsWriter(workdir / "metrics" / "rl.jsonl") as metrics:
                for step in range(10):
                    metrics.write(step + 1, grade=step / 10, facts_kept=None)

    monkeypatch.setattr(memory_chain, "run_pipeline", run_pipeline)
    return started


def test_both_runs_of_rl_start_from_one_sft_policy_and_differ_in_the_compaction(started, tmp_path, capsys):
    memory_chain.main(["--seeds=3", f"--workdir={tmp_path}"])
    out = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert out["seeds"] == [3] and out["minutes"] == 6.0, "the stages of a continued run took two minutes each"
    runs = [(name, fields) for name, fields in started if name != "sft"]
    assert [(name, fields.pop("rl__compaction")) for name, fields in runs] == list(memory_chain.VARIANTS.items())
    assert runs[0][1] == runs[1][1] and runs[0][1]["base"] == tmp_path / "seed3" / "sft" / "checkpoints" / "sft"
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [r["variant"] for r in rows] == ["sft", "joint", "frozen"]
    assert rows[1]["curves"]["grade"] == [step / 10 for step in range(10)]
    assert rows[1]["curves"]["facts_kept"] == [None] * 10 and rows[0]["curves"]["grade"] == []


def test_finished_rows_are_not_run_again(started, tmp_path):
    for _ in range(2):
        memory_chain.main(["--seeds=0", f"--workdir={tmp_path}"])
    assert len(started) == 5, "the SFT policy is looked up before each run of RL"


def test_the_compactions_of_the_variants_are_those_of_the_config():
    compactions = run_config(get_config()).agent.compactions
    trained = {name: compactions[compaction].train_summaries for name, compaction in memory_chain.VARIANTS.items()}
    assert trained == {"joint": True, "frozen": False}
