"""Parsers of logs in which the outcome of a test needs more than its own line: sections, suites, output in between."""

import re
import xml.etree.ElementTree as ElementTree
from collections import deque
from collections.abc import Iterator

from composer_jax.tasks.grading.line_format import NAME, LineFormat, Outcomes, outcome_of_match
from composer_jax.tasks.suites.judge import FAILED, PASSED, SKIPPED, XFAILED

SYMPY_WORD = r"(?:(?P<passed>ok)|(?P<failed>[FEXT])|(?P<xfailed>f)|(?P<skipped>[sw]))(?: +\[(?:OK|FAIL)\])?"
"""What sympy's runner prints behind the name of a test."""

_PYTEST_WORDS = {
    "PASSED": PASSED,
    "FAILED": FAILED,
    "ERROR": FAILED,
    "SKIPPED": SKIPPED,
    "XFAIL": XFAILED,
    "XPASS": FAILED,
}
_WORD = rf"(?P<word>{'|'.join(_PYTEST_WORDS)})"
_SUMMARY_LINE = re.compile(rf"{_WORD} (?P<name>\S.*)")
# Of pytest 9, and of the plugin pytest-subtests before: the summary has the test as passed as well.
_FAILED_SUBTEST = re.compile(r"(?:SUBFAILED.*?|.*? SUBFAIL) (?P<name>[^\s:]+::\S.*)")
_PERCENT = r"(?: +\[ *\d+%\])?"
_PROGRESS_LINES = (
    re.compile(rf"(?P<name>[^\s:]+::\S.*?) {_WORD}{_PERCENT}"),
    re.compile(rf"(?=.*\){_PERCENT}$)(?P<name>[^\s:]+::\S.*?) {_WORD} \(.*"),  # with a reason
    re.compile(rf"\[gw\d+\](?: \[ *\d+%\])? {_WORD} (?P<name>[^\s:]+::\S.*)"),  # of pytest-xdist
)
_HEADING = re.compile(r"=+ (\S.*) =+")
_SUMMARY, _START = "short test summary info", "test session starts"


def parse_pytest(lines: list[str]) -> Outcomes:
    """Parses pytest of any version, with -rA or -v.

    With -rA only lines below the last summary heading count, because tests print above it; it names no skipped tests,
    so those are taken from the lines of progress. Without -rA, and in old versions, the lines of progress count: the
    status behind the id, above the first section of failures.
    """
    summary: list[tuple[str, str]] = []
    progress: list[tuple[str, str]] = []
    section = _START
    for line in map(str.strip, lines):
        if match := _HEADING.fullmatch(line):
            section = match[1]
            summary = [] if section == _SUMMARY else summary
        elif section == _SUMMARY:
            if match := _SUMMARY_LINE.match(line):
                summary += _of_summary(match["word"], match["name"].strip())
            elif match := _FAILED_SUBTEST.match(line):
                summary += _of_summary("FAILED", match["name"])
        elif section == _START:
            matches = (pattern.fullmatch(line) for pattern in _PROGRESS_LINES)
            progress += [(match["name"], _PYTEST_WORDS[match["word"]]) for match in matches if match]
    yield from summary
    names_passed = any(outcome in (PASSED, XFAILED) for _, outcome in summary)
    yield from (result for result in progress if result[1] == SKIPPED or not names_passed)


def _of_summary(word: str, rest: str) -> Outcomes:
    """Yields the test of a line of the summary, whose reason follows " - " behind the id."""
    if word == "SKIPPED" and rest.startswith("["):  # "SKIPPED [2] file:line: reason" names no test
        return
    yield rest if word == "PASSED" else _id_before_reason(rest), _PYTEST_WORDS[word]


def _id_before_reason(text: str) -> str:
    """Returns the text before the first " - " at which its brackets are closed (judge.is_truncated), or all of it."""
    opened = closed = start = 0
    for separator in re.finditer(" - ", text):
        end = separator.start()
        opened += text.count("[", start, end)
        closed += text.count("]", start, end)
        start = end
        if not opened or (text[end - 1] == "]" and opened <= closed):
            return text[:end]
    return text


def parse_pytest_options(lines: list[str]) -> Outcomes:
    """Parses pytest where parameters are paths of the machine: of "[/a/b/c]" the id keeps "[/c]"."""
    for name, outcome in parse_pytest(lines):
        head, bracket, option = name.partition("[")
        is_path = option.startswith("/") and not option.startswith("//") and "*" not in option
        yield (f"{head}{bracket}/{option.rpartition('/')[2]}" if is_path else name), outcome


