"""What benchmarks.summary_prices makes of its rows, and what its runs change in the config."""

import json

import pytest

from benchmarks import controls, summary_prices
from benchmarks.seeded_runs import SIZES
from benchmarks.summary_prices import PRICES, REPORTS, SHORT, VARIANTS, WHOLE
from benchmarks.summary_prices_config import get_config
from composer_jax.stages.config import run_config
from configs import tiny
from launch.flags import parse


def row(seed, variant, tokens, whole, compacted):
    tasks = [{f"{seed}-{i}": rate for i, rate in enumerate(rates)} for rates in (whole, compacted)]
    return {"seed": seed, "variant": variant, "tokens": tokens, "whole": tasks[0], "compacted": tasks[1]}


ROWS = [
    row(0, "prompted", 70, (1, 1), (0.5, 0)),
    row(1, "prompted", 80, (1, 0.5), (1, 0)),
    row(0, "0.1", 12, (1, 1), (1, 1)),
    row(1, "0.1", 14, (1, 1), (0.5, 1)),
    row(2, "0.1", 99, (1, 1), (0, 0)),
]


def test_errors_are_paired_by_chain_over_the_seeds_that_all_policies_have(tmp_path, capsys):
    file, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    file.write_text(json.dumps(ROWS))
    summary_prices.main(["--seeds=0,1", "--policies=prompted,0.1", f"--rows={file}", f"--picture={picture}"])
    out = json.loads(capsys.readouterr().out)
    assert out["seeds"] == [0, 1] and list(out) == ["seeds", "prompted", "0.1"]
    assert (out["prompted"]["tokens"], out["0.1"]["tokens"]) == (75, 13)
    error, low, high = out["prompted"]["compaction_error"]
    assert error == 0.5 and 0 <= low < error < high <= 1
    assert out["0.1"]["compaction_error"][0] == 0.125 and out["0.1"]["pass_at_1"][0] == 0.875
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_a_common_seed_there_is_nothing_to_say_or_draw():
    assert summary_prices.summarize([ROWS[0], ROWS[3]]) == {"seeds": []}
    assert summary_prices.summarize([]) == {"seeds": []}


@pytest.mark.parametrize(
    "rows, flag, sentence",
    [
        (
            [],
            "--policies=0.2",
            "--policies names '0.2'; use some of before, before_short, prompted, short, 0, 0.01, 0.03",
        ),
        ([row(0, "0", 12, (1, 1), (1,))], "--policies=0", "'0' played other chains with summaries than without"),
    ],
)
def test_bad_input_is_one_sentence(rows, flag, sentence, tmp_path, capsys):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    with pytest.raises(SystemExit) as ended:
        summary_prices.main(["--seeds=0", flag, f"--rows={file}"])
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_policies_differ_in_the_price_of_summaries_only(tmp_path, monkeypatch):
    """Those that benchmarks.controls has are its runs; the others are runs in folders of their own."""
    runs = {}
    monkeypatch.setattr(controls, "run_pipeline", lambda workdir, *_, **fields: runs.update({workdir.name: fields}))
    suites = {name: {"tokens_per_summary": len(name), "solved": {name: 1.0}} for name in (WHOLE, REPORTS, SHORT)}
    monkeypatch.setattr(summary_prices, "final_suites", lambda *_: suites)
    rows = {name: summary_prices.measure(tmp_path, "full", None, 0, name) for name in VARIANTS}
    assert {name for name, row in rows.items() if SHORT in row["compacted"]} == {"before_short", "short"}
    assert all(WHOLE in row["whole"] and len(row["compacted"]) == 1 for row in rows.values())
    assert runs.keys() == {"sft", "prompted_summaries", "rl_price_0"} | {f"rl_reports_price_{p}" for p in PRICES}
    prices = []
    for price in PRICES:
        fields = dict(runs[f"rl_reports_price_{price}"])
        assert fields.pop("base") == tmp_path / "seed0" / "sft" / "checkpoints" / "sft"
        flags = [f"--config.{key.replace('__', '.')}={value}" for key, value in fields.items() if key != "config"]
        config, _ = parse(["prog", f"--config={fields['config']}", f"--workdir={tmp_path}", *flags])
        prices.append(config.rl.reward.weight)
        assert (config.stages, config.evaluate.which, config.rl.compaction) == (("rl",), ("after",), "long")
    assert prices == [float(price) for price in PRICES]


@pytest.mark.parametrize("size", SIZES)
def test_the_config_is_the_demo_with_chains_alone(size):
    config, demo = run_config(get_config(size)), run_config(tiny.get_config(size))
    assert list(config.rl.groups) == ["memory_chain"] and config.rl.steps == demo.rl.steps
    assert {WHOLE, REPORTS} == set(config.evaluate.suites) and config.model == demo.model
    assert config.evaluate.suites[REPORTS] == demo.evaluate.suites[REPORTS]
    assert config.rl.reward.summary_token > 0 == config.rl.reward.turn
