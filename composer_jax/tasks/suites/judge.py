"""Reads the report of pytest_runner.py and says of every test whether it passed, outside of where the tests ran.

Standard library only: the same file judges in this process and in the container of an exported task.

What a report must fulfil, or no test of it has passed: pytest came to its end and its exit status agrees with what the
tests did; the plugin's account (through the pipe, each line with the secret) and the JUnit XML name the same tests as
passed, and each test once; the decoys, which cannot pass, have not; neither test files nor functions of pytest and
unittest were replaced.

What cannot be excluded: tests and tested code share one process, so code that is written against this very file can
find the plugin's secret in memory, leave the decoys alone and report what it likes; code can return objects that equal
everything, or read the expected value from the frame of the test that calls it. The decoys catch what makes every test
pass; the rest is for hack_monitor.py and people to find.
"""

import base64
import binascii
import json
import zlib

PASSED, FAILED, ERROR, SKIPPED, MISSING, DUPLICATE = "passed", "failed", "error", "skipped", "missing", "reported twice"
XPASSED = "passed against expectation"
LIMIT_PROBLEMS = {"timeout": "the time is over", "out_of_memory": "out of memory", "output_limit": "too much output"}


def unpack_report(stdout):
    """The report in the last line of the output, or None where there is none."""
    try:
        return json.loads(zlib.decompress(base64.b64decode(stdout.strip().rpartition("\n")[2], validate=True)))
    except (ValueError, binascii.Error, zlib.error):
        return None


def parse_events(report, secret):
    """What our plugin sent, and whether anybody else wrote to the pipe."""
    found, foreign = [], False
    for line in report["lines"]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and event.pop("secret", None) == secret:
            found.append(event)
        else:
            foreign = True
    return found, foreign


def collect_outcomes(found):
    """Test id -> (outcome, milliseconds, message) of the real tests and of the decoys, in the order of collection."""
    collected = next((event["collected"] for event in found if "collected" in event), [])
    phases = {}
    for event in found:
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
    """Of one test, from the reports of its phases."""
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
        # A failure that was expected counts as skipped: tested code can raise what makes it one.
        if event["outcome"] == "skipped":
            return SKIPPED, ms, event["message"]
    if names != ["setup", "call", "teardown"]:
        return MISSING, ms, f"reported only {', '.join(names) or 'nothing'}"
    return (XPASSED if any(event["expected"] for event in whole) else PASSED), ms, ""


def find_problem(report, found, foreign, results):
    """Why no result of this report counts, in a clause, or None."""
    ended = [event for event in found if "ended" in event]
    decoys = next((event["decoys"] for event in found if "decoys" in event), [])
    passed = {index for index, result in enumerate(results.values()) if result[0] in (PASSED, XPASSED)}
    broken = any(result[0] not in (PASSED, XPASSED, SKIPPED) for result in results.values())
    broken = broken or any("uncollected" in event for event in found)
    junit = report["junit"]
    if foreign or len(ended) > 1 or sum("collected" in event for event in found) > 1:
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
    """{"tests": id -> [outcome, ms, message], "uncollected": file -> message, "traced": id -> calls, "problem": str or
    None, "log": str}.

    outcome: how the run itself ended (RunResult.outcome).
    """
    nothing = {"tests": {}, "uncollected": {}, "traced": {}}
    if outcome in LIMIT_PROBLEMS:
        return {**nothing, "problem": LIMIT_PROBLEMS[outcome], "log": ""}
    report = unpack_report(stdout)
    if report is None:
        return {**nothing, "problem": "there is no report", "log": stdout[-2000:]}
    found, foreign = parse_events(report, secret)
    results = collect_outcomes(found)
    decoys = {name for event in found for name in event.get("decoys", ())}
    return {
        "tests": {test: list(result) for test, result in results.items() if test not in decoys},
        "uncollected": {event["uncollected"]: event["message"] for event in found if "uncollected" in event},
        "problem": find_problem(report, found, foreign, results),
        "log": report["log"],
        "traced": {event["traced"]: event["calls"] for event in found if "traced" in event},
    }


def summarize(judged, fail_to_pass, pass_to_pass):
    """(share of fail_to_pass that passed, share of pass_to_pass, one line)."""
    if judged["problem"]:
        return 0.0, 0.0, judged["problem"]

    def share(tests):
        bad = [test for test in tests if judged["tests"].get(test, [MISSING])[0] != PASSED]
        return (1 - len(bad) / len(tests) if tests else 1.0), bad

    repaired, still = share(fail_to_pass)
    kept, lost = share(pass_to_pass)
    line = f"{len(fail_to_pass) - len(still)} of {len(fail_to_pass)} failing tests repaired, "
    line += f"{len(pass_to_pass) - len(lost)} of {len(pass_to_pass)} passing tests kept"
    if still or lost:
        first = (lost or still)[0]
        state, _, message = judged["tests"].get(first, (MISSING, 0, "it was not collected"))
        line += f"; first: {first} {state}: {' '.join(message.split())[:160]}"
    return repaired, kept, line


def compute_reward(repaired, kept, partial):
    """1 if every test passed, else 0; partial: the share of repaired tests where all others still pass."""
    if kept < 1.0:
        return 0.0
    return repaired if partial else float(repaired == 1.0)
