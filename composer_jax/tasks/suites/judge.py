"""Judges the report of pytest_runner.py, outside the sandbox of the tests: the outcome of every test.

Standard library only: this file runs in this process and in the container of an exported task.

A report counts only if all of this holds: pytest finished and its exit status agrees with the outcomes of the tests;
the plugin's events (sent through the pipe, each line with the secret) and the JUnit XML name the same tests without a
failure, each test once and with as many skips; the decoys, which cannot pass, did not pass; no test file and no
function of pytest or unittest was replaced.

COUNTS_AS_PASSED is the one table of what counts as passed, for this grader and for that of logs (grading/log.py).

Known limits: tests and tested code share one process. Code written against this file can read the plugin's secret from
memory, spare the decoys and forge events; code can return objects that equal everything, or read the expected value
from the frame of the test that calls it. The decoys catch code that makes every test pass; hack_monitor.py and people
must catch the rest.
"""

import base64
import binascii
import json
import zlib

PASSED, FAILED, ERROR, SKIPPED, MISSING, DUPLICATE = "passed", "failed", "error", "skipped", "missing", "reported twice"
XFAILED, XPASSED = "failed as expected", "passed against expectation"
ENDED_BY_CODE = "ended by the code under test"
COUNTS_AS_PASSED = {"fail_to_pass": (PASSED, XFAILED), "pass_to_pass": (PASSED, XFAILED, SKIPPED)}
"""Group of tests -> the outcomes with which a test of it counts as passed. They are those of SWE-bench's harness
(swebench/harness/grading.py): test_passed takes PASSED and XFAIL, and test_failed does not count SKIPPED. A
fail-to-pass test must run. A skip or an expected failure counts only if the tests declare it: the code under test can
raise the same exceptions, and add marks."""
LIMIT_PROBLEMS = {"timeout": "the time is over", "out_of_memory": "out of memory", "output_limit": "too much output"}


def unpack_report(stdout):
    """Returns the report in the last line of the output, or None without one."""
    try:
        return json.loads(zlib.decompress(base64.b64decode(stdout.strip().rpartition("\n")[2], validate=True)))
    except (ValueError, binascii.Error, zlib.error):
        return None


def parse_events(report, secret):
    """Returns the events that our plugin sent, and whether something else wrote to the pipe."""
    events, foreign = [], False
    for line in report["lines"]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and event.pop("secret", None) == secret:
            events.append(event)
        else:
            foreign = True
    return events, foreign


def collect_outcomes(events, is_protected, declared=None):
    """Returns test id -> (outcome, milliseconds, message) of real tests and decoys, in the order of collection.

    is_protected: that of protected.py; it tells the files of tests from those of the code. declared: test file -> the
    marks that it mentions (pytest_runner.py: declarations); None and files without an entry may declare any.
    """
    collected = next((event["collected"] for event in events if "collected" in event), [])
    phases = {}
    for event in events:
        if "test" in event:
            phases.setdefault(event["test"], []).append(event)
    results = {}
    for test in collected:
        if test in results:
            results[test] = (DUPLICATE, 0, "two tests have this name")
        else:
            results[test] = _outcome(test, phases.get(test, []), is_protected, declared or {})
    return results


def _is_declared(test, mark, declared):
    """Whether the file of a test mentions a mark ("xfail" or "skip") where it can be one of the test."""
    file, _, names = test.partition("::")
    entry, function = declared.get(file), names.partition("[")[0].rpartition("::")[2]
    if entry is None or function not in entry["functions"]:  # such as a test that a class inherits
        return True
    return entry[mark] is True or function in entry[mark]


def _outcome(test, phases, is_protected, declared):
    """Returns the outcome of one test from the events of its phases and of its subtests.

    A skipped subtest leaves the outcome of its test as it is, as in pytest.
    """
    whole = [event for event in phases if not event["part"]]
    ms = sum(event["ms"] for event in whole)
    names = [event["when"] for event in whole]
    if len(set(names)) < len(names):
        return DUPLICATE, ms, "a phase was reported twice"
    for event in phases:
        if event["outcome"] == "failed":
            return FAILED if event["when"] == "call" else ERROR, ms, event["message"]
    for event in phases:
        if code := [path for path in event["through"] if not is_protected(path)]:
            return ENDED_BY_CODE, ms, f"{code[-1]} raised the exception that ends a test: {event['message']}"
        mark = "xfail" if event["expected"] else "skip"
        if event["outcome"] == "skipped" and not _is_declared(test, mark, declared):
            return ENDED_BY_CODE, ms, f"its file has no such mark: {event['message']}"
    if names not in (["setup", "call", "teardown"], ["setup", "teardown"]):
        return MISSING, ms, f"reported only {', '.join(names) or 'nothing'}"
    expected = any(event["expected"] for event in whole)
    for event in whole:
        if event["outcome"] == "skipped":
            return (XFAILED if expected else SKIPPED), ms, event["message"]
    if "call" not in names:
        return MISSING, ms, "it was set up and not called"
    return (XPASSED if expected else PASSED), ms, ""


def count_skips(events):
    """Returns test id -> number of its skipped phases and subtests; JUnit XML has an element for each."""
    skips = {}
    for event in events:
        if "test" in event:
            skips[event["test"]] = skips.get(event["test"], 0) + (event["outcome"] == "skipped")
    return skips


