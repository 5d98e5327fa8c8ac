"""The OpenAI-compatible endpoint over the rollout engine, and its control plane for trainers.

bodies.py says what a request may hold, message_stream.py turns sampled ids into content, reasoning and calls,
chat_completions.py, completions.py and responses.py write answers in the forms of OpenAI's API, and app.py routes.
"""
