"""benchmarks.rule_change: its tasks, which differ in whose notes are right, and what is made of its rows."""

import json
from dataclasses import replace

import pytest

from benchmarks import claims, rule_change, rule_change_config
from benchmarks.rule_change_config import ChangedRule, SameRule, exchange
from composer_jax.demo.notes import MAX_TURNS, OneBug, note_path
from composer_jax.schema.run_config import run_config
from configs import tiny


def test_the_tasks_are_those_of_one_bug_with_more_messages():
    for index in range(20):
        mine, demo = SameRule().generate("heldout", 5, index), OneBug().generate("heldout", 5, index)
        named = replace(mine, id=demo.id, family=demo.family, max_turns=demo.max_turns)
        assert named == demo and mine.max_turns == MAX_TURNS[1] + 6


def test_after_the_change_another_person_says_what_was_right_and_nothing_else_differs():
    for index in range(20):
        old, new = SameRule().generate("heldout", 5, index), ChangedRule().generate("heldout", 5, index)
        (bug,), (changed,) = old.metadata["bugs"], new.metadata["bugs"]
        ann, bob, eve = (note_path(person, bug["function"]) for person in ("ann", "bob", "eve"))
        assert new.files == {**old.files, ann: old.files[bob], bob: old.files[ann]} != old.files
        assert changed["notes"] == {**bug["notes"], "ann": bug["notes"]["bob"], "bob": bug["notes"]["ann"]}
        assert bug["notes"]["ann"][1] == changed["notes"]["bob"][1] == bug["new"]
        assert changed["notes"]["eve"] == bug["notes"]["eve"] and eve in new.files
        assert exchange(new, "ann", "bob").files == old.files
        fields = {"id": old.id, "family": old.family, "files": old.files, "metadata": old.metadata}
        assert replace(new, **fields) == old


@pytest.mark.parametrize("size", [size for size in tiny.SIZES if size not in tiny.WITH_USERS])
def test_the_config_evaluates_both_rules_alike(size):
    config = run_config(rule_change_config.get_config(size))
    old, new = (config.evaluate.suites[family.FAMILY] for family in rule_change_config.FAMILIES)
    demo = run_config(tiny.get_config(size)).evaluate.suites["one_bug"]
    assert (old.tasks, old.attempts) == (new.tasks, new.attempts) == (demo.tasks, demo.attempts)
    assert (old.split, new.split, old.compaction, new.compaction) == ("heldout", "heldout", "none", "none")


def row(seed, variant, same, changed):
    suites = {"same_rule": same, "changed_rule": changed}
    return {
        "seed": seed,
        "variant": variant,
        "suites": {
            name: {"solved": {f"{name}-heldout-{seed}-{i}-ann": rate for i, rate in enumerate(rates)}}
            for name, rates in suites.items()
        },
    }


def rows(seed):
    return [
        row(seed, "sft", [0.5, 0.5], [0.5, 0.25]),
        row(seed, "rft", [1.0, 0.75], [0.0, 0.25]),
        row(seed, "rl", [1.0, 1.0], [0.75, 0.75]),
    ]


def test_losses_are_paired_by_task_and_half_of_that_of_imitation_is_the_bound():
    out = rule_change.summarize([*rows(0), *rows(1), row(2, "rl", [1.0, 1.0], [0.0, 0.0])])
    assert json.loads(json.dumps(out)) == out and out["seeds"] == [0, 1], "of seed 2 two policies are missing"
    assert out["sft"]["loss"][0] == 0.125 and out["rft"]["loss"][0] == 0.75 and out["rl"]["loss"][0] == 0.25
    assert out["rl"]["same_rule"] == [1.0, 1.0, 1.0] and out["rl"]["changed_rule"] == [0.75, 0.75, 0.75]
    # By task: 1.0 / 2 - 0.25 and 0.5 / 2 - 0.25.
    difference, low, high = out["half_of_sft_minus_rl"]
    assert difference == 0.125 and low == 0.0 and high == 0.25
    assert rule_change.summarize([]) == {"seeds": []}


def test_the_claim_reads_the_rows(tmp_path, capsys):
    (tmp_path / "rule_change.json").write_text(json.dumps([*rows(0), *rows(1)]))
    claims.main([f"--data={tmp_path}", f"--pictures={tmp_path / 'pictures'}"])
    claim = json.loads(capsys.readouterr().out)["rl_survives_a_rule_change"]
    assert claim == {"holds": False, "effect": 0.125, "low": 0.0, "high": 0.25, "seeds": [0, 1]}
    assert (tmp_path / "pictures" / "rl_survives_a_rule_change.png").stat().st_size > 5000
    claims.main([f"--data={tmp_path}", "--seeds=1"])
    assert json.loads(capsys.readouterr().out)["rl_survives_a_rule_change"] is None


def test_policies_are_those_of_the_controls(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(
        rule_change.Seed, "makers", {name: lambda name: tmp_path / name for name in ("sft", "rft", "rl")}
    )
    monkeypatch.setattr(rule_change, "run_pipeline", lambda *run, **fields: started.append((run, fields)))
    suite = {"pass_at_1": 0.5, "solved": {"x-0": 0.5}, "turns": 3.0}
    monkeypatch.setattr(rule_change, "final_suites", lambda _: {"same_rule": suite, "changed_rule": suite})
    rule_change.main(["--seeds=3", f"--workdir={tmp_path}"])
    assert json.loads(capsys.readouterr().out)["seeds"] == [3]
    assert [fields["base"] for _, fields in started] == [
        tmp_path / "sft" / "checkpoints" / "sft",
        tmp_path / "rft" / "checkpoints" / "rl",
        tmp_path / "rl" / "checkpoints" / "rl",
    ]
    assert all(fields["config"] == "benchmarks/rule_change_config.py" for _, fields in started)
    assert json.loads((tmp_path / "rule_change.json").read_bytes())[0]["variant"] == "sft"


def test_other_tasks_after_the_change_are_refused():
    made = rows(0)
    made[2]["suites"]["changed_rule"]["solved"] = {"changed_rule-heldout-0-9-ann": 1.0}
    with pytest.raises(rule_change.UserError, match="'rl' was measured on other tasks after the change"):
        rule_change.summarize(made)
