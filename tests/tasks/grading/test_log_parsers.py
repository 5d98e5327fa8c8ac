"""Parsers of test logs: the outcome of every test in logs that the frameworks printed (logs/), or in their format."""

from pathlib import Path

import pytest

from composer_jax.errors import UserError
from composer_jax.tasks.grading.log_parsers import PARSERS, NamesTooLongError, parse
from composer_jax.tasks.suites.judge import FAILED, PASSED, SKIPPED, XFAILED

P, F, S, X = PASSED, FAILED, SKIPPED, XFAILED
LOGS = Path(__file__).with_name("logs")
SUMMARY = "=========================== short test summary info ============================\n"


def of(outcomes, names, prefix=""):
    """Returns the names, separated by "; ", with one outcome each."""
    return dict(zip([prefix + name for name in names.split("; ")], outcomes, strict=True))


PYTEST = of(
    (P, F, P, F, X, F, F),
    "test_values[a b]; test_values[x - y]; test_values[[z]]; test_prints; test_known[x - y]; test_lucky; test_setup",
    "test_py.py::",
)
NAMED_SKIP = {"test_py.py::test_later": S}
SUBTESTS_PASSED, SUBTESTS_SKIPPED = {"test_py.py::TestUnit::test_sub": P}, {"test_py.py::TestUnit::test_sub": S}
MOCHA = of((P, F, S, P, P, F), "adds; breaks (twice); later; waits; adds more; breaks")
PRINTED = {
    "pytest_rA": ("pytest", PYTEST | SUBTESTS_PASSED),
    "pytest_v": ("pytest", PYTEST | NAMED_SKIP | SUBTESTS_PASSED),
    "pytest_old_rA": ("pytest_v2", PYTEST),
    "pytest_old_v": ("pytest_v2", PYTEST | NAMED_SKIP | SUBTESTS_SKIPPED),
    "unittest": (
        "unittest",
        of(
            (P, F, F, F, X, F, P, P, F, P, S, S, F, P),
            "doc; doc_fails; error; fail; known; lucky; ok; prints; prints_and_fails; prints_without_newline; skip; "
            "sub; sub_fails; warns",
        ),
    ),
    "django": (
        "django",
        of((P, P, F, F, X, P, P, P, S, P), "check; docstring; error; fail; known; logs; ok; race; skip; warns"),
    ),
    "sympy": (
        "sympy",
        of(
            (P, F, F, X, F, S, S, P, S),
            "ok; fail; error; known; lucky; skip; skips; prints; slow",
            "test_",
        )
        | of((F, F), ":test_error; ::test_fail"),
    ),
    "tox": (
        "tox",
        PYTEST
        | SUBTESTS_PASSED
        | of((F, F, F), "unit; py; other")
        | of((P, F), "test_ok (__main__.T.test_ok); test_fail (__main__.T.test_fail)"),
    ),
    "jest": (
        "jest",
        of(
            (P, P, F, P, S, S, S, S, P),
            "forged; adds; breaks (twice); waits; later; skipped later; write it; todo write it; adds more",
        ),
    ),
    "mocha": ("mocha", MOCHA),
    "mocha_tap": (
        "tap",
        of((P, F, S, P, P, F), "adds; breaks (twice); later; waits; inner adds more; inner breaks", "calc "),
    ),
    "vitest": (
        "vitest",
        of(
            (P, F, S, S, P, P),
            "adds; breaks (twice); later; write it; waits; inner > adds more",
            "v/calc.test.js > calc > ",
        ),
    ),
    "cargo": (
        "cargo",
        of((P, S, F, P, P, P), "adds; later; breaks; panics; panics - should panic; prints", "tests::")
        | {"src/lib.rs - add (line 3)": P},
    ),
    "go": (
        "gotest",
        of((P, F, S, P, F, P, F), "Adds; Breaks; Later; Prints; Table; Table/one_two; Table/three", "Test"),
    ),
    "maven": ("maven", of((F, F, F, P), "CalcTest; CalcTest.breaks; CalcTest.errs; MoreTest$Inner", "acme.")),
    "maven_each": (
        "maven",
        of((P, F), "CalcTest#adds; CalcTest#breaks") | of((F, F), "CalcTest; CalcTest.breaks", "acme."),
    ),
    "gradle": ("gradle", of((F, P, P, S), "breaks; prints; adds; later", "CalcTest > ")),
    "rspec": (
        "rspec",
        of(
            (P, F, S, S, P, F),
            "adds; breaks; later; is pending; with numbers adds more; with numbers fails: twice (really)",
            "Calc ",
        ),
    ),
    "minitest": ("minitest", of((P, F, F, S), "adds; breaks; error; later", "TestCalc#test_")),
    "ruby_unit": (
        "ruby_unit",
        of((P, P, F, F, S, S), "adds numbers; test_adds; test_breaks; test_error; test_later; test_pend"),
    ),
    "phpunit": (
        "phpunit",
        of(
            (P, F, S, S, S, P, F),
            'Adds; Breaks twice; Later; Incomplete; Risky; Numbers with data set "one"; Numbers with data set "three"',
            "Calc > ",
        ),
    ),
    "ctest": (
        "ctest",
        of((P, F, P, S, F, F, F, S, P), "adds; breaks; adds two numbers; later; crashes; missing; slow; off; expected"),
    ),
}
"""Name of a file in logs -> parser, and the outcome of every test."""


