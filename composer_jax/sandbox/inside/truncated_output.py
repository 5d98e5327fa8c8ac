"""The head and the tail of a long output: the middle is dropped."""


class TruncatedOutput:
    """At most `limit` bytes of a stream: half of them from its beginning, half from its end."""

    def __init__(self, limit: int):
        self.total = 0  # bytes of the whole stream
        self.head = bytearray()
        self._tail = bytearray()  # up to twice as long as it may be, so that it is cut seldom
        self._half = limit // 2

    def add(self, data: bytes) -> None:
        """Appends to the stream."""
        self.total += len(data)
        room = self._half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._half:
            self._cut_tail()

    def add_to_tail(self, data: bytes) -> None:
        """Appends to the tail, also while the head has room: what is added later may come before it."""
        self.total += len(data)
        self._tail += data

    @property
    def tail(self) -> bytearray:
        """The last bytes of the stream that are not in the head."""
        self._cut_tail()
        return self._tail

    @property
    def dropped(self) -> int:
        """How many bytes between head and tail are dropped."""
        return self.total - len(self.head) - len(self.tail)

    def bytes(self) -> bytes:
        """Head and tail, with a line between them that says how much was dropped."""
        return join_truncated(self.head, self.dropped, self.tail)

    def text(self) -> str:
        """`bytes` as UTF-8; bytes that are not UTF-8 become replacement characters."""
        return self.bytes().decode("utf-8", errors="replace")

    def _cut_tail(self) -> None:
        if len(self._tail) > self._half:
            del self._tail[: len(self._tail) - self._half]


def join_truncated(head: bytes | bytearray, dropped: int, tail: bytes | bytearray) -> bytes:
    """The head and the tail of a stream, with a line between them if anything was dropped."""
    middle = f"\n[... {dropped} bytes left out ...]\n".encode() if dropped else b""
    return bytes(head) + middle + bytes(tail)
