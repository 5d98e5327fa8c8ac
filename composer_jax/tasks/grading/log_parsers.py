"""Parsers of test logs: the outcome of every test that a log names.

A parser is found by its name in SWE-bench's rows (log_parser; with or without the prefix "parse_log_") or by the name
of the test framework. Most are LineFormats: patterns of lines, whose groups say the outcome. log_layouts.py has those
that need more than one line. Names of tests are spelled as SWE-bench's harness spells them. If a log names a test more
than once, the worst outcome counts, so printing an extra "PASSED" gains nothing.
"""

import re
from collections.abc import Mapping

from composer_jax.errors import UserError
from composer_jax.tasks.grading import log_layouts
from composer_jax.tasks.grading.line_format import NAME, LineFormat, Outcomes, Parser
from composer_jax.tasks.suites.judge import FAILED, PASSED, SKIPPED, XFAILED

_BADNESS = (PASSED, XFAILED, SKIPPED, FAILED)
_NAME_CHARS = 1 << 24
_COLOURS = re.compile(r"\x1b\[[0-9;]*[mK]")

_jest = LineFormat(
    rf"(?:(?P<passed>[✓✔√])|(?P<failed>[✕✗✖×])|(?P<skipped>[○✎])) {NAME}(?: \([\d.]+ ?m?s\))?",
    rf"(?P<skipped>[○✎]) (?:skipped|todo) {NAME}",
)
_jest_json = LineFormat(rf"\[(?:(?P<passed>PASSED)|(?P<failed>FAILED)|(?P<skipped>PENDING|SKIPPED|TODO))\] {NAME}")
_tap = LineFormat(
    rf"(?i:(?:not )?ok \d+(?: -)? {NAME} # *(?P<skipped>SKIP|TODO)\b.*)",
    rf"(?i:(?!.* # *(?:SKIP|TODO)\b)(?:(?P<failed>not ok)|(?P<passed>ok)) \d+ {NAME}(?: # time=[\d.]+m?s)?)",
    rf"(?i:(?!.* # *(?:SKIP|TODO)\b)(?:(?P<failed>not ok)|(?P<passed>ok)) \d+ - {NAME}(?: # time=[\d.]+m?s)?)",
)
_MINITEST_WORD = r"(?:(?P<passed>\.)|(?P<failed>[FE])|(?P<skipped>S))"
_minitest = LineFormat(
    rf"{NAME} {{1,2}}= [\d.]+ s = {_MINITEST_WORD}",
    rf"{NAME}\. {{1,2}}= [\d.]+ s = {_MINITEST_WORD}",  # of a description, which is a sentence
)
_GOOGLETEST_WORD = r"(?>.*\[ *(?:(?P<passed>OK)|(?P<failed>FAILED)|(?P<skipped>SKIPPED)) *\] )"
_cucumber = LineFormat(
    r"(?P<name>\S.*?[^ =]) (?P<passed>\.+)",
    r"(?P<name>\S.*?[^ =]) (?P<failed>\.*F[.F-]*)",
)

