"""The supervisor of one sandbox without a process namespace: kills all of it with its worker, and brokers chmod.

It does for such a sandbox what the kernel does for a process namespace. The zygote ends a sandbox by SIGTERM to its
supervisor, which also ends with the zygote. Where Landlock confines signals, one call reaches all processes of the
sandbox; elsewhere they are listed and killed until none is left.

The supervisor is also the broker for chmod and utime of commands: it changes files of the sandbox and refuses all
others. Landlock does not restrict these calls, and without a user namespace a command has the uid of the user, whose
files it could change. A seccomp filter therefore hands the calls over (seccomp_unotify(2)). The supervisor reads the
path from the memory of the caller, opens the file, checks where it is, and changes the open file, so the caller gains
nothing by changing the path or its memory meanwhile.
"""

import errno
import fcntl
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence

from . import files, landlock, landlock_filter, namespaces, processes, seccomp

RECEIVE, SEND, IS_VALID = 0xC0502100, 0xC0182101, 0x40082102  # SECCOMP_IOCTL_NOTIF_*
REQUEST = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif: id, pid, flags, nr, arch, instruction pointer, arguments
ANSWER = struct.Struct("=QqiI")  # struct seccomp_notif_resp: id, value, error, flags
LONGEST_PATH, PAGE = 4096, 4096
AT_FDCWD, AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH = -100, 0x100, 0x1000
UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
SECOND = 1_000_000_000
FIRST_FREE_FD = 10  # first descriptor without a fixed meaning in a worker


def fork_supervised(report: int, roots: Sequence[str]) -> int:
    """Forks a child and supervises it without returning; in the child, returns the socket to the supervisor.

    report: descriptor to which the pid of the supervisor is written. roots: the folders of the sandbox. The returned
    descriptor is FIRST_FREE_FD or above.
    """
    zygote = os.getppid()
    landlock.die_with_parent(zygote, signal.SIGTERM)
    domain = landlock.Domain(None)
    domain.enter()
    if domain.confines_signals:
        domain.require_confined(zygote)
    namespaces.become_subreaper()
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        landlock.die_with_parent(supervisor, signal.SIGKILL)
        return fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_FD)
    try:
        namespaces.make_undumpable()
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(waker)
        os.write(report, str(supervisor).encode())
        _close_all_but(wake, waker, line.fileno())
        Supervisor(worker, line, wake, ChmodBroker(roots)).serve()
    finally:
        try:
            processes.kill_all_descendants(domain.confines_signals)
        finally:
            os._exit(0)


def _close_all_but(*fds: int) -> None:
    start = 0
    for fd in sorted(fds):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


class Supervisor:
    """The event loop, until the worker has ended or the zygote sends SIGTERM."""

    def __init__(self, worker: int, line: socket.socket, wake: int, answers: "ChmodBroker"):
        self.line, self.answers = line, answers
        self.ends = (os.pidfd_open(worker), wake)
        self.poll = select.poll()
        for fd in (*self.ends, line.fileno()):
            self.poll.register(fd, select.POLLIN)

    def serve(self) -> None:
        """Answers the calls of commands."""
        while True:
            for fd, event in self.poll.poll():
                if fd in self.ends:
                    return
                if fd == self.line.fileno():
                    self.listen()
                elif event & select.POLLIN:
                    self.answers.answer(fd)
                else:  # the command with this filter has ended
                    self.poll.unregister(fd)
                    os.close(fd)

    def listen(self) -> None:
        """Receives the listener of the filter of a new command; at end of file, closes the socket."""
        message, fds, _, _ = socket.recv_fds(self.line, 1, 1)
        if not message:
            self.poll.unregister(self.line)
        for fd in fds:
            self.poll.register(fd, select.POLLIN)


class ChmodBroker:
    """The broker of one sandbox. roots: its folders, as paths without links."""

    def __init__(self, roots: Sequence[str]):
        self.roots = tuple(roots)
        column, _ = seccomp.ARCHITECTURES[os.uname().machine]
        self.names = {numbers[column]: name for name, numbers in landlock_filter.MODE_CALLS.items()}

    def answer(self, listener: int) -> None:
        """Answers one call that waits at the listener of a filter."""
        request = bytearray(REQUEST.size)
        try:
            fcntl.ioctl(listener, RECEIVE, request)
        except FileNotFoundError:  # the caller was killed
            return
        number, pid, _, call, _, _, *arguments = REQUEST.unpack(request)
        try:
            with _Caller(pid) as caller:
                # Otherwise pid may belong to another process by now.
                fcntl.ioctl(listener, IS_VALID, struct.pack("=Q", number))
                self._carry_out(self.names[call], caller, arguments)
            error = 0
        except OSError as refused:
            error = refused.errno or errno.EPERM
        try:
            fcntl.ioctl(listener, SEND, ANSWER.pack(number, 0, -error, 0))
        except FileNotFoundError:
            return

    def _carry_out(self, call: str, caller: "_Caller", arguments: list[int]) -> None:
        first, second, third, fourth = arguments[:4]
        here = AT_FDCWD & 0xFFFFFFFF
        if call == "chmod":
            self._change(caller, here, first, 0, _to_mode(second))
        elif call == "fchmod":
            self._change(caller, first, 0, AT_EMPTY_PATH, _to_mode(second))
        elif call == "fchmodat":
            self._change(caller, first, second, 0, _to_mode(third))
        elif call == "fchmodat2":
            self._change(caller, first, second, fourth, _to_mode(third))
        elif call == "utime":
            self._change(caller, here, first, 0, _to_times(caller.seconds(second)))
        elif call == "utimes":
            self._change(caller, here, first, 0, _to_times(caller.timevals(second)))
        elif call == "futimesat":
            self._change(caller, first, second, 0 if second else AT_EMPTY_PATH, _to_times(caller.timevals(third)))
        else:
            flags = fourth if second else fourth | AT_EMPTY_PATH
            self._change(caller, first, second, flags, _to_times(caller.timespecs(third)))

    def _change(self, caller: "_Caller", folder: int, path: int, flags: int, change: Callable[[str], None]) -> None:
        with files.closing_fd(caller.open(folder, path, flags)) as place:
            path_of_fd = f"/proc/self/fd/{place}"
            where = os.readlink(path_of_fd)
            if not any(where == root or where.startswith(root + "/") for root in self.roots):
                raise PermissionError(errno.EPERM, "not in the sandbox")
            change(path_of_fd)


