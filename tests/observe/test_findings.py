"""results.json in words: what was measured follows from the data, not from names of suites."""

import pytest

from composer_jax.observe import findings
from tests.observe.example_run import CONFIG, RESULTS, suite_measures

SUITES = findings.read_suites(RESULTS, CONFIG)


def only_suite(before, after=None, **config):
    results = {"suites": {"bugs": {"before": before} | ({"after": after} if after else {})}}
    return findings.read_suites(results, {"evaluate": {"suites": {"bugs": {"family": "bugfix"} | config}}})


def test_headline_and_sentences_carry_the_numbers():
    assert findings.headline(RESULTS, SUITES) == "Pass@1 of bugs rose from 26% to 81%"
    assert findings.sentences(SUITES) == [
        "Pass@8 of bugs rose from 89% to 97%.",
        "Pass@1 of short window rose from 24% to 59%.",
        "Compaction error of short window fell from 36 to 14 points.",
        "Summaries of short window went from 61.4 to 23.1 tokens each.",
        "Pass@1 of whole rose from 60% to 73%.",
        "Pass@1 of unseen bugs rose from 11% to 44%.",
    ]


def test_suites_that_ran_while_a_stage_trained_have_a_sentence_each():
    def row(step, name, rate):
        return {
            "step": step,
            f"pass_at_1_{name}": rate,
            f"low_{name}": rate - 0.1,
            f"high_{name}": rate + 0.1,
        }

    rows = [row(5, "two_bugs", 0.2), row(5, "chain", 0.5), row(10, "two_bugs", 0.45)]
    assert findings.training_sentences("RL", rows) == [
        "Pass@1 of two bugs rose from 20% to 45% between steps 5 and 10 of RL (95% interval 35 to 55).",
        "Pass@1 of chain is 50% after step 5 of RL (95% interval 40 to 60).",
    ]
    assert findings.training_sentences("SFT", []) == []


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
            "Held-out loss went from 6.93 to 3.41 nats per token; RL is not done yet",
        ),
        ({}, only_suite(suite_measures(4, 0.25, 0.5)), "Pass@1 of bugs is 25% before RL; RL is not done yet"),
        ({}, only_suite(suite_measures(4, 0.5, 1), suite_measures(4, 0.31, 1)), "Pass@1 of bugs fell from 50% to 31%"),
        ({}, only_suite(suite_measures(4, 0.501, 1), suite_measures(4, 0.499, 1)), "Pass@1 of bugs stayed at 50%"),
    ],
)
def test_the_headline_is_the_most_advanced_result(results, suites, sentence):
    assert findings.headline(results, suites) == sentence


@pytest.mark.parametrize("k", [2, 8])
def test_pass_at_k_has_the_k_that_was_drawn(k):
    suites = only_suite(suite_measures(k, 0.25, 0.5), suite_measures(k, 0.5, 0.75))
    ((_, rows),) = findings.result_tables(suites)
    assert [row.name for row in rows] == ["Pass@1", f"Pass@{k}"]
    assert findings.sentences(suites) == [f"Pass@{k} of bugs rose from 50% to 75%."]
    assert [label for label, *_ in findings.overview_scores(suites)] == ["bugs, pass@1", f"bugs, pass@{k}"]


def test_one_attempt_has_no_pass_at_k():
    ((_, rows),) = findings.result_tables(only_suite(suite_measures(1, 0.25, 0.25)))
    assert [row.name for row in rows] == ["Pass@1"]


def test_a_smaller_error_and_a_shorter_summary_are_better():
    tables = {title: {row.name: row for row in rows} for title, rows in findings.result_tables(SUITES)}
    bugs = tables["bugs: heldout tasks of bugfix"]
    assert (bugs["Pass@1"].change, bugs["Pass@1"].verdict) == ("+55.1 points", "better")
    short = tables["short window: heldout tasks of memory chain, compaction 'short'"]
    error = short["Compaction error"]
    assert (error.change, error.verdict) == ("\u221221.9 points", "better")
    assert error.meaning == "pass@1 of whole minus pass@1 here"
    assert (short["Summary tokens"].change, short["Summary tokens"].verdict) == ("\u221262%", "better")


def test_a_table_before_rl_has_no_change():
    ((title, (row, _)),) = findings.result_tables(only_suite(suite_measures(8, 0.9, 1.0), split="unseen"))
    assert title == "bugs: unseen tasks of bugfix"
    assert (row.name, row.before, row.after, row.change, row.verdict) == ("Pass@1", "90.0%", "\u2013", "", "")


def test_a_suite_of_tasks_from_disk_has_rows_and_marks():
    results = {
        "suites": {
            "heldout_repository": {"before": suite_measures(1, 0.25, 0.25), "after": suite_measures(1, 0.5, 0.5)}
        }
    }
    suites = findings.read_suites(results, CONFIG)
    ((title, (row,)),) = findings.result_tables(suites)
    assert (title, row.name, row.change) == (
        "heldout repository: heldout tasks of repository",
        "Pass@1",
        "+25.0 points",
    )
    assert findings.family_marks(suites) == {"repository": (0.25, 0.5)}


def test_a_familys_mark_is_its_first_heldout_suite():
    assert findings.family_marks(SUITES) == {"bugfix": (0.262, 0.813), "memory_chain": (0.245, 0.586)}


def test_more_tokens_are_worse():
    before, after = (suite_measures(1, 0.5, 0.5, tokens) for tokens in (20, 30))
    ((_, (_, row)),) = findings.result_tables(only_suite(before, after))
    assert (row.name, row.change, row.verdict) == ("Summary tokens", "+50%", "worse")


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
    assert [suite.name for suite in suites] == ["bugs"], "the pooled result of a policy is no suite"
    assert findings.headline({}, suites) == (
        "Pass@1 of bugs is 25% for the untouched base; no training stage is measured yet"
    )
    assert "The untouched base passes 25% of bugs." in findings.sentences(suites)
    assert findings.overview_scores(suites) == [("bugs, pass@1", 0.25, None, None)]


def test_a_table_with_a_base_has_its_numbers_and_intervals():
    measured = {
        "base": suite_measures(2, 0.0, 0.0) | {"low": 0.0, "high": 0.05},
        "before": suite_measures(2, 0.5, 0.6) | {"low": 0.4, "high": 0.625},
        "after": suite_measures(2, 0.75, 0.8) | {"low": 0.6, "high": 0.9},
    }
    ((_, rows),) = findings.result_tables(findings.read_suites({"suites": {"bugs": measured}}, {}))
    assert [(row.base, row.before, row.after) for row in rows] == [
        ("0.0% (0 to 5)", "50.0% (40 to 62)", "75.0% (60 to 90)"),
        ("0.0%", "60.0%", "80.0%"),
    ]
