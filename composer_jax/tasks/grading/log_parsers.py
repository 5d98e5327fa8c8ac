"""Parsers of test logs: one small function for each kind of test runner.

Their names are those in the field `log_parser` of SWE-bench 5 rows, without the prefix "parse_log_". If a log names a
test more than once, the worst status counts, so printing an extra "PASSED" gains nothing.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from composer_jax.errors import UserError

PASSED, FAILED, SKIPPED, XFAIL = "PASSED", "FAILED", "SKIPPED", "XFAIL"
_BADNESS = (PASSED, XFAIL, SKIPPED, FAILED)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

_PYTEST_WORDS = {
    "PASSED": PASSED,
    "FAILED": FAILED,
    "ERROR": FAILED,
    "SKIPPED": SKIPPED,
    "XFAIL": XFAIL,
    "XPASS": FAILED,
}
_PYTEST_LINE = re.compile(rf"({'|'.join(_PYTEST_WORDS)}) (\S.*)")
_PYTEST_SUMMARY = re.compile(r"=+ short test summary info =+")
_UNITTEST_LINE = re.compile(r"(\S+ \([\w.]+\)|\S.*?) \.\.\. (ok|FAIL|ERROR|skipped\b.*|expected failure)")
_GO_LINE = re.compile(r"\s*--- (PASS|FAIL|SKIP): (\S.*?)(?: \([\d.]+s\))?")
_CARGO_LINE = re.compile(r"test (\S.*?) \.\.\. (ok|FAILED|ignored)(?:,.*)?")
_MARK_LINE = re.compile(r"\s*([✓✔√✕✗✖×○↩∅-]|\d+\)) (\S.*?)(?: \(?\d+(?:\.\d+)? ?m?s\)?)?")
_GRADLE_LINE = re.compile(r"(\S.* > \S.*?) (PASSED|FAILED|SKIPPED)")
_ANT_LINE = re.compile(r"\[junit\]\s+\[(PASS|FAIL|ERR)\]\s+(\S.*)")
_MAVEN_TEST = re.compile(r"-Dtest=(\S+)")
_MAVEN_END = re.compile(r"BUILD (SUCCESS|FAILURE)\b")
_TAP_LINE = re.compile(r"(not )?ok \d+(?: -)? (\S.*?)(?: # (SKIP|TODO).*)?", re.IGNORECASE)

Statuses = Iterator[tuple[str, str]]


def parser_of(name: str) -> Callable[[list[str]], Statuses]:
    """Returns the parser of that name, with or without the prefix. Raises UserError for an unknown name."""
    parser = PARSERS.get(name.removeprefix("parse_log_"))
    if parser is None:
        raise UserError(f"the log parser {name!r} is unknown; use one of {', '.join(sorted(PARSERS))}")
    return parser


def parse(parser: str, log: str) -> dict[str, str]:
    """Returns test name -> PASSED, FAILED, SKIPPED or XFAIL. Raises UserError for an unknown parser."""
    statuses: dict[str, str] = {}
    for name, status in parser_of(parser)([_COLOURS.sub("", line).rstrip("\r") for line in log.split("\n")]):
        statuses[name] = max(statuses.get(name, PASSED), status, key=_BADNESS.index)
    return statuses


def _pytest(lines: list[str]) -> Statuses:
    """Parses `pytest -rA`: only lines below the last summary heading, because tests print above it."""
    heads = [number for number, line in enumerate(lines) if _PYTEST_SUMMARY.fullmatch(line.strip())]
    for line in lines[heads[-1] + 1 :] if heads else ():
        if match := _PYTEST_LINE.match(line):
            word, rest = match.groups()
            name = rest if word in ("PASSED", "XPASS") else rest.split(" - ")[0]
            if not (word == "SKIPPED" and rest.startswith("[")):  # "SKIPPED [2] file:line: reason" names no test
                yield name.strip(), _PYTEST_WORDS[word]


def _unittest(lines: list[str]) -> Statuses:
    words = {"ok": PASSED, "FAIL": FAILED, "ERROR": FAILED, "expected failure": XFAIL}
    for line in lines:
        if match := _UNITTEST_LINE.fullmatch(line.strip()):
            yield match[1], words.get(match[2], SKIPPED)
        elif line.partition(": ")[0] in ("FAIL", "ERROR"):
            yield line.partition(": ")[2].strip(), FAILED


def _by_words(pattern: re.Pattern[str], name: int, word: int, words: Mapping[str, str]) -> Callable[..., Statuses]:
    """Returns a parser of lines that match `pattern`; `name` and `word` are group numbers, `words` maps to a status."""

    def parse_lines(lines: list[str]) -> Statuses:
        for line in lines:
            if match := pattern.fullmatch(line.strip()):
                yield match[name], words[match[word]]

    return parse_lines


def _marks(lines: list[str]) -> Statuses:
    """Parses Jest, Vitest, Mocha and PHPUnit's testdox, which print a mark before each test."""
    for line in lines:
        if match := _MARK_LINE.fullmatch(line):
            mark = match[1]
            yield match[2], PASSED if mark in "✓✔√" else SKIPPED if mark in "○↩∅-" else FAILED


def _maven(lines: list[str]) -> Statuses:
    """Parses Maven, which names no passed test: each runs by itself under `set -x`, and its build succeeds or fails."""
    pending: list[str] = []
    for line in lines:
        if match := _MAVEN_TEST.search(line):
            pending.append(match[1])
        if (match := _MAVEN_END.search(line)) and pending:
            yield pending.pop(0), PASSED if match[1] == "SUCCESS" else FAILED


def _tap(lines: list[str]) -> Statuses:
    for line in lines:
        if match := _TAP_LINE.fullmatch(line.strip()):
            yield match[2], SKIPPED if match[3] else FAILED if match[1] else PASSED


_gradle = _by_words(_GRADLE_LINE, 1, 2, {"PASSED": PASSED, "FAILED": FAILED, "SKIPPED": SKIPPED})
PARSERS: Mapping[str, Callable[[list[str]], Statuses]] = {
    "pytest": _pytest,
    "pytest_v2": _pytest,
    "unittest": _unittest,
    "django": _unittest,
    "gotest": _by_words(_GO_LINE, 2, 1, {"PASS": PASSED, "FAIL": FAILED, "SKIP": SKIPPED}),
    "cargo": _by_words(_CARGO_LINE, 1, 2, {"ok": PASSED, "FAILED": FAILED, "ignored": SKIPPED}),
    "jest": _marks,
    "vitest": _marks,
    "mocha": _marks,
    "phpunit": _marks,
    "tap": _tap,
    "gradle": _gradle,
    "gradle_custom": _gradle,
    "ant": _by_words(_ANT_LINE, 2, 1, {"PASS": PASSED, "FAIL": FAILED, "ERR": FAILED}),
    "maven": _maven,
}
