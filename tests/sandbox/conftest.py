"""Shared with the attacks."""

from tests.sandbox.fixtures import LIMITS, REPOSITORY, as_another_user, host, pool, run_python, trace

__all__ = ["LIMITS", "REPOSITORY", "as_another_user", "host", "pool", "run_python", "trace"]
