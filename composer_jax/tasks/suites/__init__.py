"""Test suites of repositories: run in a sandbox, judged outside of it."""
