"""Identifiers of answers and calls."""

import secrets


def new_id(kind: str) -> str:
    """Returns an identifier that nobody can guess, such as "call_5f0a..."."""
    return f"{kind}-{secrets.token_hex(12)}" if kind in ("chatcmpl", "cmpl") else f"{kind}_{secrets.token_hex(12)}"