def find_problem(report, events, foreign, results):
    """Returns the reason why no result of this report counts, as a clause, or None."""
    ended = [event for event in events if "ended" in event]
    decoys = next((event["decoys"] for event in events if "decoys" in event), [])
    skips = count_skips(events)
    unbroken = (PASSED, XPASSED, SKIPPED, XFAILED, ENDED_BY_CODE)  # pytest ends with 0 after these alone
    clean = {str(n): skips[test] for n, (test, result) in enumerate(results.items()) if result[0] in unbroken}
    broken = len(clean) < len(results)
    broken = broken or any("uncollected" in event for event in events)
    junit = report["junit"]
    if foreign or len(ended) > 1 or sum("collected" in event for event in events) > 1:
        return "something else wrote to the report"
    if not ended:
        return f"pytest did not come to its end (exit status {report['exit']})"
    if not results:
        return "no test was collected"
    if ended[0]["ended"] != report["exit"]:
        return f"pytest ended with {ended[0]['ended']} and its process with {report['exit']}"
    if report["exit"] != int(broken):
        return f"exit status {report['exit']} does not go with the results of the tests"
    if "error" in junit:
        return f"there is no JUnit report ({junit['error']})"
    if junit["clean"] != clean:
        return "the JUnit report names other tests without a failure than the plugin, or other skips"
    if any(results[decoy][0] in (PASSED, XPASSED) for decoy in decoys):
        return "a test passed that cannot pass"
    if ended[0]["changed"]:
        return f"functions of the test framework were replaced ({', '.join(ended[0]['changed'][:3])})"
    if report["rewritten"]:
        return f"test files were rewritten ({', '.join(report['rewritten'][:3])})"
    return None


def judge_report(stdout, secret, is_protected, outcome="ok"):
    """Returns {"tests": id -> [outcome, ms, message], "uncollected": file -> message, "traced": id -> calls, "problem":
    str or None, "log": str}.

    is_protected: that of protected.py. outcome: how the run itself ended (RunResult.outcome).
    """
    empty = {"tests": {}, "uncollected": {}, "traced": {}}
    if outcome in LIMIT_PROBLEMS:
        return {**empty, "problem": LIMIT_PROBLEMS[outcome], "log": ""}
    report = unpack_report(stdout)
    if report is None:
        return {**empty, "problem": "there is no report", "log": stdout[-2000:]}
    events, foreign = parse_events(report, secret)
    results = collect_outcomes(events, is_protected, report["declared"])
    decoys = {name for event in events for name in event.get("decoys", ())}
    return {
        "tests": {test: list(result) for test, result in results.items() if test not in decoys},
        "uncollected": {event["uncollected"]: event["message"] for event in events if "uncollected" in event},
        "problem": find_problem(report, events, foreign, results),
        "log": report["log"],
        "traced": {event["traced"]: event["calls"] for event in events if "traced" in event},
    }


def is_truncated(test):
    """Whether a data set cut the id of a parametrized test at white space, so that its bracket is not closed."""
    return "[" in test and (not test.endswith("]") or test.count("[") > test.count("]"))


def outcome_of(outcomes, test, missing=MISSING):
    """Returns the outcome of a test in test id -> outcome, or `missing`; for a truncated id the worst of its tests."""
    found = _outcomes_of(outcomes, test) or {missing}
    bad = (found - set(passed) for passed in sorted(COUNTS_AS_PASSED.values(), key=len, reverse=True))
    return min(next(filter(None, bad), found))


def _outcomes_of(outcomes, test):
    """Returns the outcomes of a test: of all whose ids begin so for a truncated id that no test has."""
    if test in outcomes:
        return {outcomes[test]}
    return {outcome for name, outcome in outcomes.items() if name.startswith(test)} if is_truncated(test) else set()


def find_failed(outcomes, tests, group, missing=MISSING):
    """Returns those of the tests that do not count as passed. group: a key of COUNTS_AS_PASSED."""
    passed = set(COUNTS_AS_PASSED[group])
    return [test for test in tests if not (_outcomes_of(outcomes, test) or {missing}) <= passed]


def passed_fraction(tests, failed):
    return 1 - len(failed) / len(tests) if tests else 1.0


def summarize(judged, fail_to_pass, pass_to_pass):
    """Returns (fraction of fail_to_pass that passed, fraction of pass_to_pass, one line for people)."""
    if judged["problem"]:
        return 0.0, 0.0, judged["problem"]
    outcomes = {test: result[0] for test, result in judged["tests"].items()}
    unrepaired = find_failed(outcomes, fail_to_pass, "fail_to_pass")
    broken = find_failed(outcomes, pass_to_pass, "pass_to_pass")
    line = f"{len(fail_to_pass) - len(unrepaired)} of {len(fail_to_pass)} failing tests repaired, "
    line += f"{len(pass_to_pass) - len(broken)} of {len(pass_to_pass)} passing tests kept"
    if unrepaired or broken:
        first = (broken or unrepaired)[0]
        message = judged["tests"].get(first, (MISSING, 0, "it was not collected"))[2]
        line += f"; first: {first} {outcome_of(outcomes, first)}: {' '.join(message.split())[:160]}"
    return passed_fraction(fail_to_pass, unrepaired), passed_fraction(pass_to_pass, broken), line


def compute_reward(repaired, kept, partial):
    """Returns 1 if every test passed, else 0. partial: the fraction of repaired tests, if all others still pass."""
    if kept < 1.0:
        return 0.0
    return repaired if partial else float(repaired == 1.0)
