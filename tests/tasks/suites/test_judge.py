"""Judging the report of a suite: a report whose accounts disagree counts for nothing, and what counts as passed."""

import json

import pytest

from composer_jax.tasks.suites import judge
from composer_jax.tasks.suites.protected import is_protected


def test_inconsistent_reports_are_refused():
    def event(**fields):
        return json.dumps({"secret": "s", **fields})

    def phase(test, when, outcome="passed"):
        return event(test=test, when=when, outcome=outcome, expected=False, part=False, ms=1, message="", through=[])

    names = ("a.py::test_a", "a.py::decoy")
    phases = [phase(names[0], when) for when in ("setup", "call", "teardown")]
    phases += [phase(names[1], "setup"), phase(names[1], "call", "failed"), phase(names[1], "teardown")]
    lines = [event(collected=names, decoys=names[1:]), *phases, event(ended=1, changed=[])]
    good = {"exit": 1, "lines": lines, "junit": {"clean": {"0": 0}}, "rewritten": [], "log": ""}

    def problem(**fields):
        report = {**good, **fields}
        events, foreign = judge.parse_events(report, "s")
        return judge.find_problem(report, events, foreign, judge.collect_outcomes(events, is_protected))

    assert problem() is None
    assert "its process with 0" in problem(exit=0)
    assert "exit status 0 does not go with" in problem(exit=0, lines=[*lines[:-1], event(ended=0, changed=[])])
    assert "did not come to its end" in problem(lines=lines[:-1])
    assert "no JUnit report" in problem(junit={"error": "ParseError"})
    for clean in ({}, {"0": 0, "1": 0}, {"0": 1}):
        assert "other tests without a failure than the plugin, or other skips" in problem(junit={"clean": clean})
    assert "something else wrote" in problem(lines=[*lines, "forged"])
    assert "something else wrote" in problem(lines=[*lines, json.dumps({"secret": "t", "ended": 1})])
    assert "functions of the test framework" in problem(lines=[*lines[:-1], event(ended=1, changed=["pytest.raises"])])
    assert "were rewritten (a.py)" in problem(rewritten=["a.py"])
    lucky = [line.replace("failed", "passed") for line in lines]
    assert "cannot pass" in problem(
        lines=[*lucky[:-1], event(ended=0, changed=[])], exit=0, junit={"clean": {"0": 0, "1": 0}}
    )
    twice = [*lines[:4], *lines[1:4], *lines[4:]]
    events, _ = judge.parse_events({"lines": twice}, "s")
    assert judge.collect_outcomes(events, is_protected)[names[0]][0] == judge.DUPLICATE
    assert judge.unpack_report("no report") is None
    assert judge.judge_report("", "s", is_protected)["problem"] == "there is no report"


def test_what_counts_as_passed():
    outcomes = {name: name for name in (judge.PASSED, judge.XFAILED, judge.SKIPPED, judge.XPASSED, judge.FAILED)}
    outcomes[judge.ENDED_BY_CODE] = judge.ENDED_BY_CODE
    tests = [*outcomes, "not collected"]
    passed = lambda group: set(tests) - set(judge.find_failed(outcomes, tests, group))  # noqa: E731
    assert passed("fail_to_pass") == {judge.PASSED, judge.XFAILED}
    assert passed("pass_to_pass") == {judge.PASSED, judge.XFAILED, judge.SKIPPED}
    assert judge.find_failed({}, ["a"], "fail_to_pass", missing=judge.PASSED) == []
    mixed = {"t[a b]": judge.PASSED, "t[a c]": judge.SKIPPED, "t[b c]": judge.FAILED}
    assert judge.find_failed(mixed, ["t[a"], "pass_to_pass") == []
    assert judge.find_failed(mixed, ["t[a", "t["], "fail_to_pass") == ["t[a", "t["]
    assert [judge.outcome_of(mixed, test) for test in ("t[a", "t[")] == [judge.SKIPPED, judge.FAILED]


@pytest.mark.parametrize(
    ("test", "stands_for"),
    [
        ("t[3-log(photon", {"t[3-log(photon / s)]", "t[3-log(photon * m)]"}),
        ("t[5-mag(ct/s)", {"t[5-mag(ct/s) [x]]"}),
        ("t[a[0]", {"t[a[0] b]"}),
        ("t[a]b", {"t[a]b c]"}),
        ("t[[]", {"t[[]"}),
        ("t[x]", set()),
        ("t", set()),
    ],
)
def test_a_truncated_id_stands_for_the_tests_that_begin_so(test, stands_for):
    names = (
        "t[3-log(photon / s)]",
        "t[3-log(photon * m)]",
        "t[5-mag(ct/s) [x]]",
        "t[a[0] b]",
        "t[a]b c]",
        "t[[]",
        "t[[]]",
    )
    for name in names:
        outcomes = {other: judge.PASSED if other != name else judge.FAILED for other in names}
        want = judge.MISSING if not stands_for else judge.FAILED if name in stands_for else judge.PASSED
        assert judge.outcome_of(outcomes, test) == want
