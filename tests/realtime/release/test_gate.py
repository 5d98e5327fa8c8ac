"""The gate on two stored evaluations: verdicts, bands, and sentences."""

import json

import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.realtime.release.gate import GateRules, compare_monitor, gate, read_evaluation

MEASURES = {
    "attempts": 2,
    "attempted": 0.8,
    "turns": 10.0,
    "calls_per_turn": 1.2,
    "sampled_tokens": 900.0,
    "summaries": 0.0,
}


def evaluation(seed: int = 0, *, tasks: int = 900, fall: float = 0.0, **measures) -> dict:
    """Suites of shares of two attempts; `fall` is subtracted from the chance of every task."""
    suites = {}
    for name in ("bugs", "features"):
        chance = np.random.default_rng(len(name)).uniform(0.5, 0.9, tasks)
        solved = np.random.default_rng([seed, len(name)]).binomial(2, chance - fall) / 2
        suites[name] = MEASURES | measures | {"solved": {f"{name}-{i}": float(share) for i, share in enumerate(solved)}}
    return suites


def test_equal_weights_pass_with_a_table_that_is_json():
    result = gate(evaluation(1), evaluation(2), GateRules(margin=0.06))
    assert result["verdict"] == "pass" and result["reasons"] == []
    assert json.loads(json.dumps(result)) == result
    joint = result["joint"]
    assert joint["level"] == 0.05 and joint["power"] == 0.9 and 0 < joint["promised_margin"] <= 0.06
    assert joint["power_per_suite"] == pytest.approx(0.9**0.5)
    assert len(result["suites"]["bugs"]["differences"]) == 900


def test_one_suite_that_falls_fails_the_candidate():
    candidate = evaluation(2) | {"bugs": evaluation(2, fall=0.12)["bugs"]}
    result = gate(evaluation(1), candidate, GateRules(margin=0.06))
    assert (
        result["verdict"] == "fail"
        and not result["suites"]["bugs"]["passed"]
        and result["suites"]["features"]["passed"]
    )
    assert len(result["reasons"]) == 1 and "bugs" in result["reasons"][0]


@pytest.mark.parametrize(
    ("turns", "verdict"), [(11.4, "pass"), (8.6, "pass"), (11.6, "hold"), (7.5, "hold"), (13.1, "fail")]
)
def test_a_monitor_that_leaves_its_band(turns, verdict):
    result = gate(evaluation(1), evaluation(1, turns=turns), GateRules(margin=0.06))
    assert result["verdict"] == verdict and len(result["reasons"]) == (0 if verdict == "pass" else 2)


def test_a_monitor_of_zero_has_no_band():
    assert compare_monitor(0.0, 0.0)["verdict"] == compare_monitor(None, None)["verdict"] == "pass"
    assert compare_monitor(0.0, 0.1)["verdict"] == compare_monitor(0.1, None)["verdict"] == "hold"


def test_too_few_tasks_are_refused_with_the_margin_that_they_can_promise():
    few = GateRules(margin=0.03)
    with pytest.raises(UserError, match=r"has 150 tasks.* can promise a margin of 0\.\d+, not 0.03") as error:
        gate(evaluation(1, tasks=150), evaluation(2, tasks=150), few)
    promised = float(str(error.value).rpartition("--margin=")[2].rstrip("."))
    assert gate(evaluation(1, tasks=150), evaluation(2, tasks=150), GateRules(margin=promised))["suites"]


def test_a_candidate_that_passes_needs_no_promise():
    suites = evaluation(1, tasks=700)
    better = evaluation(2, tasks=700, fall=-0.08)
    result = gate(suites, better, GateRules(margin=0.03))
    assert result["verdict"] == "pass" and result["joint"]["promised_margin"] > 0.03


def test_very_few_tasks_are_refused_even_if_none_differs():
    suites = evaluation(1, tasks=95)
    with pytest.raises(UserError, match="has 95 tasks"):
        gate(suites, suites, GateRules(margin=0.03))
    assert gate(suites, suites, GateRules(margin=0.032))["verdict"] == "pass"


def drop_tasks(suites, count):
    suites["bugs"]["solved"] = dict(list(suites["bugs"]["solved"].items())[count:])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda e: e.pop("bugs"), "the anchor was evaluated on bugs, features and the candidate on features"),
        (lambda e: e["bugs"].update(attempts=4), "2 attempts of the anchor and 4"),
        (lambda e: drop_tasks(e, 100), "100 tasks that only one evaluation has"),
    ],
)
def test_evaluations_that_do_not_belong_together(change, sentence):
    candidate = evaluation(2)
    change(candidate)
    with pytest.raises(UserError, match=sentence):
        gate(evaluation(1), candidate, GateRules(margin=0.06))


def test_a_task_that_only_the_candidate_lacks_is_not_solved():
    anchor, candidate = evaluation(1), evaluation(1)
    drop_tasks(candidate, 40)
    row = gate(anchor, candidate, GateRules(margin=0.06))["suites"]["bugs"]
    lost = list(anchor["bugs"]["solved"].values())[:40]
    assert (row["unpaired"], row["tasks"]) == (40, 900) and row["mean"] == pytest.approx(-sum(lost) / 900)
    drop_tasks(anchor, 45)
    row = gate(anchor, candidate, GateRules(margin=0.06))["suites"]["bugs"]
    assert (row["unpaired"], row["tasks"], row["mean"]) == (5, 855, 0.0)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"suites": {"a": {"solved": {}}}}', '{"suites": {"a": {"solved": {"x": 2}}}}']
)
def test_a_file_that_is_no_evaluation(tmp_path, content):
    (tmp_path / "e.json").write_text(content)
    with pytest.raises(UserError, match="evaluate_WHICH.json"):
        read_evaluation(tmp_path / "e.json")


def test_rules_out_of_range():
    with pytest.raises(UserError, match="margin=0.0"):
        GateRules(margin=0.0)
