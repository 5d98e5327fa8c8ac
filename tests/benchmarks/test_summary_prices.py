"""What benchmarks.summary_prices makes of its rows, and what its runs change in the config."""

import json

import pytest

from benchmarks import controls, summary_prices
from benchmarks.summary_prices import COMPACTED, PRICES, VARIANTS, WHOLE
from composer_jax.rl.rewards import RewardConfig, length_cost
from launch.flags import parse


def row(seed, variant, tokens, whole, compacted):
    solved = {WHOLE: whole, COMPACTED: compacted}
    tasks = {suite: {f"{seed}-{i}": rate for i, rate in enumerate(rates)} for suite, rates in solved.items()}
    return {"seed": seed, "variant": variant, "tokens": tokens, "solved": tasks}


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
        ([], "--policies=0.2", "--policies names '0.2'; use some of prompted, before, 0, 0.1, 0.3, 0.5"),
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
    monkeypatch.setattr(summary_prices, "final_suites", lambda *_: dict.fromkeys((WHOLE, COMPACTED), SUITE))
    for variant in VARIANTS:
        summary_prices.measure(tmp_path, "full", None, 0, variant)
    prices = {}
    for name in ("rl_price_0", "rl", "rl_price_0.3", "rl_price_0.5"):
        changed = {f"--config.{key.replace('__', '.')}={value}" for key, value in runs[name].items() if key != "base"}
        config, _ = parse(["prog", "--config=configs/tiny.py", f"--workdir={tmp_path}", *sorted(changed)])
        prices[name] = config.rl.reward.weight
        assert (config.stages, config.evaluate.which) == (("rl",), ("after",))
    assert list(prices.values()) == [float(price) for price in PRICES]
    assert "prompted_summaries" in runs


SUITE = {"tokens_per_summary": 13.0, "solved": {"a": 1.0}}


def test_a_solved_episode_is_worth_something_at_every_price():
    parts = RewardConfig(summary_token=0.1)
    cost = length_cost(0.1 * 26, k=parts.k, q=parts.q)
    assert 0.55 < 1 / cost < 0.56 and max(map(float, PRICES)) * cost < 1
