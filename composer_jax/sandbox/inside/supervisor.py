"""The process around one sandbox that has no process namespace: when the worker ends, it ends all that is left.

It is to such a sandbox what the kernel is to a process namespace. The zygote ends a sandbox by asking its supervisor
(SIGTERM), which dies with the zygote, too. Where Landlock confines signals one call then reaches all processes of the
sandbox; elsewhere they are searched and killed until none is left. Meanwhile it changes modes for commands (modes.py).
"""

import fcntl
import os
import select
import signal
import socket
from collections.abc import Sequence

from . import chmod_broker, landlock, namespaces, processes

FIRST_FREE_FD = 10  # first descriptor that means nothing to whoever sets up a worker


def fork_supervised(report: int, roots: Sequence[str]) -> int:
    """Fork: this process stays as the supervisor and never returns; in its child, returns its line to the supervisor, a
    descriptor above all that have a meaning.

    report: where the supervisor's pid is written; roots: the sandbox's own folders.
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


def _close_all_but(*kept: int) -> None:
    start = 0
    for fd in sorted(kept):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


class Supervisor:
    """The loop: until the worker has ended or the zygote asks."""

    def __init__(self, worker: int, line: socket.socket, wake: int, answers: chmod_broker.ChmodBroker):
        self.line, self.answers = line, answers
        self.ends = (os.pidfd_open(worker), wake)
        self.poll = select.poll()
        for fd in (*self.ends, line.fileno()):
            self.poll.register(fd, select.POLLIN)

    def serve(self) -> None:
        """Answer what commands ask."""
        while True:
            for fd, event in self.poll.poll():
                if fd in self.ends:
                    return
                if fd == self.line.fileno():
                    self.listen()
                elif event & select.POLLIN:
                    self.answers.answer(fd)
                else:  # whoever had the filter has ended
                    self.poll.unregister(fd)
                    os.close(fd)

    def listen(self) -> None:
        """A new command has sent the listener of its filter; or nobody has the line any more."""
        message, fds, _, _ = socket.recv_fds(self.line, 1, 1)
        if not message:
            self.poll.unregister(self.line)
        for fd in fds:
            self.poll.register(fd, select.POLLIN)