def parse_matplotlib(lines: list[str]) -> Outcomes:
    """Parses pytest with the buttons of a mouse as numbers, as matplotlib's older versions print them."""
    buttons = (("MouseButton.LEFT", "1"), ("MouseButton.RIGHT", "3"))
    for old, new in buttons:
        lines = [line.replace(old, new) for line in lines]
    return parse_pytest(lines)


_ID = re.compile(r"(?P<base>[^\s(]+ \([\w.]+\))(?: [\[(].*[\])])?")  # behind it the parameters of a subtest
_ID_AT_END = re.compile(r"(?<!\w)\w+ \(\w+(?:\.\w+)+\)$")
_BEGUN = re.compile(r"(?P<name>\S.*?) \.\.\. *(?P<rest>.*)")
_UNITTEST_WORD = (
    r"(?P<passed>ok)|(?P<failed>FAIL|ERROR|unexpected success)|(?P<xfailed>expected failure)|(?P<skipped>skipped\b.*)"
)
_ON_THE_LINE = re.compile(rf"{_UNITTEST_WORD}|(?i:ok)")
_BY_ITSELF = re.compile(_UNITTEST_WORD)
_BEHIND_OUTPUT = re.compile(r".*?(?:(?P<passed>ok)|(?P<failed>FAIL|ERROR))")
_FAILURE = re.compile(r"(?:FAIL|ERROR|UNEXPECTED SUCCESS): (?P<name>\S.*)")
_ABOVE_FAILURE, _BELOW_FAILURE = "=" * 70, "-" * 70


def parse_unittest(lines: list[str]) -> Outcomes:
    """Parses unittest and Django's runner with verbosity 2.

    What a test prints stands between its "..." and its word, in any number of lines. A test with a docstring has two
    lines and both names. The outcome of a subtest is also one of its test.
    """
    names: list[str] = []  # of the test whose word has not come
    last, previous, is_below_failure = "", "", False
    for line in map(str.strip, lines):
        failure = _FAILURE.fullmatch(line)
        if is_below_failure and line != _BELOW_FAILURE:
            yield line, FAILED  # its docstring
        is_below_failure = failure is not None and previous == _ABOVE_FAILURE
        if failure and (is_below_failure or _ID.fullmatch(failure["name"])):
            yield from ((name, FAILED) for name in _spellings(failure["name"], ""))
        elif (begun := _BEGUN.fullmatch(line)) and (not names or _is_test(begun["name"], previous)):
            yield from _behind_output(names, last)
            names, last = _spellings(begun["name"], previous), begun["rest"]
            if match := _ON_THE_LINE.fullmatch(last):
                outcome = outcome_of_match(match) if match.lastgroup else PASSED
                yield from ((name, outcome) for name in names)
                names = []
        elif names and (match := _BY_ITSELF.fullmatch(line)):
            yield from ((name, outcome_of_match(match)) for name in names)
            names = []
        elif line == _ABOVE_FAILURE:
            yield from _behind_output(names, last)
            names = []
        elif line:
            last = line
        previous = line
    yield from _behind_output(names, last)


def _is_test(name: str, previous: str) -> bool:
    """Whether a name is that of a test and not the output of one: an id, or a docstring below an id."""
    return bool(_ID.fullmatch(name) or _ID_AT_END.search(name) or _ID.fullmatch(previous))


def _spellings(name: str, previous: str) -> list[str]:
    """Returns the names of a test: as printed, without what was printed before it, without its subtest, its id."""
    names = [name, *(match[0] for match in [_ID_AT_END.search(name)] if match)]
    names += [match["base"] for match in (_ID.fullmatch(name), _ID.fullmatch(previous)) if match]
    return list(dict.fromkeys(names))


def _behind_output(names: list[str], last: str) -> Outcomes:
    """Yields the outcome of tests whose word stands behind output without a line end: "workingok"."""
    if match := _BEHIND_OUTPUT.fullmatch(last):
        yield from ((name, outcome_of_match(match)) for name in names)


_TOX_COMMAND = re.compile(r"\S+: commands(?:_pre|_post)?\[\d+\]> .*|\S+ run-test: commands\[\d+\] \| .*")
_tox_environments = LineFormat(
    r"(?:ERROR: +)?(?P<name>[\w.-]+): (?:(?P<passed>OK|commands succeeded)|(?P<failed>FAIL|commands failed)"
    r"|(?P<skipped>SKIP|skipped tests))\b.*"
)


