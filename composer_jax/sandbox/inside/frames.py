"""The wire format between host and worker: two lengths, a JSON header, raw bytes."""

import json
import socket
import struct
from typing import Any

PREFIX = struct.Struct("<II")


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Returns one frame: u32 header length, u32 body length, the header as JSON (ASCII), the body."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((PREFIX.pack(len(text), len(body)), text, body))


def receive(sock: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """Reads one frame, blocking; returns None when the other side has closed the socket."""
    lengths = _exactly(sock, PREFIX.size)
    if lengths is None:
        return None
    header_length, body_length = PREFIX.unpack(lengths)
    text = _exactly(sock, header_length)
    body = _exactly(sock, body_length)
    if text is None or body is None:
        return None
    return json.loads(text), bytes(body)


def _exactly(sock: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view = memoryview(data)
    done = 0
    while done < count:
        got = sock.recv_into(view[done:])
        if got == 0:
            return None
        done += got
    return data
