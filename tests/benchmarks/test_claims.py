"""What benchmarks.claims makes of the rows of other benchmarks."""

import json

import pytest

from benchmarks import claims, length_normalisation
from benchmarks.claims import CLAIMS

SUITES = ("two_bugs", "chain", "chain_whole")
CONTROLS = (
    "sft",
    "sft_t05",
    "sft_greedy",
    "prompted_summaries",
    "rft",
    "rl",
    "rl_masked_summaries",
    "rl_other_summaries",
    "rl_random_advantages",
    "rl_price_0",
)


def rows(seeds=(0, 1), tasks=12, **rates):
    """Rows of all controls, in which every suite has the rate of its control (0.3 unless given) on every task."""

    def suites(rate):
        rate = rate if isinstance(rate, dict) else dict.fromkeys(SUITES, rate)
        return {name: {"solved": {f"{name[:5]}-{i}": rate[name] for i in range(tasks)}} for name in SUITES}

    return [
        {"seed": seed, "variant": name, "suites": suites(rates.get(name, 0.3))} for seed in seeds for name in CONTROLS
    ]


def run(tmp_path, capsys, controls, *arguments):
    (tmp_path / "controls.json").write_text(json.dumps(controls))
    claims.main([f"--data={tmp_path}", *arguments])
    return json.loads(capsys.readouterr().out)


def test_a_claim_holds_if_the_whole_interval_is_above_zero(tmp_path, capsys):
    out = run(tmp_path, capsys, rows(rl=0.8, rft=0.9, sft_greedy=0.5))
    assert out["rl_lifts_pass_at_1"] == {"holds": True, "effect": 0.3, "low": 0.3, "high": 0.3, "seeds": [0, 1]}
    assert out["rl_beats_rejection_sampling"]["holds"] is False
    assert out["rl_beats_rejection_sampling"]["effect"] == pytest.approx(-0.1)
    assert out["joint_beats_frozen"] is None, "there are no rows of the memory chain"
    assert list(out) == list(CLAIMS)


def test_a_difference_that_half_of_the_tasks_contradict_does_not_hold(tmp_path, capsys):
    made = rows(rl=0.5, rft=0.4)
    for row in made:
        if row["variant"] == "rft":
            row["suites"]["two_bugs"]["solved"] = {f"two_b-{i}": 1.0 if i % 2 else 0.0 for i in range(12)}
    out = run(tmp_path, capsys, made)["rl_beats_rejection_sampling"]
    assert out["low"] < 0 < out["high"] and not out["holds"]


def test_half_of_the_prompted_error_is_the_bound(tmp_path, capsys):
    def policy(error):
        return {"chain_whole": 0.9, "chain": 0.9 - error, "two_bugs": 0}

    for error, holds in ((0.1, True), (0.3, False)):
        out = run(tmp_path, capsys, rows(prompted_summaries=policy(0.4), rl_price_0=policy(error)))
        assert out["trained_summaries_halve_the_error"]["effect"] == pytest.approx(0.2 - error)
        assert out["trained_summaries_halve_the_error"]["holds"] is holds
        equal = out["trained_summaries_halve_the_error_at_equal_length"]
        assert equal["effect"] == pytest.approx(-error), "the policy before RL loses nothing to summaries here"


def test_one_seed_is_not_a_claim_and_other_tasks_are_refused(tmp_path, capsys):
    assert run(tmp_path, capsys, rows(seeds=(0,)))["rl_lifts_pass_at_1"] is None
    assert run(tmp_path, capsys, rows(), "--seeds=1")["rl_lifts_pass_at_1"] is None
    made = rows()
    for row in made:
        if row["variant"] == "rl":
            row["suites"]["two_bugs"]["solved"] = {"another": 1.0}
    (tmp_path / "controls.json").write_text(json.dumps(made))
    with pytest.raises(SystemExit):
        claims.main([f"--data={tmp_path}"])
    assert "'rl' and 'sft_greedy' were measured on other tasks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        claims.main([f"--data={tmp_path}/nothing"])
    assert "is not a folder" in capsys.readouterr().err


def test_every_measured_claim_has_a_picture(tmp_path, capsys):
    out = run(tmp_path, capsys, rows(rl=0.8), f"--pictures={tmp_path}/pictures")
    drawn = {path.stem for path in (tmp_path / "pictures").glob("*.png")}
    assert drawn == {name for name, claim in out.items() if claim} and drawn


def test_failures_feedback_and_the_ladder_are_read_from_their_own_files(tmp_path, capsys):
    def failing(seed, variant, tokens):
        suites = {name: {"solved": {}, "failed_tokens": {}} for name in length_normalisation.SUITES}
        suites["one_bug"] = {"solved": {"a": 0.5, "b": 0.5}, "failed_tokens": tokens}
        return {"seed": seed, "variant": variant, "suites": suites}

    def playing(seed, variant, rate):
        return {"seed": seed, "variant": variant, "suites": {"two_bugs": {"solved": {f"task-{seed}": rate}}}}

    files = {
        "length_normalisation": [
            *(failing(seed, "constant", {"a": 100.0, "b": 5.0}) for seed in (0, 1)),
            *(failing(seed, "by_length", {"a": 120.0}) for seed in (0, 1)),
        ],
        "ladder": [playing(seed, name, rate) for seed in (0, 1) for name, rate in (("fixed", 0.5), ("ladder", 0.25))],
        "feedback": [
            {"seed": seed, "variant": name, "malformed": [0.4, last]}
            for seed in (0, 1)
            for name, last in (("reward", 0.4), ("priced_reward", 0.0 + seed), ("feedback", 0.2))
        ],
    }
    files["router_replay"] = [
        {"seed": seed, "variant": size, "engines": {"bfloat16": {"without": {"p99": gap}, "replay": {"p99": 0.1}}}}
        for seed, size, gap in ((0, "large", 0.4), (1, "large", 0.3), (2, "small", 0.1))
    ]
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    out = run(tmp_path, capsys, rows())
    assert out["length_normalisation_lengthens_failures"] == {
        **{"holds": True, "effect": 20.0, "low": 20.0, "high": 20.0},
        "seeds": [0, 1],
    }
    assert (out["ladder_beats_fixed_mix"]["holds"], out["ladder_beats_fixed_mix"]["effect"]) == (False, -0.25)
    assert out["feedback_beats_the_reward"]["holds"] and out["feedback_beats_the_reward"]["effect"] == 0.1
    assert out["router_replay_halves_the_gap"] == {
        **{"holds": True, "effect": 0.075, "low": 0.05, "high": 0.1},
        "seeds": [0, 1],
    }
    price = out["feedback_beats_a_price"]
    assert not price["holds"] and price["low"] == -0.1 and price["high"] == 0.4 and price["effect"] == 0.15
