"""results.json in words: what was measured follows from the data, not from names of suites."""

import pytest

from composer_jax.observe import findings
from tests.observe.example_run import CONFIG, RESULTS, change, suite_measures

SUITES = findings.read_suites(RESULTS, CONFIG)


TITLES = {"before": "Before RL", "after": "After RL"}


def only_suite(before, after=None, changed=None, **config):
    measured = {"before": before, "after": after, "change": changed}
    results = {"suites": {"bugs": {key: value for key, value in measured.items() if value}}}
    return findings.read_suites(results, {"evaluate": {"suites": {"bugs": {"family": "bugfix"} | config}}})


def test_a_report_opens_with_what_became_worse():
    table = findings.suite_table(SUITES, TITLES)
    assert table.columns == ("Before RL", "After RL")
    assert [(row.name, *row.values, row.change, row.verdict) for row in table.rows] == [
        ("unseen bugs", "43.8%", "10.9%", "\u221232.9 (\u221245.0 to \u221220.0)", "worse"),
        ("bugs", "26.2%", "81.3%", "+55.1 (+44.0 to +65.0)", "better"),
        ("short window", "24.5%", "58.6%", "+34.1 (+20.0 to +48.0)", "better"),
        ("whole", "60.5%", "72.7%", "+12.2 (\u22122.0 to +26.4)", "not shown to differ"),
    ]
    assert table.rows[0].meaning == "32 unseen tasks"
    assert findings.headline(RESULTS, SUITES, TITLES) == (
        "After RL: 1 of 4 suites worse, 2 better, 1 not shown to differ"
    )


@pytest.mark.parametrize(
    ("low", "high", "tasks", "verdict"),
    [
        (0.01, 0.9, 32, "better"),
        (0.0, 0.9, 32, "not shown to differ"),
        (-0.9, 0.0, 32, "not shown to differ"),
        (-0.9, -0.01, 32, "worse"),
        (1.0, 1.0, 6, "better"),
        (1.0, 1.0, 5, "not shown to differ"),  # five equal signs come by chance once in 16 times
    ],
)
def test_the_interval_and_the_number_of_tasks_decide(low, high, tasks, verdict):
    assert findings.verdict(change(0.5, low, high, tasks=tasks)) == verdict


def test_the_policies_of_a_table_are_those_that_were_evaluated():
    once = only_suite(suite_measures(4, 0.25, 0.5))
    assert findings.policy_titles(once, {}) == {"before": "Before RL"}
    trained = findings.policy_titles(once, {"stages": ["sft"]})
    assert trained == {"before": "Trained"}
    table = findings.suite_table(once, trained)
    assert (table.columns, table.rows[0].values, table.rows[0].verdict) == (("Trained",), ("25.0%",), "")
    assert findings.policy_titles([], {}) == {}


def test_controls_are_compared_with_the_final_policy():
    greedy = {"pass_at_1": 0.5, "rl_minus": change(0.25, 0.1, 0.4)}
    results = {
        "suites": {"bugs": {"after": suite_measures(1, 0.75, 0.75), "greedy": greedy}, "rft": {"pass_at_1": 0.8}},
        "controls": {"rft": change(-0.05, -0.1, 0.0, tasks=64)},
    }
    (table,) = findings.control_tables(results, findings.read_suites(results, {}))
    assert [(row.name, row.meaning, *row.values, row.verdict) for row in table.rows] == [
        ("greedy sampling before RL: bugs", "32 tasks", "50.0%", "better"),
        ("rft", "64 tasks", "80.0%", "not shown to differ"),
    ]
    assert findings.control_tables(RESULTS, SUITES) == []


def test_the_picture_has_the_interval_of_the_change_where_it_lies():
    changed = change(0.75, 0.6, 0.9)
    (score,) = findings.pass_at_1_scores(only_suite(suite_measures(1, 0.2, 0.2), suite_measures(1, 0.95, 1), changed))
    assert score == ("bugs", None, 0.2, 0.95, pytest.approx(0.8), 1.0), "cut at 1"
    (score,) = findings.pass_at_1_scores(only_suite(suite_measures(1, 0.2, 0.2)))
    assert score == ("bugs", None, 0.2, None, None, None)


def test_the_headline_suites_of_the_config_come_first():
    assert [suite.name for suite in SUITES] == ["bugs", "short_window", "whole", "unseen_bugs"]
    assert [suite.name for suite in findings.read_suites(RESULTS, {})] == [
        "whole",
        "bugs",
        "unseen_bugs",
        "short_window",
    ]


@pytest.mark.parametrize(
    ("results", "suites", "sentence"),
    [
        ({}, [], "This run has no results yet"),
        (
            {"cpt": {"heldout_nll_first": 6.93, "heldout_nll_last": 3.41}},
            [],
            "Held-out loss went from 6.93 to 3.41 nats per token; no suite is measured yet",
        ),
        (
            {},
            only_suite(suite_measures(4, 0.25, 0.5)),
            "Before RL: 1 suite measured, none compared",
        ),
        (
            {},
            only_suite(suite_measures(4, 0.5, 1), suite_measures(4, 0.3, 1), change(-0.2, -0.3, -0.1)),
            "After RL: 1 of 1 suite worse",
        ),
    ],
)
def test_the_headline_is_the_most_advanced_result(results, suites, sentence):
    assert findings.headline(results, suites, findings.policy_titles(suites, {})) == sentence


