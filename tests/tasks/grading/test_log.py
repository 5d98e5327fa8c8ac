"""Grading by logs: what counts as passed, and logs that count for nothing."""

import asyncio
import json
import threading

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import RunResult
from composer_jax.tasks import LogGrader, Task
from composer_jax.tasks.grader import grader_from_json, grader_to_json
from composer_jax.tasks.grading.log import grade, judge_log

SUMMARY = "=========================== short test summary info ============================\n"
GRADER = LogGrader("", "parse_log_cargo", ("new",), ("old",))
START, END = ">>>>> Start Test Output\n", ">>>>> End Test Output\n"


def log_of(body, code=0, before="", after=""):
    return f"{before}+ : '{START.strip()}'\n{body}+ : '{END.strip()}'\n>>>>> Test Exit Code: {code}\n{after}"


GOOD = "test new ... ok\ntest old ... ok\n"


@pytest.mark.parametrize(
    ("log", "reward", "detail"),
    [
        (log_of(GOOD), 1.0, "1 of 1 tests repaired, 1 of 1 kept"),
        (log_of("test new ... ok\ntest old ... ignored\n"), 1.0, "1 of 1 kept"),
        (log_of(GOOD + "test third ... FAILED\n", 101), 1.0, "1 of 1 kept"),
        (log_of("test new ... ignored\ntest old ... ok\n"), 0.0, "0 of 1 tests repaired, 1 of 1 kept"),
        (log_of("test new ... ok\n"), 0.0, "1 of 1 tests repaired, 0 of 1 kept; first: old missing"),
        (log_of("test new ... FAILED\n", 101, before=GOOD, after=GOOD), 0.0, "0 of 1 tests repaired"),
        (log_of(GOOD, 1), 0.0, "the exit code is 1, but every test in it has passed"),
        (log_of("compiling\n"), 0.0, "it names no test, so nothing shows that a suite ran"),
        (GOOD, 0.0, "it lacks the line '>>>>> Start Test Output'"),
        (START + GOOD, 0.0, "it lacks the line '>>>>> End Test Output'"),
        (END + GOOD + START, 0.0, "its end is before its start"),
        (log_of(GOOD + f"+ : '{END.strip()}'\n"), 0.0, "'>>>>> End Test Output' more than once"),
        (START + START + GOOD + END, 0.0, "'>>>>> Start Test Output' more than once"),
        (log_of(GOOD + ">>>>> Test Exit Code: 0\n", 101), 0.0, "it has more than one exit code"),
        (log_of(GOOD + f">>>>> Test Exit Code: {'1' * 5000}\n"), 1.0, "1 of 1 kept"),
        (log_of("test new ... \nok\nFAILED\ntest old ... ok\n", 101), 0.0, "0 of 1 tests repaired, 1 of 1 kept"),
        (log_of(GOOD, before=">>>>> Patch Apply Failed\n"), 0.0, "it says 'Patch Apply Failed'"),
    ],
)
def test_a_log_is_judged(log, reward, detail):
    result = judge_log(GRADER, log)
    assert result.reward == reward and detail in result.detail


def test_a_log_of_failures_only():
    grader = LogGrader("", "parse_log_cargo", ("new",), ("old",), fail_only=True)
    assert judge_log(grader, log_of("")).reward == 1.0
    assert judge_log(grader, log_of("", code=1)).reward == 0.0
    assert judge_log(grader, log_of("test new ... FAILED\n", code=1)).reward == 0.0
    assert judge_log(grader, log_of("test third ... FAILED\n", code=1)).reward == 1.0


def test_an_expected_failure_counts_as_passed_and_a_skip_only_if_the_test_passed_before():
    grader = LogGrader("", "pytest", ("a.py::t",), ("a.py::u",))
    known = "a.py::t XFAIL\na.py::u XFAIL\n"
    assert judge_log(grader, log_of(known)).reward == 1.0
    assert judge_log(grader, log_of(known.replace("u XFAIL", "u SKIPPED"))).reward == 1.0
    assert judge_log(grader, log_of(known.replace("t XFAIL", "t SKIPPED"))).reward == 0.0
    assert judge_log(grader, log_of(known.replace("t XFAIL", "t XPASS"))).reward == 0.0


def test_a_truncated_id_stands_for_all_ids_with_that_prefix():
    grader = LogGrader("", "pytest", ("a.py::t[one",))
    body = SUMMARY + "PASSED a.py::t[one two]\nPASSED a.py::t[one three]\n"
    assert judge_log(grader, log_of(body)).reward == 1.0
    assert judge_log(grader, log_of(body + "FAILED a.py::t[one four]\n", code=1)).reward == 0.0
    assert judge_log(grader, log_of(SUMMARY + "PASSED a.py::t[two]\n")).reward == 0.0


def test_names_without_end_count_for_nothing():
    grader = LogGrader("", "rspec", ("new",), fail_only=True)
    result = judge_log(grader, log_of("\n" + "G" * 100_000 + "\n" + "  a\n" * 1000))
    assert result.reward == 0.0 and "the names of its tests have more than 16777216 characters" in result.detail


class Script:
    """A pool, and its sandbox in which the script prints a log."""

    def __init__(self, log):
        self.log = log

    async def acquire(self, files, **options):
        return self

    async def apply(self, changes):
        pass

    async def run(self, command, **options):
        return RunResult("ok", 0, self.log, "", 0.0, 0)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass


def test_a_log_is_judged_outside_the_event_loop(monkeypatch):
    threads = []

    def judge(grader, log):
        threads.append(threading.current_thread())
        return judge_log(grader, log)

    monkeypatch.setattr("composer_jax.tasks.grading.log.judge_log", judge)
    task = Task(id="t", family="swe", split="train", instruction="Repair it.", files={}, tools=(), grader=GRADER)
    result = asyncio.run(grade(task, GRADER, {}, Script(log_of(GOOD)), None))
    assert result.reward == 1.0 and threading.main_thread() not in threads and len(threads) == 1


def test_the_grader_survives_json_and_needs_a_test():
    grader = LogGrader("echo", "tap", ("a",), ("b",), True, 5.0)
    assert grader_from_json(json.loads(json.dumps(grader_to_json(grader)))) == grader
    with pytest.raises(UserError, match="at least one test in fail_to_pass"):
        LogGrader("echo", "tap", ())
