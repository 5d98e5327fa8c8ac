"""Test suites of repositories: they run in a sandbox and are judged outside it."""
