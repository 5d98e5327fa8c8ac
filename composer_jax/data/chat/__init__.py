"""Conversations as token ids: messages, chat formats and templates, tool calls, and the text side of a model."""