class _Caller:
    """Context that reads memory, working folder and descriptors of the calling thread."""

    def __init__(self, pid: int):
        self.pid = pid

    def __enter__(self) -> "_Caller":
        self.memory = os.open(f"/proc/{self.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.memory)

    def open(self, folder: int, path: int, flags: int) -> int:
        """Opens (O_PATH) the file that a path in the memory of the caller names."""
        how = os.O_PATH | os.O_CLOEXEC | (os.O_NOFOLLOW if flags & AT_SYMLINK_NOFOLLOW else 0)
        text = self._text(path) if path else b""
        # /proc/self of the caller is not that of the supervisor; C libraries change modes by this path.
        for own in (b"/proc/self/", b"/proc/thread-self/"):
            if text.startswith(own):
                text = b"/proc/%d/" % self.pid + text.removeprefix(own)
        if text.startswith(b"/"):
            return os.open(text, how)
        if not text and not flags & AT_EMPTY_PATH:
            raise FileNotFoundError(errno.ENOENT, "no path")
        number = struct.unpack("=i", struct.pack("=I", folder & 0xFFFFFFFF))[0]
        base = f"/proc/{self.pid}/cwd" if number == AT_FDCWD else f"/proc/{self.pid}/fd/{number}"
        try:
            start = os.open(base, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            raise OSError(errno.EBADF, "no such descriptor") from None
        if not text:
            return start
        with files.closing_fd(start):
            return os.open(text, how, dir_fd=start)

    def _read(self, address: int, size: int) -> bytes:
        try:
            data = os.pread(self.memory, size, address)
        except (OSError, OverflowError):
            data = b""
        if len(data) != size:
            raise OSError(errno.EFAULT, "no such memory")
        return data

    def _text(self, address: int) -> bytes:
        """Reads up to the zero byte, by pages: the page after it may not be mapped."""
        text = b""
        while len(text) < LONGEST_PATH:
            text += self._read(address + len(text), PAGE - (address + len(text)) % PAGE)
            if b"\0" in text:
                return text[: text.index(b"\0")]
        raise OSError(errno.ENAMETOOLONG, "path too long")

    def seconds(self, address: int) -> list[int] | None:
        """Reads a struct utimbuf in nanoseconds; None: now."""
        return [value * SECOND for value in struct.unpack("=2q", self._read(address, 16))] if address else None

    def timevals(self, address: int) -> list[int] | None:
        """Reads two struct timeval in nanoseconds; None: now."""
        if not address:
            return None
        a, b, c, d = struct.unpack("=4q", self._read(address, 32))
        return [_moment(a, b, 1000), _moment(c, d, 1000)]

    def timespecs(self, address: int) -> list[int] | None:
        """Reads two struct timespec in nanoseconds; None: now. The two special values are returned negated."""
        if not address:
            return None
        a, b, c, d = struct.unpack("=4q", self._read(address, 32))
        special = {UTIME_NOW: -UTIME_NOW, UTIME_OMIT: -UTIME_OMIT}
        return [special[part] if part in special else _moment(whole, part, 1) for whole, part in ((a, b), (c, d))]


def _moment(seconds: int, part: int, unit: int) -> int:
    """Returns seconds and a fraction in units of `unit` ns as nanoseconds. Raises EINVAL where the kernel does."""
    if not 0 <= part * unit < SECOND:
        raise OSError(errno.EINVAL, "no part of a second")
    return seconds * SECOND + part * unit


def _to_mode(mode: int) -> Callable[[str], None]:
    return lambda path: os.chmod(path, mode & 0o7777)


def _to_times(times: list[int] | None) -> Callable[[str], None]:
    def change(path: str) -> None:
        now, status = time.time_ns(), os.stat(path)
        before = (status.st_atime_ns, status.st_mtime_ns)
        requested = times or [now, now]
        named = [{-UTIME_NOW: now, -UTIME_OMIT: old}.get(new, new) for new, old in zip(requested, before, strict=True)]
        os.utime(path, ns=(named[0], named[1]))

    return change
