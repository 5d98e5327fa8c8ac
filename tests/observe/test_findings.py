import pytest

from composer_jax.observe import findings
from tests.observe.made_up_run import RESULTS


def test_headline_and_sentences_carry_the_numbers():
    assert findings.headline(RESULTS) == "Pass@1 on held-out bugs rose from 26% to 81%"
    assert findings.findings(RESULTS) == [
        "Pass@8 rose from 89% to 97%.",
        "On a family of bugs never trained on, pass@1 rose from 11% to 44%.",
        "On tasks that need summaries, the pass rate rose from 24% to 59%.",
        "What summarizing costs (compaction error) fell from 36 to 14 points.",
        "Summaries went from 61.4 to 23.1 tokens each.",
    ]


@pytest.mark.parametrize(
    ("results", "sentence"),
    [
        ({}, "This run has no results yet"),
        (
            {"cpt": {"heldout_nll_first": 6.93, "heldout_nll_last": 3.41}},
            "Held-out loss went from 6.93 to 3.41 nats per token; RL is not done yet",
        ),
        ({"rl": {"pass_at_1_before": 0.25}}, "Before RL, 25% of held-out bugs are fixed; RL is not done yet"),
        (
            {"rl": {"pass_at_1_before": 0.5, "pass_at_1_after": 0.31}},
            "Pass@1 on held-out bugs fell from 50% to 31%",
        ),
        (
            {"rl": {"pass_at_1_before": 0.501, "pass_at_1_after": 0.499}},
            "Pass@1 on held-out bugs stayed at 50%",
        ),
    ],
)
def test_the_headline_says_what_is_known_and_no_more(results, sentence):
    assert findings.headline(results) == sentence


def test_the_table_knows_that_a_smaller_error_is_better():
    rows = {row.name: row for _, section in findings.table(RESULTS) for row in section}
    assert (rows["Pass@1"].change, rows["Pass@1"].verdict) == ("+55.1 points", "better")
    assert (rows["Compaction error"].change, rows["Compaction error"].verdict) == (
        "\u221221.9 points",
        "better",
    )
    assert (rows["Summary tokens"].change, rows["Summary tokens"].verdict) == ("\u221262%", "better")
    assert (rows["Pass@1"].baseline, rows["Summary tokens"].baseline) == ("\u2013", "142.7")


def test_a_table_of_half_a_run_leaves_out_what_is_not_there():
    ((title, (row,)),) = findings.table({"rl": {"pass_at_8_before": 0.9}, "summary": None})
    assert title == "Bug fixing, held-out tasks"
    assert (row.name, row.before, row.after, row.change, row.verdict) == ("Pass@8", "90.0%", "\u2013", "", "")


def test_tasks_of_a_path_have_rows_and_marks_of_their_own():
    results = {"heldout": {"repository": {"pass_at_1_before": 0.25, "pass_at_1_after": 0.5}}}
    ((title, (row,)),) = findings.table(results)
    assert (title, row.name, row.change) == (findings.GIVEN, "Pass@1, repository", "+25.0 points")
    assert findings.marks(results)["repository"] == (0.25, 0.5)


def test_a_worse_number_is_called_worse():
    ((_, (row,)),) = findings.table({"summary": {"tokens_before": 20, "tokens_after": 30}})
    assert (row.change, row.verdict) == ("+50%", "worse")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, ""), (8.24, "8.2 s"), (59.97, "1 min 00 s"), (200, "3 min 20 s"), (3900, "1 h 05 min")],
)
def test_duration(seconds, words):
    assert findings.duration(seconds) == words


def test_phases_share_the_run():
    shown = findings.phases(RESULTS)
    assert [name for name, _, _ in shown][:2] == ["data", "pretrain"]
    assert sum(share for _, _, share in shown) == pytest.approx(100)
    assert findings.phases({"phases_s": None}) == []
