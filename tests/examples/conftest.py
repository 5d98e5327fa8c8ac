"""Packages for the test suites of made-up repositories, as in the tests of tasks."""

from tests.tasks.conftest import packages

__all__ = ["packages"]
