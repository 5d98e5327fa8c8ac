"""benchmarks.summary_prices: its chains and their expert, what its runs change, and what is made of their rows."""

import json
import random
from typing import Any

import pytest

from benchmarks import summary_prices
from benchmarks.seeded_runs import SIZES
from benchmarks.summary_prices import PRICES, VARIANTS
from benchmarks.summary_prices_config import STEPS, SUMMARIZED, WHOLE, AnyItemChain, ListTraces, get_config
from composer_jax.agent.summary import FACTS
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.demo.memory_chain_expert import ChainNotes, chain_summary
from composer_jax.rl.rewards import bounded_cost, length_cost
from composer_jax.schema.run_config import run_config
from composer_jax.stages.run_data import RunData
from composer_jax.stages.trace_sources import SourceContext
from launch.flags import parse


def row(seed, variant, tokens, whole, compacted):
    tasks = [{f"{seed}-{i}": rate for i, rate in enumerate(rates)} for rates in (whole, compacted)]
    return {"seed": seed, "variant": variant, "tokens": tokens, "whole": tasks[0], "compacted": tasks[1]}


def rows(seed):
    return [row(seed, name, 10 * i + seed, (1, 1), (0.5 * (i % 2), 1)) for i, name in enumerate(VARIANTS)]


def test_errors_are_paired_by_chain_over_the_seeds_that_all_policies_have(tmp_path, capsys):
    file, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    file.write_text(json.dumps([*rows(0), *rows(1)]))
    summary_prices.main(["--seeds=0,1", f"--rows={file}", f"--picture={picture}"])
    out = json.loads(capsys.readouterr().out)
    assert out["seeds"] == [0, 1] and list(out) == ["seeds", *VARIANTS]
    assert [out[name]["tokens"] for name in VARIANTS] == [0.5, 10.5, 20.5, 30.5, 40.5]
    error, low, high = out["0"]["compaction_error"]
    assert error == 0.25 and 0 <= low < error < high <= 0.5
    assert out["before"]["compaction_error"][0] == 0.5 and out["0"]["pass_at_1"][0] == 0.75
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_a_common_seed_there_is_nothing_to_say():
    assert summary_prices.summarize([rows(0)[0], rows(1)[1]]) == {"seeds": []}
    assert summary_prices.summarize([]) == {"seeds": []}


def test_other_chains_are_refused_in_one_sentence(tmp_path, capsys):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row(0, name, 12, (1, 1), (1,)) for name in VARIANTS]))
    with pytest.raises(SystemExit) as ended:
        summary_prices.main(["--seeds=0", f"--rows={file}"])
    assert ended.value.code == 2
    assert "'before' played other chains with summaries than without" in capsys.readouterr().err


def test_policies_differ_in_the_price_of_summaries_only(tmp_path, monkeypatch):
    runs: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(
        summary_prices, "run_pipeline", lambda workdir, *_, **fields: runs.update({workdir.name: fields})
    )
    suite = {"tokens_per_summary": 13.0, "solved": {"a": 1.0}}
    monkeypatch.setattr(summary_prices, "final_suites", lambda _: {WHOLE: suite, SUMMARIZED: suite})
    for variant in VARIANTS:
        summary_prices.measure(tmp_path, "full", 0, variant)
    assert list(runs) == ["before", *(f"price_{price}" for price in PRICES)]
    configs = []
    for price in PRICES:
        fields = runs[f"price_{price}"]
        assert fields.pop("base") == tmp_path / "seed0" / "before" / "checkpoints" / "sft"
        flags = [f"--config.{key.replace('__', '.')}={value}" for key, value in fields.items() if key != "config"]
        config, _ = parse(["prog", f"--config={fields['config']}", f"--workdir={tmp_path}", *flags])
        assert config.rl.reward.weight == float(price)
        configs.append(config.to_dict())
        configs[-1]["rl"]["reward"].pop("weight")
    assert all(config == configs[0] for config in configs)


@pytest.mark.parametrize("size", SIZES)
def test_only_summary_tokens_have_a_price(size):
    config = run_config(get_config(size))
    reward = config.rl.reward
    others = ("thinking_token", "call_token", "output_token", "final_token", "call", "turn")
    assert reward.summary_token > 0 and not any(getattr(reward, name) for name in others)
    costs = [float(price) * length_cost(reward.summary_token * 75, k=reward.k, q=reward.q) for price in PRICES]
    paid = [bounded_cost(cost, 1.0) for cost in costs]
    assert paid == pytest.approx([0, 0.38, 0.63, 0.68], abs=0.005), "what PRICES says of a chain with all items"


def test_chains_ask_for_every_item_alike():
    asked = [AnyItemChain().generate("heldout", 0, i).metadata["name"] for i in range(400)]
    counts = {name: asked.count(name) for name in set(asked)}
    assert len(counts) == STEPS - 2 and min(counts.values()) > 50


def test_the_expert_keeps_any_number_of_items():
    rng, task = random.Random(0), AnyItemChain().generate("train", 0, 0)
    notes, items = ChainNotes.of_summary(task, None), list(task.metadata["items"])
    for _ in range(4):
        notes.read(task)
    kept = [chain_summary(task, notes, "some", rng).split("\n") for _ in range(1000)]
    assert all(ChainNotes.of_summary(task, "\n".join(lines)).following == notes.following for lines in kept)
    numbers = [len(lines) - 1 for lines in kept]
    assert all(150 < numbers.count(n) < 250 for n in range(5)), "each number with the same probability"
    assert all(lines[:-1] == [item for item in items if item in lines] for lines in kept), "in the order of the files"
    assert all(150 < sum(item in lines for lines in kept) < 850 for item in items[:4])


def test_expert_and_lengths_fit_the_config(tmp_path):
    config = run_config(get_config())
    tokenizer = RunData(config, tmp_path).tokenizer
    context = SourceContext(0, tokenizer, CompactFormat(tokenizer), config.agent, tmp_path / "traces")
    played = ListTraces(context, {"chain_some": 60, "chain_whole": 10}, chain_steps=STEPS).play()
    assert {episode.outcome for _, episode in played} == {"finished"}
    assert all(episode.reward == 1 for _, episode in played[60:])
    assert 0 < sum(episode.reward for _, episode in played[:60]) < 60
    summaries = [node for _, episode in played[:60] for node in episode.transcript.nodes_of_kind("summary")]
    lengths = [len(node.sampled_tokens) for node in summaries]
    assert max(lengths) < config.agent.compactions["some"].max_summary_tokens and len(set(lengths)) > 10
    longest = [
        max(len(row.tokens) for _, e in part for row in e.transcript.rows()) for part in (played[:60], played[60:])
    ]
    assert longest[0] <= config.rl.batches[0][0] and longest[1] <= config.sampler.max_model_len
    for task, episode in played[:60]:
        last = tokenizer.decode(episode.transcript.nodes_of_kind("summary")[-1].sampled_tokens.tolist())
        assert episode.reward == 1 or task.metadata[FACTS][0] not in last.split("\n")