def parse_tox(lines: list[str]) -> Outcomes:
    """Parses tox: its environments by name, and the tests that pytest and unittest name in each of them."""
    yield from _tox_environments(lines)
    starts = [number for number, line in enumerate(lines) if _TOX_COMMAND.fullmatch(line)]
    for start, end in zip([0, *starts], [*starts, len(lines)], strict=True):
        yield from parse_pytest(lines[start:end])
        yield from parse_unittest(lines[start:end])


_cargo_lines = LineFormat(
    rf"test {NAME} \.\.\. (?:(?P<passed>ok)|(?P<failed>FAILED)|(?P<skipped>ignored))(?:,.*)?",
    rf"test {NAME} - should panic \.\.\. (?:(?P<passed>ok)|(?P<failed>FAILED))",
    rf"(?:(?P<passed>PASS)|(?P<failed>FAIL|TIMEOUT|SIGABRT|SIGSEGV)) \[ *[\d.]+s\] (?:\(.*?\) )?{NAME}",  # nextest
    begun=rf"test {NAME} \.\.\..*",
    word=r"(?P<passed>ok)|(?P<failed>FAILED)",
)


def parse_cargo(lines: list[str]) -> Outcomes:
    """Parses cargo test and cargo-nextest: a line for each test, and the list of those that failed.

    With --nocapture, code under test can print a line that begins another test, which then gets the word of the test
    that runs. The list names that test.
    """
    yield from _cargo_lines(lines)
    is_list = False
    for line in lines:
        is_list = line == "failures:" or (is_list and line.startswith("    "))
        if is_list and line != "failures:":
            yield line.strip(), FAILED


_KARMA_LINE = re.compile(r"(?P<indent>\s*)(?P<mark>[✔✖])?\s(?P<name>.*)")


def parse_karma(lines: list[str]) -> Outcomes:
    """Parses Karma's mocha reporter: suites above their tests, "suite > test".

    SWE-bench's names differ from the indentation in two ways. A suite as deep as the suite before it is left out: its
    tests stay in that suite. A suite that is less deep is left out too, and one suite is closed.
    """
    suites: list[str] = []
    depth, started = -1, False
    for line in lines:
        if line.startswith("SUMMARY:"):  # the script may start Karma again
            suites, depth, started = [], -1, False
        if not started:
            started = "Starting browser" in line
            continue
        if not (match := _KARMA_LINE.fullmatch(line)):
            continue
        indent = len(match["indent"])
        if match["mark"]:
            yield " > ".join([*suites, match["name"]]), PASSED if match["mark"] == "✔" else FAILED
        elif indent > max(depth, 0):
            suites.append(match["name"])
            depth = indent
        elif 0 < indent < depth:
            suites = suites[:-1]
            depth = indent


_PHPUNIT_TEST = re.compile(r"\s*(?:(?P<passed>✔)|(?P<failed>✘)|(?P<skipped>[↩∅☢])) (?P<name>\S.*?)(?: \[[\d.]+ m?s\])?")


def parse_phpunit(lines: list[str]) -> Outcomes:
    """Parses PHPUnit's --testdox: "Suite > Test"."""
    suite = ""
    for line in lines:
        if match := _PHPUNIT_TEST.fullmatch(line.rstrip()):
            yield f"{suite} > {match['name']}", outcome_of_match(match)
        elif line[:1].isalnum():  # "Calc" or "Calc (Namespace\\CalcTest)"
            suite = line.rpartition(" (")[0] if line.rstrip().endswith(")") else line.rstrip()


_RSPEC_END = re.compile(r"(?:Pending:.*|Failures:|Finished in .*)")
_RSPEC_COUNT = re.compile(r"\d+ examples?, ")
_RSPEC_WORD = re.compile(r"(?=.*\)$)(?P<name>\S.*?) \((?:(?P<failed>FAILED)|(?P<skipped>PENDING)).*")


def parse_rspec(lines: list[str]) -> Outcomes:
    """Parses RSpec's documentation format: a line with deeper lines below it is a group, the others are examples.

    The name of an example is its full description: those of its groups before it, separated by spaces.
    """
    texts = list(_rspec_texts(lines))
    depths = [len(line) - len(line.lstrip()) for line in texts]
    groups: list[tuple[int, str]] = []
    for text, depth, following in zip(texts, depths, [*depths, 0][1:], strict=True):
        groups = [group for group in groups if group[0] < depth]
        name = text.strip()
        match = _RSPEC_WORD.fullmatch(name)
        if match is None and following > depth:
            groups.append((depth, name))
        elif groups:
            full = " ".join([*(group for _, group in groups), match["name"] if match else name])
            yield full, outcome_of_match(match) if match else PASSED