FRAMEWORKS: Mapping[str, Parser] = {
    "pytest": log_layouts.parse_pytest,
    "unittest": log_layouts.parse_unittest,
    "sympy": LineFormat(
        rf"(?P<name>test_\w+)(?: .*)? {log_layouts.SYMPY_WORD}",
        r"(?P<failed>)_+ (?P<name>\S*:\w+) _+",  # the heading of a failure
        r"(?P<failed>)_+ \S*:(?P<name>test_\w+) _+",  # the test itself: its word may stand behind a forged line
        begun=r"(?P<name>test_\w+)(?: .*)?",
        word=log_layouts.SYMPY_WORD,
    ),
    "tox": log_layouts.parse_tox,
    "jest": _jest,
    "mocha": LineFormat(
        rf"(?:(?P<passed>[✓✔√])|(?P<failed>\d+\))|(?P<skipped>-)) {NAME}(?: \(\d+m?s\))?",
        until=r"\d+ (?:passing|failing)\b.*",  # below it the failures are listed by their suites
        resume=r"[✓✔√] .*",
    ),
    "vitest": LineFormat(
        rf"(?:(?P<passed>[✓√])|(?P<failed>[×✗])|(?P<skipped>[↓□])) {NAME}(?: {{1,2}}[\d.]+ ?m?s)?(?: \[skipped\])?",
    ),
    "karma": log_layouts.parse_karma,
    "tap": _tap,
    "cargo": log_layouts.parse_cargo,
    "gotest": LineFormat(
        r".*--- (?:(?P<passed>PASS)|(?P<failed>FAIL)|(?P<skipped>SKIP)): (?P<name>\S+)(?: \([\d.]+m?s\))?"
    ),
    "maven": log_layouts.parse_maven,
    "gradle": LineFormat(
        rf"(?!>)(?=.* > ){NAME} (?:(?P<passed>PASSED)|(?P<failed>FAILED)|(?P<skipped>SKIPPED))",
        begun=r"(?!>)(?=.* > )(?P<name>.*)",
        word=r"(?P<passed>PASSED)|(?P<failed>FAILED)|(?P<skipped>SKIPPED)",
    ),
    "ant": LineFormat(rf"\[junit\]\s+\[(?:(?P<passed>PASS)|(?P<failed>FAIL|ERR))\]\s+{NAME}"),
    "rspec": log_layouts.parse_rspec,
    "rspec_json": LineFormat(rf"{NAME} - (?:(?P<passed>passed)|(?P<failed>failed)|(?P<skipped>pending))"),
    "minitest": _minitest,
    "ruby_unit": LineFormat(
        rf"(?:test: )?{NAME}:\s+(?:(?P<passed>\.)|(?P<failed>[EF])|(?P<skipped>[OPN]))(?:: \([\d.]+\))?"
    ),
    "cucumber": _cucumber,
    "phpunit": log_layouts.parse_phpunit,
    "ctest": LineFormat(
        r"\d+/\d+ Test +#\d+: (?>(?P<name>\S(?:.*?\S)??) \.+(?: +(?P<passed>Passed)(?= +[\d.]+ sec)"
        r"|(?P<skipped>\*\*\*(?:Skipped|Not Run \(Disabled\)))(?= +[\d.]+ sec)|(?P<failed>\*\*\*)))"
        r".*?(?<! ) +[\d.]+ sec.*"
    ),
    "googletest": LineFormat(
        rf"{_GOOGLETEST_WORD}{NAME} \([\d.]+ m?s\)",
        rf"{_GOOGLETEST_WORD}(?P<name>[^\s,]+), where .* \([\d.]+ m?s\)",  # of a test with a parameter
    ),
    "doctest": log_layouts.parse_doctest,
    "redis": LineFormat(
        rf"\[(?:(?P<passed>ok)|(?P<failed>err|exception|timeout)|(?P<skipped>skip|ignore))\]: {NAME}(?: \(\d+ m?s\))?",
        rf"\[(?P<failed>err|exception|timeout)\]: {NAME} in \S+",
    ),
    "automake": LineFormat(
        rf"(?:(?P<passed>PASS)|(?P<failed>FAIL|ERROR|XPASS)|(?P<xfailed>XFAIL)|(?P<skipped>SKIP)): {NAME}"
    ),
    "micropython": LineFormat(rf"(?:(?P<passed>pass)|(?P<failed>FAIL)|(?P<skipped>skip))\s+{NAME}"),
    "jasmine_failures": LineFormat(rf"(?P<failed>\d+\)) {NAME}"),
    "jest_files": LineFormat(rf"(?:(?P<passed>PASS)|(?P<failed>FAIL)) {NAME}(?: \([\d.]+ ?m?s\))?"),
}
"""Name of a test framework -> its parser."""


def _immutable_js(lines: list[str]) -> Outcomes:
    yield from _jest(lines)
    yield from _jest_json(lines)


def _jekyll(lines: list[str]) -> Outcomes:
    yield from _minitest(lines)
    yield from _cucumber(lines)


_PYTEST_NAMES = "astroid astropy flask marshmallow pvlib pytest_v2 pyvista scikit seaborn sphinx sqlfluff xarray"
SWE_BENCH: Mapping[str, Parser] = {
    **dict.fromkeys(_PYTEST_NAMES.split(), FRAMEWORKS["pytest"]),
    **dict.fromkeys(("pytest_options", "pydicom", "requests", "pylint"), log_layouts.parse_pytest_options),
    "matplotlib": log_layouts.parse_matplotlib,
    "django": FRAMEWORKS["unittest"],
    "jest_json": _jest_json,
    "immutable_js": _immutable_js,
    "marked": FRAMEWORKS["jasmine_failures"],
    "react_pdf": FRAMEWORKS["jest_files"],
    "jq": FRAMEWORKS["automake"],
    "micropython_test": FRAMEWORKS["micropython"],
    "gradle_custom": FRAMEWORKS["gradle"],
    "rspec_transformed_json": FRAMEWORKS["rspec_json"],
    "jekyll": _jekyll,
}
"""Names of SWE-bench's parsers that are not those of a framework. The others, which SWE-bench Multimodal names after
its repositories, spell tests by rules of each repository and are unknown here."""
PARSERS: Mapping[str, Parser] = {**FRAMEWORKS, **SWE_BENCH}


class NamesTooLongError(ValueError):
    """A log repeats a long name, as of a group, in the names of so many tests that they do not fit into memory."""


def parser_of(name: str) -> Parser:
    """Returns the parser of that name, with or without the prefix. Raises UserError for an unknown name."""
    parser = PARSERS.get(name.removeprefix("parse_log_"))
    if parser is None:
        raise UserError(f"the log parser {name!r} is unknown; use one of {', '.join(sorted(PARSERS))}")
    return parser


def parse(parser: str, log: str) -> dict[str, str]:
    """Returns test name -> PASSED, FAILED, SKIPPED or XFAILED of suites/judge.py.

    Raises UserError for an unknown parser, and NamesTooLongError if the names of all tests have more than 2**24
    characters and more than four times those of the log.
    """
    outcomes: dict[str, str] = {}
    max_chars = max(_NAME_CHARS, 4 * len(log))
    chars = 0
    for name, outcome in parser_of(parser)([_COLOURS.sub("", line).rstrip("\r") for line in log.split("\n")]):
        chars += len(name)
        if chars > max_chars:
            raise NamesTooLongError(f"the names of its tests have more than {max_chars} characters")
        outcomes[name] = max(outcomes.get(name, PASSED), outcome, key=_BADNESS.index)
    return outcomes