@pytest.mark.parametrize("k", [2, 8])
def test_pass_at_k_has_the_k_that_was_drawn(k):
    suites = only_suite(suite_measures(k, 0.25, 0.5), suite_measures(k, 0.5, 0.75))
    (table,) = findings.result_tables(suites, TITLES)
    assert [row.name for row in table.rows] == ["Pass@1", f"Pass@{k}"]
    assert [score.label for score in findings.overview_scores(suites)] == ["bugs, pass@1", f"bugs, pass@{k}"]


def test_one_attempt_has_no_pass_at_k():
    (table,) = findings.result_tables(only_suite(suite_measures(1, 0.25, 0.25)), TITLES)
    assert [row.name for row in table.rows] == ["Pass@1"]


def test_a_table_has_changes_and_no_verdict_without_an_interval():
    tables = {table.title: {row.name: row for row in table.rows} for table in findings.result_tables(SUITES, TITLES)}
    assert tables["bugs: heldout tasks of bugfix"]["Pass@1"].change == "+55.1 points"
    short = tables["short window: heldout tasks of memory chain, compaction 'short'"]
    error = short["Compaction error"]
    assert (error.change, error.meaning) == ("\u221221.9 points", "pass@1 of whole minus pass@1 here")
    assert short["Summary tokens"].change == "\u221262%"
    assert {row.verdict for rows in tables.values() for row in rows.values()} == {""}


def test_a_table_before_rl_has_no_change():
    suites = only_suite(suite_measures(8, 0.9, 1.0), split="unseen")
    (table,) = findings.result_tables(suites, findings.policy_titles(suites, {}))
    row = table.rows[0]
    assert table.title == "bugs: unseen tasks of bugfix"
    assert (row.name, row.values, row.change) == ("Pass@1", ("90.0%",), "")


def test_a_suite_of_tasks_from_disk_has_rows_and_marks():
    results = {
        "suites": {
            "heldout_repository": {"before": suite_measures(1, 0.25, 0.25), "after": suite_measures(1, 0.5, 0.5)}
        }
    }
    suites = findings.read_suites(results, CONFIG)
    (table,) = findings.result_tables(suites, TITLES)
    assert table.title == "heldout repository: heldout tasks of repository"
    assert [(row.name, row.change) for row in table.rows] == [("Pass@1", "+25.0 points")]
    assert findings.family_marks(suites) == {"repository": (0.25, 0.5)}


def test_a_familys_mark_is_its_first_heldout_suite():
    assert findings.family_marks(SUITES) == {"bugfix": (0.262, 0.813), "memory_chain": (0.245, 0.586)}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (8.24, "8.2 s"), (59.97, "1 min 00 s"), (200, "3 min 20 s"), (3900, "1 h 05 min")],
)
def test_durations(seconds, text):
    assert findings.format_duration(seconds) == text


def test_phases_add_up_to_the_run():
    phases = findings.phase_fractions(RESULTS)
    assert [name for name, _, _ in phases][:2] == ["data", "pretrain"]
    assert sum(percent for _, _, percent in phases) == pytest.approx(100)
    assert findings.phase_fractions({"phases_s": None}) == []


def test_a_run_with_a_base_says_what_the_base_passes():
    measured = {"bugs": {"base": {"pass_at_1": 0.25, "attempts": 2}}, "base": {"pass_at_1": 0.25, "low": 0.1}}
    suites = findings.read_suites({"suites": measured}, {})
    assert [suite.name for suite in suites] == ["bugs"], "the pooled result of a policy is not a suite"
    titles = findings.policy_titles(suites, {})
    assert findings.headline({}, suites, titles) == "Base: 1 suite measured, none compared"
    assert [row.values for table in findings.result_tables(suites, titles) for row in table.rows] == [("25.0%",)]
    assert findings.overview_scores(suites) == [("bugs, pass@1", 0.25, None, None, None, None)]


def test_a_table_with_a_base_has_its_numbers_and_intervals():
    measured = {
        "base": suite_measures(2, 0.0, 0.0) | {"low": 0.0, "high": 0.05},
        "before": suite_measures(2, 0.5, 0.6) | {"low": 0.4, "high": 0.625},
        "after": suite_measures(2, 0.75, 0.8) | {"low": 0.6, "high": 0.9},
    }
    suites = findings.read_suites({"suites": {"bugs": measured}}, {})
    (table,) = findings.result_tables(suites, findings.policy_titles(suites, {}))
    assert table.columns == ("Base", "Before RL", "After RL")
    assert [(row.values, row.change) for row in table.rows] == [
        (("0.0% (0 to 5)", "50.0% (40 to 62)", "75.0% (60 to 90)"), "+25.0 points"),
        (("0.0%", "60.0%", "80.0%"), "+20.0 points"),
    ]