def _rspec_texts(lines: list[str]) -> Iterator[str]:
    """Yields the lines of groups and examples of all runs, without those between the end of a run and the next run.

    A group without a group around it stands below an empty line; other lines without indentation are output.
    """
    has_ended = has_count = False
    for line, before in zip(lines, ["", *lines], strict=False):
        is_outermost = bool(line.strip()) and line[:1] != " " and not before.strip()
        if _RSPEC_END.fullmatch(line):
            has_ended, has_count = True, False
        elif has_ended:
            has_count = has_count or _RSPEC_COUNT.match(line) is not None
            has_ended = not (has_count and is_outermost)
        if not has_ended and line.strip() and (is_outermost or line[:1] == " "):
            yield line


_DTEST = re.compile(r"-Dtest=(\S+)")
_BUILD_END = re.compile(r"BUILD (SUCCESS|FAILURE)\b")
_RUNNING = re.compile(r"(?:\[INFO\] )?Running (?P<name>[\w.$]+)")
_CLASS = re.compile(
    r"(?:\[\w+\] )?Tests run: (?P<run>\d{1,9}), Failures: (?P<failures>\d{1,9}), Errors: (?P<errors>\d{1,9}), "
    r"Skipped: (?P<skips>\d{1,9}), Time elapsed: [\d.,]+ s(?:ec)?(?: <<< \w+!)?(?: --? in (?P<name>[\w.$]+))?"
)
_METHOD = re.compile(
    r"(?:\[\w+\] )?(?P<name>\S.*?)(?: --)? {1,2}Time elapsed: [\d.,]+ s(?:ec)? +<<< (?:FAILURE|ERROR)!"
)


def parse_maven(lines: list[str]) -> Outcomes:
    """Parses Maven's Surefire, which names its test classes and, of their methods, those that failed.

    SWE-bench runs each test by itself under `set -x`: then the test of each -Dtest= has the outcome of its build.
    """
    pending: deque[str] = deque()
    running = ""
    for line in map(str.strip, lines):
        if match := _DTEST.search(line):
            pending.append(match[1])
        if (match := _BUILD_END.search(line)) and pending:
            yield pending.popleft(), PASSED if match[1] == "SUCCESS" else FAILED
        if match := _RUNNING.fullmatch(line):
            running = match["name"]
        elif (match := _CLASS.fullmatch(line)) and int(match["run"]):
            broken = int(match["failures"]) + int(match["errors"])
            all_skipped = match["run"] == match["skips"]
            yield match["name"] or running, FAILED if broken else SKIPPED if all_skipped else PASSED
        elif match := _METHOD.fullmatch(line):
            yield match["name"], FAILED


def parse_doctest(lines: list[str]) -> Outcomes:
    """Parses the XML reporter of doctest (C++): "test case > subcase", and the test case by itself."""
    for document in "\n".join(lines).split("<doctest ")[1:]:
        body, end, _ = document.rpartition("</doctest>")
        try:
            root = ElementTree.fromstring(f"<doctest {body}{end}")
        except (ElementTree.ParseError, ValueError):
            continue
        yield from _of_doctest(root)


def _of_doctest(root: ElementTree.Element) -> Outcomes:
    for case in root.iterfind("*/TestCase"):
        results = case.find("OverallResultsAsserts")
        if case.get("skipped") == "true" or results is None:
            yield case.get("name", ""), SKIPPED
            continue
        yield case.get("name", ""), PASSED if results.get("test_case_success") == "true" else FAILED
        failed = _with_failures(case)
        for subcase in case.iter("SubCase"):
            yield f"{case.get('name', '')} > {subcase.get('name', '')}", FAILED if subcase in failed else PASSED


def _with_failures(case: ElementTree.Element) -> set[ElementTree.Element]:
    """Returns the elements in which an expression failed, at any depth."""
    parents = {child: parent for parent in case.iter() for child in parent}
    failed: set[ElementTree.Element] = set()
    for entry in case.iter("Expression"):
        element = entry if entry.get("success") == "false" else None
        while element is not None and element not in failed:
            failed.add(element)
            element = parents.get(element)
    return failed
