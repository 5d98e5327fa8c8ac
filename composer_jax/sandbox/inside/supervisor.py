"""The supervisor of one sandbox without a process namespace: when the worker ends, it kills all other processes.

It does for such a sandbox what the kernel does for a process namespace. The zygote ends a sandbox by SIGTERM to its
supervisor, which also ends with the zygote. Where Landlock confines signals, one call reaches all processes of the
sandbox; elsewhere they are listed and killed until none is left. The supervisor also changes modes for commands
(chmod_broker.py).
"""

import fcntl
import os
import select
import signal
import socket
from collections.abc import Sequence

from . import chmod_broker, landlock, namespaces, processes

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
        Supervisor(worker, line, wake, chmod_broker.ChmodBroker(roots)).serve()
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

    def __init__(self, worker: int, line: socket.socket, wake: int, answers: chmod_broker.ChmodBroker):
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
