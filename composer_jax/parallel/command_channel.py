"""Commands from process 0 to all other processes, in order, and their replies, over one TCP connection to each.

A connection breaks as soon as the process at its other end dies, so each end notices at once. The coordinator's
key-value store and a broadcast between devices are slower (benchmarks/command_channel.py). In a broadcast an idle
process would also wait inside a device program, where Ctrl-C does not reach it.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import queue
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from composer_jax.errors import OtherProcessError
from composer_jax.frames import PREFIX, Buffer, Frame, FrameError, decode_frame, encode_frame, frame_buffers
from composer_jax.parallel.failure import report_lost_process
from composer_jax.parallel.processes import (
    coordinator_address,
    coordinator_client,
    process_count,
    process_index,
    wait_for_key,
)

POLL_S = 0.5
"""Seconds of one wait for a connection; `close` takes effect between two of them."""
HELLO_S = 10.0
"""Seconds in which a new connection names its process, or is closed."""
CLOSE_S = 10.0
"""Seconds in which the other processes close their ends after the last command."""
NOTICE_S = 1.0
"""Seconds in which a broken connection is noticed after a device program failed because of it."""
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
"""A machine that vanishes without closing its connections is noticed after 10 + 3 * 10 seconds."""
WAITING_BYTES = 1 << 26
"""Commands that a receiver holds before they are executed; those behind them wait in the connection, and `send` waits
once that is full. One larger command is held by itself."""

_JOINED_BYTES = 1 << 14  # smaller buffers share a packet
_HELLO = struct.Struct("!32sI")  # token and process
_channels = itertools.count()  # every process opens its channels in the same order


class CommandSender:
    """The end of process 0. Any thread may send; one thread at a time may collect from a lane, in the order of what was
    sent to it."""

    def __init__(self, on_error: Callable[[OtherProcessError], object], *, lanes: int = 1) -> None:
        """
        Args:
          on_error: called once, from another thread, when a process fails or is gone before `close`.
          lanes: into which a process can sort its replies; those of one lane do not wait for those of another.
        """
        self.error: OtherProcessError | None = None
        self._on_error, self._noticed, self._closing = on_error, threading.Event(), threading.Event()
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._connections: dict[int, socket.socket] = {}
        self._readers: list[threading.Thread] = []
        self._lanes, self.in_order = lanes, threading.Lock()
        """in_order: held by whoever sends a command and starts the program that it names, so that programs of several
        processes start in the same order in all of them."""
        self._replies: dict[int, list[queue.SimpleQueue[Frame | None]]] = {}
        """Of each process, by lane; None: no further one comes."""

    def connect(self) -> None:
        """Waits until every other process has opened its CommandReceiver, or `close` is called."""
        token = secrets.token_hex(16)  # keeps out whoever else finds the port
        with _listen() as server:
            address = {"port": server.getsockname()[1], "token": token}
            coordinator_client().key_value_set(_next_key(), json.dumps(address))
            while len(self._connections) < process_count() - 1 and not self._closing.is_set():
                with contextlib.suppress(TimeoutError):
                    self._admit(server.accept()[0], token)

    def send(
        self, header: dict[str, Any], arrays: Sequence[np.ndarray] = (), *, processes: Iterable[int] | None = None
    ) -> None:
        """Sends a command to every other process, or to some of them; waits while they hold too many (WAITING_BYTES).

        Raises:
          OtherProcessError: one of them failed or is gone.
        """
        buffers = frame_buffers(header, arrays)
        with self._sending:
            if self.error is not None:
                raise self.error
            for process in self._connections if processes is None else processes:
                connection = self._connections[process]
                try:
                    send_buffers(connection, buffers)
                except OSError as error:  # part of the frame may have left, so nothing can follow it
                    self._noticed.wait(NOTICE_S)  # the reader may have the sentence of a process that failed
                    raise (self.error or self._note_end(report_lost_process(process))) from error

    def collect(self) -> list[Frame]:
        """Waits for the next reply of every other process and returns them.

        A process may have replied to later commands before another one replies to this one.

        Raises:
          OtherProcessError: one of them failed or is gone, or the channel was closed.
        """
        return list(self.collect_from(self._replies).values())

    def collect_from(self, processes: Iterable[int], lane: int = 0) -> dict[int, Frame]:
        """Waits for the next reply of each of these processes, where the others have none to send. See `collect`."""
        replies = {}
        for process in processes:
            reply = self._replies[process][lane].get()
            if reply is None:
                raise self.error or OtherProcessError("the channel to the other processes was closed")
            replies[process] = reply
        return replies

    def cause_of(self, error: Exception) -> Exception:
        """Returns what happened to another process if `error` may follow from it, else `error` itself.

        A device program fails when a process that takes part in it dies, with an error of its own.
        """
        self._noticed.wait(NOTICE_S)
        return error if self.error is None else self.error

    def close(self, failure: str = "") -> None:
        """Ends the channel. The other processes raise `failure`, a sentence that names the process that failed."""
        self._closing.set()
        with self._sending:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):  # that process is gone
                    connection.sendall(encode_frame({"failed": failure} if failure else {"end": True}))
                    connection.shutdown(socket.SHUT_WR)
        for reader in self._readers:
            reader.join(CLOSE_S)
        for connection in self._connections.values():
            connection.close()

    def _admit(self, connection: socket.socket, token: str) -> None:
        """Keeps a new connection if it comes from one of the processes."""
        connection.settimeout(HELLO_S)
        hello = _receive_bytes(connection, _HELLO.size)
        if hello is None or not secrets.compare_digest(hello[:32], token.encode()):
            connection.close()
            return
        _, process = _HELLO.unpack(hello)
        _configure(connection)
        self._replies[process] = [queue.SimpleQueue() for _ in range(self._lanes)]
        self._connections[process] = connection
        reader = threading.Thread(target=self._read, args=(process, connection), daemon=True, name="reply-reader")
        self._readers.append(reader)
        reader.start()

    def _read(self, process: int, connection: socket.socket) -> None:
        """Reads replies until the other end closes the connection, which it does before the end only if it fails."""
        try:
            while (last := receive_frame(connection)) is not None and "failed" not in last[0]:
                self._replies[process][last[0].pop("lane")].put(last)
        except FrameError as error:
            last = {"failed": f"process {process} sent {error}"}, []
        if not self._closing.is_set():
            # Every process that is gone is reported, also after the first error.
            self._note_end(report_lost_process(process) if last is None else last[0]["failed"])
        self._end_replies(process)

    def _end_replies(self, process: int) -> None:
        for lane in self._replies[process]:
            lane.put(None)

    def _note_end(self, sentence: str) -> OtherProcessError:
        """Notes that a process failed or is gone, by a sentence about it; returns the first such error."""
        with self._lock:
            if self.error is not None:
                return self.error
            self.error = OtherProcessError(sentence)
        self._noticed.set()
        for process in list(self._replies):  # `connect` may add one meanwhile
            self._end_replies(process)
        self._on_error(self.error)
        return self.error


@dataclasses.dataclass(frozen=True)
class CommandLane:
    """The end of process 0 for those who work with some of the other processes, and with nobody else's replies."""

    sender: CommandSender
    number: int
    """In the header of every command, as "lane"; the replies have it, too."""
    processes: Collection[int]

    def send(self, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a command to these processes. See CommandSender.send."""
        self.sender.send(header | {"lane": self.number}, arrays, processes=self.processes)

    def collect(self) -> list[Frame]:
        """Waits for the next reply of each of these processes. See CommandSender.collect."""
        return list(self.collect_from(self.processes).values())

    def collect_from(self, processes: Iterable[int]) -> dict[int, Frame]:
        """Waits for the next reply of some of these processes. See CommandSender.collect_from."""
        return self.sender.collect_from(processes, self.number)


class CommandReceiver:
    """The end of every other process: iterating yields the commands until process 0 closes the channel.

    Use as a context manager. If process 0 disappears, this process ends with a sentence, also while it is inside a
    device program. An exception that leaves the block is reported to process 0. Any thread may reply.
    """

    def __enter__(self) -> Self:
        """Waits until process 0 has opened its CommandSender."""
        address = json.loads(wait_for_key(_next_key()))
        host = coordinator_address().rpartition(":")[0].strip("[]")
        self._connection = socket.create_connection((host, address["port"]))
        _configure(self._connection)
        self._connection.sendall(_HELLO.pack(address["token"].encode(), process_index()))
        self._commands: queue.SimpleQueue[tuple[Frame | Exception, int]] = queue.SimpleQueue()
        self._waiting = WaitingBytes(WAITING_BYTES)
        self._leaving, self._sending = False, threading.Lock()
        threading.Thread(target=self._read, daemon=True, name="command-reader").start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._leaving = True
        with contextlib.suppress(OSError), self._sending:
            if error is not None:
                self._connection.sendall(encode_frame({"failed": failure_sentence(error)}))
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def __iter__(self) -> Iterator[Frame]:
        """Yields commands; Ctrl-C interrupts the wait for the next.

        Raises:
          OtherProcessError: process 0 closed the channel because of a failure.
          Exception: what `interrupt` got.
        """
        while True:
            command, n_bytes = self._commands.get()
            self._waiting.remove(n_bytes)
            if isinstance(command, Exception):
                raise command
            header, arrays = command
            if "failed" in header:
                raise OtherProcessError(header["failed"])
            if "end" in header:
                return
            yield header, arrays

    def reply(self, header: dict[str, Any], arrays: Sequence[np.ndarray], *, lane: int = 0) -> None:
        """Sends process 0 a reply, which CommandSender.collect_from returns there for that lane."""
        buffers = frame_buffers(header | {"lane": lane}, arrays)
        with self._sending:
            send_buffers(self._connection, buffers)

    def interrupt(self, error: Exception) -> None:
        """Raises an error of another thread in the one that iterates, after the commands that have come before."""
        self._commands.put((error, 0))

    def _read(self) -> None:
        while True:
            # A sender that is gone is noticed while this waits for room: what it had sent still fits into memory.
            room = functools.partial(self._waiting.add, is_closed=lambda: _is_hung_up(self._connection))
            try:
                command = receive_frame(self._connection, room)
            except FrameError as error:
                self.interrupt(OtherProcessError(f"process 0 sent {error}"))
                return
            if command is None:
                if not self._leaving:
                    report_lost_process(0)
                return
            self._commands.put((command, sum(array.nbytes for array in command[1])))
            if not {"end", "failed"}.isdisjoint(command[0]):
                return


class WaitingBytes:
    """Counts the bytes of commands that wait, and keeps the next one out until there is room for it."""

    def __init__(self, most: int) -> None:
        self._most, self._bytes, self._changed = most, 0, threading.Condition()

    def add(self, n: int, is_closed: Callable[[], bool]) -> None:
        """Counts n bytes; waits while others are counted and n would go beyond the most, unless the sender is gone."""
        with self._changed:
            while self._bytes and self._bytes + n > self._most and not is_closed():
                self._changed.wait(POLL_S)
            self._bytes += n

    def remove(self, n: int) -> None:
        """Counts n bytes less."""
        with self._changed:
            self._bytes -= n
            self._changed.notify()


def failure_sentence(error: BaseException) -> str:
    """Returns the sentence that reports `error`, which ends this process, to the other processes.

    An OtherProcessError passes its sentence on, so that all of them name the process that failed first.
    """
    if isinstance(error, OtherProcessError):
        return str(error)
    cause = "it was interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
    return f"process {process_index()} ended: {cause}"


def _next_key() -> str:
    return f"composer_jax/command_channel/{next(_channels)}"


def _listen() -> socket.socket:
    """A server on a free port of all interfaces, as the coordinator's is."""
    if socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        server = socket.create_server(("", 0))
    server.settimeout(POLL_S)
    return server


def _configure(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        if hasattr(socket, option):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _is_hung_up(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection of which something may still be unread; False where it cannot be
    known (only Linux says it)."""
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))


def send_buffers(connection: socket.socket, buffers: Sequence[Buffer]) -> None:
    """Sends the buffers of a frame without joining them. Raises OSError if the connection breaks."""
    small: list[Buffer] = []
    for buffer in buffers:
        if len(buffer) < _JOINED_BYTES:
            small.append(buffer)
            continue
        connection.sendall(b"".join(small))
        connection.sendall(buffer)
        small = []
    connection.sendall(b"".join(small))


def receive_frame(connection: socket.socket, room: Callable[[int], object] = lambda _: None) -> Frame | None:
    """Returns the next frame of a connection, or None if the other end has closed it or is gone.

    room: called with the bytes of the frame's arrays before they are received.
    """
    prefix = _receive_bytes(connection, PREFIX.size)
    if prefix is None:
        return None
    n_text, n_content = PREFIX.unpack(prefix)
    text = _receive_bytes(connection, n_text)
    room(n_content)
    content = None if text is None else _receive_bytes(connection, n_content)
    return None if text is None or content is None else decode_frame(bytes(text), content)


def _receive_bytes(connection: socket.socket, n: int) -> memoryview | None:
    content = np.empty(n, np.uint8).data
    start = 0
    while start < n:
        try:
            received = connection.recv_into(content[start:])
        except OSError:
            return None
        if not received:
            return None
        start += received
    return content
