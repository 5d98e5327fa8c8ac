"""Judges the report of pytest_runner.py, outside the sandbox of the tests: the outcome of every test.

Standard library only: this file runs in this process and in the container of an exported task.

A report counts only if all of this holds: pytest finished and its exit status agrees with the outcomes of the tests;
the plugin's events (sent through the pipe, each line with the secret) and the JUnit XML name the same passed tests,
each test once; the decoys, which cannot pass, did not pass; no test file and no function of pytest or unittest was
replaced.

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
XPASSED = "passed against expectation"
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


def collect_outcomes(events):
    """Returns test id -> (outcome, milliseconds, message) of real tests and decoys, in the order of collection."""
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
            results[test] = _outcome(phases.get(test, []))
    return results


def _outcome(phases):
    """Returns the outcome of one test from the events of its phases."""
    parts = [event for event in phases if event["part"]]
    whole = [event for event in phases if not event["part"]]
    ms = sum(event["ms"] for event in whole)
    names = [event["when"] for event in whole]
    if len(set(names)) < len(names):
        return DUPLICATE, ms, "a phase was reported twice"
    for event in (*parts, *whole):
        if event["outcome"] == "failed":
            return FAILED if event["when"] == "call" else ERROR, ms, event["message"]
    for event in whole:
        # An expected failure counts as skipped: tested code can raise the exception that makes it one.
        if event["outcome"] == "skipped":
            return SKIPPED, ms, event["message"]
    if names != ["setup", "call", "teardown"]:
        return MISSING, ms, f"reported only {', '.join(names) or 'nothing'}"
    return (XPASSED if any(event["expected"] for event in whole) else PASSED), ms, ""


def find_problem(report, events, foreign, results):
    """Returns the reason why no result of this report counts, as a clause, or None."""
    ended = [event for event in events if "ended" in event]
    decoys = next((event["decoys"] for event in events if "decoys" in event), [])
    passed = {index for index, result in enumerate(results.values()) if result[0] in (PASSED, XPASSED)}
    broken = any(result[0] not in (PASSED, XPASSED, SKIPPED) for result in results.values())
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
    if set(junit["passed"]) != passed:
        return "the JUnit report names other tests as passed than the plugin"
    if any(results[decoy][0] in (PASSED, XPASSED) for decoy in decoys):
        return "a test passed that cannot pass"
    if ended[0]["changed"]:
        return f"functions of the test framework were replaced ({', '.join(ended[0]['changed'][:3])})"
    if report["rewritten"]:
        return f"test files were rewritten ({', '.join(report['rewritten'][:3])})"
    return None


def judge_report(stdout, secret, outcome="ok"):
    """Returns {"tests": id -> [outcome, ms, message], "uncollected": file -> message, "traced": id -> calls, "problem":
    str or None, "log": str}.

    outcome: how the run itself ended (RunResult.outcome).
    """
    empty = {"tests": {}, "uncollected": {}, "traced": {}}
    if outcome in LIMIT_PROBLEMS:
        return {**empty, "problem": LIMIT_PROBLEMS[outcome], "log": ""}
    report = unpack_report(stdout)
    if report is None:
        return {**empty, "problem": "there is no report", "log": stdout[-2000:]}
    events, foreign = parse_events(report, secret)
    results = collect_outcomes(events)
    decoys = {name for event in events for name in event.get("decoys", ())}
    return {
        "tests": {test: list(result) for test, result in results.items() if test not in decoys},
        "uncollected": {event["uncollected"]: event["message"] for event in events if "uncollected" in event},
        "problem": find_problem(report, events, foreign, results),
        "log": report["log"],
        "traced": {event["traced"]: event["calls"] for event in events if "traced" in event},
    }


def summarize(judged, fail_to_pass, pass_to_pass):
    """Returns (fraction of fail_to_pass that passed, fraction of pass_to_pass, one line for people)."""
    if judged["problem"]:
        return 0.0, 0.0, judged["problem"]

    def passed_fraction(tests):
        failed = [test for test in tests if judged["tests"].get(test, [MISSING])[0] != PASSED]
        return (1 - len(failed) / len(tests) if tests else 1.0), failed

    repaired, unrepaired = passed_fraction(fail_to_pass)
    kept, broken = passed_fraction(pass_to_pass)
    line = f"{len(fail_to_pass) - len(unrepaired)} of {len(fail_to_pass)} failing tests repaired, "
    line += f"{len(pass_to_pass) - len(broken)} of {len(pass_to_pass)} passing tests kept"
    if unrepaired or broken:
        first = (broken or unrepaired)[0]
        state, _, message = judged["tests"].get(first, (MISSING, 0, "it was not collected"))
        line += f"; first: {first} {state}: {' '.join(message.split())[:160]}"
    return repaired, kept, line


def compute_reward(repaired, kept, partial):
    """Returns 1 if every test passed, else 0. partial: the fraction of repaired tests, if all others still pass."""
    if kept < 1.0:
        return 0.0
    return repaired if partial else float(repaired == 1.0)
