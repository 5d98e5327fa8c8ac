"""The handshake of two ends: each proves with HMAC-SHA256 that it knows the token, which is never sent.

The end that listens sends a challenge. The end that connects answers with its proof, a challenge of its own and what it
is. The first one sends its proof and then its welcome, such as what episodes need. What follows is neither encrypted
nor signed: the network between them must be trusted.
"""

import asyncio
import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_jax.errors import UserError
from composer_jax.frames import encode_frame, read_frame

PROTOCOL = 5
"""Version of the messages; the end that connects refuses another version."""
HANDSHAKE_S = 10.0
"""Seconds in which a new connection completes the handshake, or is closed."""
SETUP_S = 60.0
"""Seconds in which the welcome arrives, which has the tokenizer where a worker gets it."""
MAX_HANDSHAKE_BYTES = 4096
"""Largest frame before the other end has proved that it knows the token."""
MIN_TOKEN = 16
"""Fewest characters of a token."""


@dataclass(frozen=True)
class HandshakeRoles:
    """What the two ends are. The names are parts of the proofs, so a proof of one role is none of another."""

    listening: str
    connecting: str


WORKERS = HandshakeRoles("trainer", "worker")
"""Of a rollout worker's connection."""
ENGINES = HandshakeRoles("engine", "learner")
"""Of a learner's connection to an engine."""


class HandshakeError(Exception):
    """The other end does not know the token, or speaks another protocol."""


async def accept(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token: str,
    roles: HandshakeRoles,
    welcome: dict[str, Any],
) -> dict[str, Any]:
    """The part of the end that listens: returns how the other end describes itself.

    welcome: goes to an end that knows the token.

    Raises:
      HandshakeError: the other end does not know the token.
      FrameError, TimeoutError, asyncio.IncompleteReadError, OSError: it speaks otherwise, is slow, or is gone.
    """
    async with asyncio.timeout(HANDSHAKE_S):
        ours = secrets.token_hex(32)
        writer.write(encode_frame({"protocol": PROTOCOL, "challenge": ours}))
        header, _ = await read_frame(reader, MAX_HANDSHAKE_BYTES)
        theirs = str(header.get("challenge", ""))
        if not hmac.compare_digest(str(header.get("proof", "")), _proof(token, roles.connecting, ours, theirs)):
            writer.write(encode_frame({"refused": "the token is another"}))
            await writer.drain()
            raise HandshakeError("it does not know the token")
        writer.write(encode_frame({"proof": _proof(token, roles.listening, ours, theirs)}))
        writer.write(encode_frame(welcome))
        return header[roles.connecting]


async def join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token: str,
    roles: HandshakeRoles,
    description: dict[str, Any],
) -> dict[str, Any]:
    """The part of the end that connects: returns the `welcome` of the end that listens.

    description: goes to an end that knows the token.

    Raises:
      HandshakeError: the other end refuses the token, does not know it, or has another version.
      FrameError, TimeoutError, asyncio.IncompleteReadError, OSError: it speaks otherwise, is slow, or is gone.
    """
    async with asyncio.timeout(HANDSHAKE_S):
        header, _ = await read_frame(reader, MAX_HANDSHAKE_BYTES)
        if header.get("protocol") != PROTOCOL:
            raise HandshakeError(
                f"its protocol has version {header.get('protocol')} and this one {PROTOCOL}; install the same version"
            )
        theirs, ours = str(header.get("challenge", "")), secrets.token_hex(32)
        proof = _proof(token, roles.connecting, theirs, ours)
        writer.write(encode_frame({"challenge": ours, "proof": proof, roles.connecting: description}))
        header, _ = await read_frame(reader, MAX_HANDSHAKE_BYTES)
        if "refused" in header:
            raise HandshakeError(f"it refuses this {roles.connecting}: {header['refused']}")
        if not hmac.compare_digest(str(header.get("proof", "")), _proof(token, roles.listening, theirs, ours)):
            raise HandshakeError("it does not know the token")
    async with asyncio.timeout(SETUP_S):
        welcome, _ = await read_frame(reader)
    return welcome


def _proof(token: str, role: str, listening_challenge: str, connecting_challenge: str) -> str:
    """The role keeps one end from sending the other's proof back."""
    message = f"composer_jax {role} {listening_challenge} {connecting_challenge}".encode()
    return hmac.new(token.encode(), message, hashlib.sha256).hexdigest()


def read_token(path: Path) -> str:
    """Returns the token in a file.

    Raises UserError if there is no such file, or its token is shorter than MIN_TOKEN.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"--token_file={path} cannot be read ({error.strerror}); copy the trainer's file.") from error
    if len(token) < MIN_TOKEN:
        raise UserError(f"--token_file={path} holds a token of {len(token)} characters; use at least {MIN_TOKEN}.")
    return token


def make_token(path: Path) -> str:
    """Returns the token in a file, which is made with a random token if there is none; only its owner can read it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise UserError(f"--token_file={path} cannot be written ({error.strerror}); name another file.") from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32) + "\n")
    return read_token(path)
