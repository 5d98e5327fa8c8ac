"""Logs whose lines name one test each: the patterns that describe such a log, and the parser of them."""

import re
from collections.abc import Callable, Iterator

from composer_jax.tasks.suites.judge import FAILED, PASSED, SKIPPED, XFAILED

Outcomes = Iterator[tuple[str, str]]
"""(test name, outcome) pairs."""
Parser = Callable[[list[str]], Outcomes]
"""Parses the lines of a log, without colours and line ends."""
NAME = r"(?P<name>\S.*?)"
"""Pattern of the name of a test, as short as what follows allows."""
_GROUPS = {"passed": PASSED, "failed": FAILED, "skipped": SKIPPED, "xfailed": XFAILED}


class LineFormat:
    """A parser of lines that match patterns.

    Tested code can print lines of any length, so a pattern must fail in time that is linear in the line.

    Args:
      patterns: of a whole line without the white space around it. The group `name` is the test; the group that took
        part, of `passed`, `failed`, `skipped` and `xfailed`, is its outcome. A line that several patterns match names
        the test in several spellings.
      begun: pattern of a line with the name of a test whose word follows on a line of its own, below what the test
        printed. The code under test can print such words too, so all of them count. word: pattern of that line.
      until: pattern of the line below which nothing is read. resume: pattern of the line from which on lines are read
        again, for scripts that start the framework more than once.
    """

    def __init__(
        self,
        *patterns: str,
        begun: str | None = None,
        word: str | None = None,
        until: str | None = None,
        resume: str | None = None,
    ):
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._begun, self._word, self._until, self._resume = (
            None if text is None else re.compile(text) for text in (begun, word, until, resume)
        )

    def __call__(self, lines: list[str]) -> Outcomes:
        waiting, has_ended = None, False
        for line in map(str.strip, lines):
            if self._until and self._until.fullmatch(line):
                has_ended = True
            elif self._resume and self._resume.fullmatch(line):
                has_ended = False
            if has_ended:
                continue
            matches = [match for pattern in self._patterns if (match := pattern.fullmatch(line))]
            for match in matches:
                yield match["name"], outcome_of_match(match)
            if matches:
                waiting = None
            elif waiting is not None and self._word and (match := self._word.fullmatch(line)):
                yield waiting, outcome_of_match(match)
            elif self._begun and (match := self._begun.fullmatch(line)):
                waiting = match["name"]


def outcome_of_match(match: re.Match[str]) -> str:
    """Returns the outcome of the group that took part in a match."""
    groups = match.groupdict()
    return next(outcome for group, outcome in _GROUPS.items() if groups.get(group) is not None)
