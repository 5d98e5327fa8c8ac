"""What is kept of a long output: its head and its tail."""

from __future__ import annotations

import asyncio

CHUNK = 65536


class Kept:
    """The head and the tail of a stream of which at most `room` bytes are kept."""

    def __init__(self, room: int):
        self._half = room // 2
        self._head, self._tail = bytearray(), bytearray()
        self.dropped = 0

    async def read(self, stream: asyncio.StreamReader) -> None:
        """All of a stream."""
        while data := await stream.read(CHUNK):
            self.add(data)

    async def read_to(self, stream: asyncio.StreamReader, mark: bytes) -> bytes | None:
        """What comes before a mark; the rest of the mark's line, or None where the stream ends without one."""
        pending = b""
        try:
            while data := await stream.read(CHUNK):
                pending += data
                start = pending.find(mark)
                if start < 0:
                    safe = max(0, len(pending) - len(mark))
                    self.add(pending[:safe])
                    pending = pending[safe:]
                elif (end := pending.find(b"\n", start + len(mark))) >= 0:
                    told, pending = pending[start + len(mark) : end], pending[:start]
                    return told
            return None
        finally:  # also of who waits no longer
            self.add(pending)

    def add(self, data: bytes) -> None:
        take = min(len(data), self._half - len(self._head))
        self._head += data[:take]
        self._tail += data[take:]
        if (over := len(self._tail) - self._half) > 0:
            self.dropped += over
            del self._tail[:over]

    def bytes(self) -> bytes:
        middle = f"\n[... {self.dropped} bytes left out ...]\n".encode() if self.dropped else b""
        return bytes(self._head) + middle + bytes(self._tail)

    def text(self) -> str:
        return self.bytes().decode("utf-8", errors="replace")
