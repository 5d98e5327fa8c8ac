"""Fixtures that the attacks use as well."""

from tests.sandbox.fixtures import LIMITS, REPOSITORY, as_another_user, folder, host, pool, run_python, trace
from tests.sandbox.landlock_fixtures import attack, landlock_pool

__all__ = [
    "LIMITS",
    "REPOSITORY",
    "as_another_user",
    "attack",
    "folder",
    "host",
    "landlock_pool",
    "pool",
    "run_python",
    "trace",
]