@pytest.mark.parametrize("name", PRINTED)
def test_logs_that_frameworks_printed(name):
    parser, want = PRINTED[name]
    log = (LOGS / f"{name}.txt").read_text(encoding="utf-8")
    if name in ("unittest", "django"):  # every test has its method's name, some have others as well
        outcomes = parse(parser, log)
        module = "__main__" if name == "unittest" else "app.tests"
        assert {test: outcomes[f"test_{test} ({module}.T.test_{test})"] for test in want} == want
        assert set(outcomes.values()) == {P, F, S, X}
    else:
        assert parse(parser, log) == parse(parser, log.replace("\n", "\r\n")) == want


OTHER_NAMES = {
    "unittest": of(
        (P, F, S, F),
        "The sum of two (a.b) numbers.; A docstring of a failure.; test_sub (__main__.T.test_sub) (i=1); "
        "test_sub_fails (__main__.T.test_sub_fails) [number] (i=2)",
    ),
    "django": of((P, P), "A form (with a widget) is rendered; test_migrate (app.tests.D.test_migrate)"),
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_docstrings_and_subtests_are_names_too(name):
    outcomes = parse(name, (LOGS / f"{name}.txt").read_text(encoding="utf-8"))
    assert {test: outcomes[test] for test in OTHER_NAMES[name]} == OTHER_NAMES[name]
    assert len(outcomes) == len(PRINTED[name][1]) + len(OTHER_NAMES[name])


FORMATS = {
    "colours and forged lines": (
        "pytest",
        "----- Captured stdout -----\nPASSED a.py::forged\n" + SUMMARY + "\x1b[32mPASSED\x1b[0m a.py::ok[x - y]\n"
        "FAILED a.py::no - assert 1 == 2\nSKIPPED [1] a.py:3: why\n=== 1 passed ===\n",
        of((P, F), "ok[x - y]; no", "a.py::"),
    ),
    "no heading": ("pytest_v2", "a.py::t PASSED\na.py::t[x y] PASSED\n", of((P, P), "t; t[x y]", "a.py::")),
    "xdist": (
        "pytest",
        "[gw0] [ 50%] PASSED a.py::t \n[gw1] [100%] FAILED a.py::u[a b]\n",
        {"a.py::t": P, "a.py::u[a b]": F},
    ),
    "skipped in the progress of -rA -v": (
        "pytest",
        "a.py::s SKIPPED (no numpy)  [ 50%]\na.py::t PASSED  [100%]\n"
        + (SUMMARY + "PASSED a.py::t\nSKIPPED [1] a.py:2: no numpy\n"),
        {"a.py::s": S, "a.py::t": P},
    ),
    "failed subtests": (
        "pytest",
        SUMMARY + "PASSED a.py::T::t\nSUBFAILED[number] (i=2) a.py::T::t - assert 0\n"
        "PASSED a.py::u\n[number] (i=2) SUBFAIL a.py::u - AssertionError: 2 == 2\n",
        {"a.py::T::t": F, "a.py::u": F},
    ),
    "paths in ids": (
        "pytest_options",
        SUMMARY + "PASSED a.py::t[/usr/lib/x]\nPASSED a.py::t[//x/y]\n",
        {"a.py::t[/x]": P, "a.py::t[//x/y]": P},
    ),
    "mouse buttons": ("matplotlib", SUMMARY + "PASSED a.py::t[MouseButton.LEFT]\n", {"a.py::t[1]": P}),
    "output without a line end": (
        "django",
        "test_a (app.tests.T) ... creating\ntest_b (app.tests.T) ... Loading fixtures ... done\n"
        "ERROR: no such table\nok\n"
        "test_c (app.tests.T) ... OK\n  Applying sites.0002_unique...test_d (app.tests.T) ... ok\n",
        {
            **of((P, P, P), "test_b (app.tests.T); test_c (app.tests.T); test_d (app.tests.T)"),
            "Applying sites.0002_unique...test_d (app.tests.T)": P,
        },
    ),
    "go without times": (
        "gotest",
        "--- PASS: TestA\n    --- FAIL: TestB/sub_1 (0.10s)\n",
        {"TestA": P, "TestB/sub_1": F},
    ),
    "cargo with output": ("cargo", "test a ... hello\nok\ntest b ... FAILED\n", {"a": P, "b": F}),
    "cargo's list of failures": (
        "cargo",
        "test a ... \ntest z ... \nok\nFAILED\ntest b ... \nok\n\nfailures:\n\nfailures:\n    a\n\n"
        "test result: FAILED. 1 passed; 1 failed\n    x\n",
        {"a": F, "z": F, "b": P},
    ),
    "sympy's list of failures": (
        "sympy",
        "test_a \nok\ntest_z z\nF\n\n_____ sympy/core/tests/test_x.py:test_a _____\nTraceback\n",
        {"test_a": F, "test_z": F, "sympy/core/tests/test_x.py:test_a": F},
    ),
    "names of ctest": (
        "ctest",
        "1/7 Test #1: a *** b ....   Passed    0.01 sec\n2/7 Test  #2: has  Passed ...   Passed    0.01 sec\n"
        "3/7 Test #3: long ....***Failed  1234.5 sec\n4/7 Test #4: x .....***Failed  Required regular expression not "
        "found. Regex=[1 sec\n]  0.02 sec\n5/7 Test #5: y ....***Exception: SegFault  12345.67 sec\n",
        {"a *** b": P, "has  Passed": P, "long": F, "y": F},
    ),
    "names of pytest's progress": (
        "pytest",
        "a.py::t[x PASSED (y)] FAILED [ 10%]\na.py::t[expect FAILED] PASSED\n"
        "a.py::t[PASSED] SKIPPED (no (more) numpy)  [ 50%]\na.py::t[x] SKIPPED (no numpy)\n"
        "a.py::u[ - ] PASSED [100%]\n",
        of((F, P, S, S, P), "t[x PASSED (y)]; t[expect FAILED]; t[PASSED]; t[x]; u[ - ]", "a.py::"),
    ),
    "reasons of pytest's summary": (
        "pytest",
        SUMMARY + "FAILED a.py::t[x - y - z] - a - b\nFAILED a.py::t[[x] - y]] - [z]\nERROR a.py - no - way\n"
        "FAILED a.py::t[x - y\nFAILED a.py::u\n",
        of((F, F, F, F, F), "a.py::t[x - y - z]; a.py::t[[x] - y]]; a.py; a.py::t[x - y; a.py::u"),
    ),
    "nextest": (
        "cargo",
        "        PASS [   0.005s] calc tests::a\n        FAIL [   0.1s] (2/2) calc tests::b\n",
        {"calc tests::a": P, "calc tests::b": F},
    ),
    "gradle with output": (
        "gradle_custom",
        "T > a() PASSED\nT > b()\nwarning: x\nFAILED\n> Task :test FAILED\n",
        {"T > a()": P, "T > b()": F},
    ),
    "jest as JSON": ("jest_json", "[PASSED] calc adds\n[FAILED] calc breaks\n", {"calc adds": P, "calc breaks": F}),
    "immutable.js": ("immutable_js", "  ✓ adds (3 ms)\n[FAILED] calc breaks\n", {"adds": P, "calc breaks": F}),
    "mocha twice": (
        "mocha",
        "  A\n    ✓ a\n    1) b\n\n  1 passing (3ms)\n  1 failing\n\n  1) A\n       b:\n      - c\n\n  B\n"
        "    ✓ d\n    - e\n    1) f\n\n  1 passing (3ms)\n  1 failing\n\n  1) B\n",
        of((P, F, P, S, F), "a; b; d; e; f"),
    ),
    "rspec twice": (
        "rspec",
        "\nCalc\n  adds\n  breaks (FAILED - 1)\n\nFailures:\n\n  1) Calc breaks\n     Failure/Error: no\n\n"
        "Note:\n  no example\n\nFinished in 0.1 seconds (files took 0.1 seconds to load)\n2 examples, 1 failure\n\n"
        "Failed examples:\n\nrspec ./a.rb:1 # Calc breaks\n\nRandomized with seed 1\n\nOther\n  subs\nhello\n"
        "  fails (FAILED - 1)\n\nFinished in 0.1 seconds\n1 example, 0 failures\n",
        of((P, F, P, F), "Calc adds; Calc breaks; Other subs; Other fails"),
    ),
    "karma twice": (
        "karma",
        "Starting browser Chrome\n\n  calc\n    ✔ adds\nSUMMARY:\n✔ 1 test\n"
        "Starting browser Firefox\n\n  other\n    ✖ breaks\nSUMMARY:\n✖ 1 test\n",
        {"calc > adds": P, "other > breaks": F},
    ),
    "karma": (
        "karma",
        "  ✔ before\nStarting browser Chrome\n\n  calc\n    ✔ adds\n    inner\n      ✖ breaks\n  other\n"
        "    ✔ last\nSUMMARY:\n✔ 2 tests\n",
        {"calc > adds": P, "calc > inner > breaks": F, "calc > last": P},
    ),
    "tap": (
        "tap",
        "ok 1 - a # time=1.2ms\nnot ok 2 b\nok 3 - c # SKIP no\n",
        {"a": P, "- a": P, "b": F, "c": S},
    ),
    "tap's names with a hash": (
        "tap",
        "ok 1 foo#skipWhile\nok 2 List#todo returns all\nnot ok 3 issue #12\nok 4 # skip\nnot ok 5 c # TODO later\n",
        {"foo#skipWhile": P, "List#todo returns all": P, "issue #12": F, "c": S},
    ),
    "phpunit's namespaces": ("phpunit", "Calc (Acme\\CalcTest)\n ✔ Adds [0.12 ms]\n", {"Calc > Adds": P}),
    "rspec as JSON": (
        "rspec_transformed_json",
        "Calc adds - passed\nCalc breaks - failed\n",
        {"Calc adds": P, "Calc breaks": F},
    ),
    "cucumber": (
        "jekyll",
        "features/a.feature ....\nfeatures/b.feature ..F-\n",
        {"features/a.feature": P, "features/b.feature": F},
    ),
    "shoulda": (
        "jekyll",
        "TestA#test_: a site should build.  = 0.01 s = .\n",
        of((P, P), "a site should build.; a site should build", "TestA#test_: "),
    ),
    "ant": ("ant", "[junit] [PASS] T.a\n    [junit] [ERR] T.b\n", {"T.a": P, "T.b": F}),
    "surefire 2": (
        "maven",
        "Running acme.CalcTest\nTests run: 2, Failures: 1, Errors: 0, Skipped: 0, Time elapsed: 0.1 sec <<< FAILURE!\n"
        "breaks(acme.CalcTest)  Time elapsed: 0.03 sec  <<< FAILURE!\n",
        {"acme.CalcTest": F, "breaks(acme.CalcTest)": F},
    ),
    "googletest": (
        "googletest",
        "[       OK ] Calc.Adds (0 ms)\n[  FAILED  ] Calc/P.Big/0, where GetParam() = 3 (1 ms)\n"
        "[  FAILED  ] 1 test, listed below:\n",
        {"Calc.Adds": P, "Calc/P.Big/0": F, "Calc/P.Big/0, where GetParam() = 3": F},
    ),
    "doctest": (
        "doctest",
        '<?xml version="1.0"?>\n<doctest binary="t"><TestSuite><TestCase name="calc">'
        '<SubCase name="adds"/><SubCase name="breaks">'
        '<Expression success="false"/></SubCase><OverallResultsAsserts test_case_success="false"/></TestCase>'
        '<TestCase name="later" skipped="true"/></TestSuite></doctest>\n',
        {"calc": F, "calc > adds": P, "calc > breaks": F, "later": S},
    ),
    "doctest twice, with subcases in subcases": (
        "doctest",
        "".join(
            f'<?xml version="1.0"?>\n<doctest binary="t"><TestSuite><TestCase name="{case}"><SubCase name="outer">'
            f'<SubCase name="inner"><Expression success="{success}"/></SubCase><SubCase name="last"/></SubCase>'
            f'<OverallResultsAsserts test_case_success="{success}"/></TestCase></TestSuite></doctest>\n'
            for case, success in (("a", "true"), ("b", "false"))
        ),
        of((P, P, P, P), "a; a > outer; a > inner; a > last") | of((F, F, F, P), "b; b > outer; b > inner; b > last"),
    ),
    "redis": (
        "redis",
        "[ok]: SET in a loop (12 ms)\n[err]: GET in tests/unit/get.tcl\n[skip]: DEL\n",
        {"SET in a loop": P, "GET": F, "GET in tests/unit/get.tcl": F, "DEL": S},
    ),
    "jq": ("jq", "PASS: tests/a\nFAIL: tests/b\nXFAIL: tests/c\n", {"tests/a": P, "tests/b": F, "tests/c": X}),
    "micropython": (
        "micropython_test",
        "pass  basics/a.py\nFAIL  basics/b.py\nskip  basics/c.py\n",
        of((P, F, S), "a.py; b.py; c.py", "basics/"),
    ),
    "marked": ("marked", "1) adds\n2) breaks\n", {"adds": F, "breaks": F}),
    "react-pdf": ("react_pdf", "PASS a/b.test.js (1.2 s)\nFAIL c.test.js\n", {"a/b.test.js": P, "c.test.js": F}),
}
"""What a log shows -> parser, log, the outcome of every test."""


@pytest.mark.parametrize("what", FORMATS)
def test_logs_in_documented_formats(what):
    parser, log, want = FORMATS[what]
    assert parse(parser, log) == parse(f"parse_log_{parser}", log) == want


KNOWN = """
ant astroid astropy cargo cucumber django doctest flask googletest gotest gradle_custom immutable_js jekyll jest
jest_json jq karma marked marshmallow matplotlib maven micropython_test minitest phpunit pvlib pydicom pylint pytest
pytest_options pytest_v2 pyvista react_pdf redis requests rspec_transformed_json ruby_unit scikit seaborn sphinx
sqlfluff sympy tap vitest xarray
"""
"""SWE-bench's parsers of Python, and those of SWE-bench Multilingual."""


def test_names_of_swe_bench_are_known_and_others_are_refused():
    assert set(KNOWN.split()) <= PARSERS.keys()
    with pytest.raises(UserError, match="log parser 'parse_log_fortran' is unknown; use one of ant, astroid"):
        parse("parse_log_fortran", "")


def test_parsers_accept_any_text():
    text = "".join(file.read_text(encoding="utf-8") for file in sorted(LOGS.iterdir())) + "\0\n" + "(" * 5000
    for parser in PARSERS:
        parse(parser, text)
        parse(parser, "")


HOSTILE = (
    ":",
    "::",
    " > ",
    "a ",
    "a",
    " ",
    " (FAILED",
    "] (",
    "[",
    "#",
    " ... ",
    ", where ",
    "x.py::a ",
    "= ",
    " - ",
    ".",
)


@pytest.mark.parametrize("parser", sorted({parser: name for name, parser in PARSERS.items()}.values()))
def test_parsers_take_linear_time_for_long_lines(parser):
    lines = [f"{start}{piece * 20_000}" for piece in HOSTILE for start in ("", "test_a (b) ", "ok 1 ", "[ OK ] a")]
    parse(parser, "\n".join(lines))  # a quadratic pattern takes minutes


LONG = {
    "googletest, words": ("googletest", "[OK] a " * 100_000 + "x"),
    "googletest, parameters": ("googletest", "[OK] a, where " * 100_000 + "x"),
    "ctest, spaces": ("ctest", "1/1 Test #1: a ..." + " " * 400_000 + "x"),
    "ctest, failures": ("ctest", "1/1 Test #1: a ." + " ***" * 200_000 + "x"),
    "ctest, spaces behind a failure": ("ctest", "1/1 Test #1: a ...***Failed" + " " * 400_000 + "x"),
    "pytest, words": ("pytest", "a::b" + " PASSED (" * 400_000 + "x"),
    "maven, builds": ("maven", "-Dtest=a\n" * 400_000 + "BUILD SUCCESS\n" * 400_000),
    "doctest, subcases": (
        "doctest",
        "<doctest ><TestSuite><TestCase><OverallResultsAsserts/>"
        + ("<SubCase>" * 200_000 + "</SubCase>" * 200_000 + "</TestCase></TestSuite></doctest>"),
    ),
}
"""What a log repeats -> parser, log. A quadratic parser takes minutes for it."""


@pytest.mark.parametrize("what", LONG)
def test_parsers_take_linear_time_for_large_logs(what):
    parser, log = LONG[what]
    assert parse(parser, log).keys() <= {"a", "", " > "}


def test_the_reason_of_a_failure_is_found_in_linear_time():
    name = "a::b[" + " - x" * 400_000
    assert parse("pytest", f"{SUMMARY}FAILED {name}\n") == {name: F}


@pytest.mark.parametrize(
    ("parser", "log"),
    [
        ("rspec", "\n" + "G" * 100_000 + "\n" + "".join(f"  {number}\n" for number in range(20_000))),
        ("phpunit", "G" * 100_000 + "\n" + " ✔ A\n" * 20_000),
        ("karma", "Starting browser\n  " + "G" * 100_000 + "\n" + "   ✔ a\n" * 20_000),
    ],
)
def test_a_long_group_name_is_not_repeated_without_a_limit(parser, log):
    with pytest.raises(NamesTooLongError, match="the names of its tests have more than 16777216 characters"):
        parse(parser, log)


def test_digits_without_end_are_no_count():
    counts = "Failures: 0, Errors: 0, Skipped: 0, Time elapsed: 1 s -- in a.B\n"
    assert parse("maven", f"Tests run: {'1' * 5000}, {counts}Tests run: 1, {counts}") == {"a.B": P}


@pytest.mark.parametrize(
    ("parser", "log", "test"),
    [
        ("sympy", "test_a x\nok\nF\n", "test_a"),
        ("cargo", "test a ... \nok\nFAILED\n", "a"),
        ("gradle", "T > a()\nPASSED\nFAILED\n", "T > a()"),
    ],
)
def test_a_word_that_a_test_prints_does_not_hide_the_word_of_the_runner(parser, log, test):
    assert parse(parser, log) == {test: F}


def test_the_worst_outcome_of_a_test_counts():
    assert parse("cargo", "test a ... FAILED\ntest a ... ok\n") == {"a": F}
