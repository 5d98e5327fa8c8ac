"""Judging the report of a suite: a report whose accounts disagree counts for nothing."""

import json

from composer_jax.tasks.suites import judge


def test_inconsistent_reports_are_refused():
    def event(**fields):
        return json.dumps({"secret": "s", **fields})

    def phase(test, when, outcome="passed"):
        return event(test=test, when=when, outcome=outcome, expected=False, part=False, ms=1, message="")

    names = ("a.py::test_a", "a.py::decoy")
    phases = [phase(names[0], when) for when in ("setup", "call", "teardown")]
    phases += [phase(names[1], "setup"), phase(names[1], "call", "failed"), phase(names[1], "teardown")]
    lines = [event(collected=names, decoys=names[1:]), *phases, event(ended=1, changed=[])]
    good = {"exit": 1, "lines": lines, "junit": {"passed": [0], "tests": 2}, "rewritten": [], "log": ""}

    def problem(**fields):
        report = {**good, **fields}
        events, foreign = judge.parse_events(report, "s")
        return judge.find_problem(report, events, foreign, judge.collect_outcomes(events))

    assert problem() is None
    assert "its process with 0" in problem(exit=0)
    assert "exit status 0 does not go with" in problem(exit=0, lines=[*lines[:-1], event(ended=0, changed=[])])
    assert "did not come to its end" in problem(lines=lines[:-1])
    assert "no JUnit report" in problem(junit={"error": "ParseError"})
    assert "other tests as passed" in problem(junit={"passed": [0, 1], "tests": 2})
    assert "something else wrote" in problem(lines=[*lines, "forged"])
    assert "something else wrote" in problem(lines=[*lines, json.dumps({"secret": "t", "ended": 1})])
    assert "functions of the test framework" in problem(lines=[*lines[:-1], event(ended=1, changed=["pytest.raises"])])
    assert "were rewritten (a.py)" in problem(rewritten=["a.py"])
    lucky = [line.replace("failed", "passed") for line in lines]
    assert "cannot pass" in problem(lines=[*lucky[:-1], event(ended=0, changed=[])], exit=0, junit={"passed": [0, 1]})
    twice = [*lines[:4], *lines[1:4], *lines[4:]]
    events, _ = judge.parse_events({"lines": twice}, "s")
    assert judge.collect_outcomes(events)[names[0]][0] == judge.DUPLICATE
    assert judge.unpack_report("no report") is None
    assert judge.judge_report("", "s")["problem"] == "there is no report"
