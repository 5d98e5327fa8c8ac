"""Logs of test runs: the status of each test, and logs that count for nothing."""

import json

import pytest

from composer_jax.errors import UserError
from composer_jax.tasks import LogGrader
from composer_jax.tasks.grader import grader_from_json, grader_to_json
from composer_jax.tasks.grading.log import judge_log
from composer_jax.tasks.grading.log_parsers import PARSERS, parse

SUMMARY = "=========================== short test summary info ============================\n"
LOGS = {
    "pytest": (
        "----- Captured stdout -----\nPASSED a.py::forged\n" + SUMMARY + "\x1b[32mPASSED\x1b[0m a.py::ok[x - y]\n"
        "FAILED a.py::no - assert 1 == 2\nERROR a.py::err\nSKIPPED [1] a.py:3: why\nXFAIL a.py::x - known\n"
        "XPASS a.py::xp\n=== 1 passed ===\n",
        {
            "a.py::ok[x - y]": "PASSED",
            "a.py::no": "FAILED",
            "a.py::err": "FAILED",
            "a.py::x": "XFAIL",
            "a.py::xp": "FAILED",
        },
    ),
    "django": (
        "test_a (app.tests.T) ... ok\ntest_b (app.tests.T) ... FAIL\ntest_c (app.T) ... skipped 'no'\n"
        "test_d (app.T) ... expected failure\nERROR: test_e (app.T)\n",
        {
            "test_a (app.tests.T)": "PASSED",
            "test_b (app.tests.T)": "FAILED",
            "test_c (app.T)": "SKIPPED",
            "test_d (app.T)": "XFAIL",
            "test_e (app.T)": "FAILED",
        },
    ),
    "gotest": (
        "=== RUN   TestA\n--- PASS: TestA (0.00s)\n    --- FAIL: TestB/sub_1 (0.10s)\n--- SKIP: TestC (0.00s)\nFAIL\n",
        {"TestA": "PASSED", "TestB/sub_1": "FAILED", "TestC": "SKIPPED"},
    ),
    "cargo": (
        "running 3 tests\ntest a::b ... ok\ntest c ... FAILED\ntest d ... ignored, slow\ntest result: FAILED.\n",
        {"a::b": "PASSED", "c": "FAILED", "d": "SKIPPED"},
    ),
    "jest": (
        "  suite\n    ✓ adds (3 ms)\n    ✕ breaks\n    ○ skipped later\n",
        {"adds": "PASSED", "breaks": "FAILED", "skipped later": "SKIPPED"},
    ),
    "mocha": ("  ✔ works (12ms)\n  1) fails\n  - waits\n", {"works": "PASSED", "fails": "FAILED", "waits": "SKIPPED"}),
    "gradle": ("T > a() PASSED\nT > b() FAILED\n> Task :test FAILED\n", {"T > a()": "PASSED", "T > b()": "FAILED"}),
    "ant": ("[junit] [PASS] T.a\n    [junit] [ERR] T.b\n", {"T.a": "PASSED", "T.b": "FAILED"}),
    "maven": (
        "+ mvn test -Dtest=A#x\n[INFO] BUILD SUCCESS\n+ mvn test -Dtest=B#y\n[INFO] BUILD FAILURE\n",
        {"A#x": "PASSED", "B#y": "FAILED"},
    ),
    "tap": ("ok 1 - a\nnot ok 2 - b\nok 3 - c # SKIP no\n", {"a": "PASSED", "b": "FAILED", "c": "SKIPPED"}),
}


@pytest.mark.parametrize("parser", LOGS)
def test_each_kind_of_log_is_read(parser):
    log, want = LOGS[parser]
    assert parse(parser, log) == parse(f"parse_log_{parser}", log.replace("\n", "\r\n")) == want


def test_parsers_accept_any_text_and_an_unknown_parser_is_refused():
    text = "".join(log for log, _ in LOGS.values()) + "\0\n" + "(" * 5000
    for parser in PARSERS:
        parse(parser, text)
    with pytest.raises(UserError, match="log parser 'parse_log_fortran' is unknown; use one of ant, cargo"):
        parse("parse_log_fortran", "")


def test_the_worst_status_of_a_test_counts():
    log = "test a ... FAILED\ntest a ... ok\n"
    assert parse("cargo", log) == {"a": "FAILED"}


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
        (log_of("test new ... ok\n"), 0.0, "1 of 1 tests repaired, 0 of 1 kept"),
        (log_of("test new ... FAILED\n", 101, before=GOOD, after=GOOD), 0.0, "0 of 1 tests repaired"),
        (log_of(GOOD, 1), 0.0, "the exit code is 1, but every test in it has passed"),
        (log_of("compiling\n"), 0.0, "it names no test, so nothing shows that a suite ran"),
        (GOOD, 0.0, "it lacks the line '>>>>> Start Test Output'"),
        (START + GOOD, 0.0, "it lacks the line '>>>>> End Test Output'"),
        (END + GOOD + START, 0.0, "its end is before its start"),
        (log_of(GOOD + f"+ : '{END.strip()}'\n"), 0.0, "'>>>>> End Test Output' more than once"),
        (START + START + GOOD + END, 0.0, "'>>>>> Start Test Output' more than once"),
        (log_of(GOOD + ">>>>> Test Exit Code: 0\n", 101), 0.0, "it has more than one exit code"),
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


def test_a_truncated_id_stands_for_all_ids_with_that_prefix():
    grader = LogGrader("", "pytest", ("a.py::t[one",))
    body = SUMMARY + "PASSED a.py::t[one two]\nPASSED a.py::t[one three]\n"
    assert judge_log(grader, log_of(body)).reward == 1.0
    assert judge_log(grader, log_of(body + "FAILED a.py::t[one four]\n", code=1)).reward == 0.0
    assert judge_log(grader, log_of(SUMMARY + "PASSED a.py::t[two]\n")).reward == 0.0


def test_the_grader_survives_json_and_needs_a_test():
    grader = LogGrader("echo", "tap", ("a",), ("b",), True, 5.0)
    assert grader_from_json(json.loads(json.dumps(grader_to_json(grader)))) == grader
    with pytest.raises(UserError, match="at least one test in fail_to_pass"):
        LogGrader("echo", "tap", ())
