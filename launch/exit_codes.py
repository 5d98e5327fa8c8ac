"""Exit codes of the entry points, and the sentence about each error that a user can act on."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from composer_jax.errors import BAD_INPUT, OtherProcessError, UserError

FAILED = 1
"""Also Python's own, after a traceback."""
NO_SPACE = 3
INTERRUPTED = 130
"""128 + SIGINT, as in shells."""


def exit_reason(error: BaseException, command: str, *, has_workdir: bool) -> tuple[int, str] | None:
    """Returns (exit code, sentence), or None for an unexpected error, whose traceback is then shown.

    command: the command line, for the sentence on how to continue.
    has_workdir: whether the entry point has a run folder, from which the same command continues.
    """
    leaves = list(_leaves(error))
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        if not has_workdir:
            return INTERRUPTED, "stopped."
        return INTERRUPTED, f"stopped. What was saved is kept; the same command continues: {command}"
    if all(isinstance(leaf, UserError) for leaf in leaves):
        return BAD_INPUT, " ".join(str(leaves[0]).split())
    if all(isinstance(leaf, OtherProcessError) for leaf in leaves):
        return FAILED, " ".join(str(leaves[0]).split())
    for cause in (cause for leaf in leaves for cause in _causes(leaf)):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" ({cause.filename})" if cause.filename else ""
            saved = "what was saved is kept; free some space and continue"
            advice = saved if has_workdir else "free some space and try again"
            return NO_SPACE, f"{cause.strerror}{where}; {advice}: {command}"
    return None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors inside exception groups, in which task groups wrap the errors of their tasks."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()  # `raise error from error` makes an error its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
