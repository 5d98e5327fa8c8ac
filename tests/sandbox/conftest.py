"""Shared with the attacks."""

from tests.sandbox.fixtures import LIMITS, host, pool, run_python, trace

__all__ = ["LIMITS", "host", "pool", "run_python", "trace"]
