"""RL at scale on paper: rl/group_buffer.py over simulated learners, rollout engines and sandboxes, event by event."""
