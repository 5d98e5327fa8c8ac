"""Tasks from a Python repository: changes that break it, graded by the repository's own tests."""
