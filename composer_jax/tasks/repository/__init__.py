"""Tasks from a real Python repository: ways to break it whose repair its own tests can judge."""
