"""Reinforcement learning: algorithm (pure), rewards, batches, rollouts, and the orchestrator that joins the roles."""
