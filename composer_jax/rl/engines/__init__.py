"""Engines in processes of their own, which only sample: the learner's end of them, and the engine's end."""
