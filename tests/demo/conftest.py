"""What the tests of the demo share with those of the agent: real sandboxes, a tokenizer, scripted sessions."""

from tests.agent.conftest import chat_format, pool, scripted_session, tok

__all__ = ["chat_format", "pool", "scripted_session", "tok"]
