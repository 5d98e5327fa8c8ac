"""Events on their way to the server: POST SERVER/events, with ids that make sending one twice harmless.

An event holds counts, hashes and identifiers (composer_jax/serve/traffic/records.py). Nothing else is sent, and nothing
to another address: redirects are not followed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_jax.errors import UserError
from composer_jax.realtime.http_client import WITHOUT_REDIRECTS
from composer_jax.serve.traffic.records import EVENT_FIELDS, EventKind

TIMEOUT_S = 30.0
"""Seconds for which an answer of the server is waited for."""
BATCH = 100
"""Events of one request."""


class ServerUnavailable(Exception):
    """The server cannot be reached or is busy: the events can be sent later. Its message says why."""


@dataclasses.dataclass(frozen=True)
class QueuedEvent:
    """An event that the server has not acknowledged."""

    id: str
    session: str
    kind: EventKind
    turn: str
    happened: float
    """Unix seconds by this machine's clock."""
    payload: Mapping[str, Any]


def queued_event(
    session: str, kind: EventKind, turn: str, happened: float, payload: Mapping[str, Any], since: float
) -> QueuedEvent:
    """Returns an event whose id is a hash of what it says, so that the same one is never counted twice.

    since: Unix seconds from which on the same event would be another one: when the agent stopped, or a test run began.
    """
    if payload.keys() != EVENT_FIELDS[kind].keys():
        raise ValueError(f"an event {kind} holds {sorted(EVENT_FIELDS[kind])}, not {sorted(payload)}")
    content = json.dumps([session, kind, turn, since, payload], sort_keys=True)
    return QueuedEvent(hashlib.sha256(content.encode()).hexdigest()[:32], session, kind, turn, happened, payload)


def check_server(url: str) -> str:
    """Returns the address of a server without a slash at its end. Raises UserError for any but http(s)."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_address = is_address and not (parts.query or parts.fragment)
    except ValueError:  # of the host's brackets or the port
        is_address = False
    if not is_address:
        raise UserError(f"--server={url} is not an address of a server; use http://HOST:PORT or https://HOST")
    return url.rstrip("/")


def send_events(
    server: str, api_key: str, events: Sequence[QueuedEvent], now: float
) -> Iterator[Sequence[QueuedEvent]]:
    """Sends events, BATCH at once, and yields each batch when the server has acknowledged it.

    api_key: "" for a server that needs none.
    now: Unix seconds by this machine's clock, against which ages are reported.

    Raises:
      ServerUnavailable: no connection, or the server answers 408, 425, 429 or 5xx.
      UserError: the server refuses the events.
    """
    for start in range(0, len(events), BATCH):
        batch = events[start : start + BATCH]
        rows = [
            {
                "id": event.id,
                "session": event.session,
                "kind": event.kind,
                "turn": event.turn,
                "age": max(0.0, now - event.happened),
                "payload": event.payload,
            }
            for event in batch
        ]
        _post(f"{server}/events", api_key, json.dumps({"events": rows}).encode(), batch[0].session)
        yield batch


def _post(url: str, api_key: str, body: bytes, session: str) -> None:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    try:
        with WITHOUT_REDIRECTS.open(request, timeout=TIMEOUT_S) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        with error:
            _raise_refusal(url, session, error)
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
        reason = getattr(error, "reason", None) or error
        raise ServerUnavailable(f"{url} cannot be reached ({reason})") from error


def _raise_refusal(url: str, session: str, error: urllib.error.HTTPError) -> None:
    message = " ".join(error.read(2000).decode(errors="replace").split())[:300] or error.reason
    if error.code in (408, 425, 429) or error.code >= 500:
        raise ServerUnavailable(f"{url} answered {error.code} ({message})") from error
    if error.code in (401, 403):
        raise UserError(
            f"{url} refuses the key for session {session!r} ({error.code}); --api_key has to be the key with which the "
            "session was opened"
        ) from error
    if error.code == 404:
        raise UserError(
            f"{url} does not know session {session!r} (404); --session has to be the X-Session-ID of requests that "
            "were sent with X-Consent: training or evals to a server that runs with --traffic"
        ) from error
    if 300 <= error.code < 400:
        where = error.headers.get("Location", "another address")
        raise UserError(f"{url} redirects to {where}; name the server itself in --server") from error
    raise UserError(
        f"{url} refuses events of session {session!r} ({error.code}: {message}); correct --turn, or update the client"
    ) from error
