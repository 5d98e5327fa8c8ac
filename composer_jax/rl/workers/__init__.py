"""Rollout workers: processes, on any machine, that play episodes in their own sandboxes and sample from the trainer."""
