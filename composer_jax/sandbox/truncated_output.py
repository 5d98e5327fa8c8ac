"""What is kept of a long output: its head and its tail."""

from __future__ import annotations

import asyncio

CHUNK = 65536


class TruncatedOutput:
    """The head and the tail of a stream of which at most `room` bytes are kept."""

    def __init__(self, room: int):
        self._half = room // 2
        self._head, self._tail = bytearray(), bytearray()
        self.dropped = 0

    async def read(self, stream: asyncio.StreamReader) -> None:
        """All of a stream."""
        while data := await stream.read(CHUNK):
            self.add(data)

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
