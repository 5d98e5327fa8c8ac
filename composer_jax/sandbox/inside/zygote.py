"""The zygote of a pool: one small Python process that forks a sandbox on request.

Starting an interpreter takes about 10 ms, and creating namespaces from a large process takes longer; a fork of this
process takes a fraction. It runs inside bubblewrap where that is the backend, and owns the layers of its sandboxes
(layers.py) without reading them. Its protocol with the host, over one SEQPACKET socket (fd 0):

    host -> zygote   the configuration (JSON), once
    zygote -> host   "ready", once
    host -> zygote   "+ID PLAN" with one end of a stream socket: make sandbox ID by PLAN (JSON,
                     layers.mount_workspace); its worker answers on that socket
    host -> zygote   "-ID": kill sandbox ID
    host -> zygote   "=ID": kill sandbox ID and keep its changes as a layer for other trees; done when the
                     socket of the worker is at its end
    host -> zygote   "~ID": delete layer ID, which no tree uses any more
    host -> zygote   "!": end with exit code DISMISSED
    host closes      everything ends, as after "!"
"""

import gc
import importlib
import json
import os
import select
import signal
import site
import socket
import sys
from typing import Any

from . import frames, layers, namespaces, processes, supervisor, worker

MAX_MESSAGE = 8192
DISMISSED = 9  # as the launcher has it

# Modules that small programs and their tests import; every fork shares them.
PRELOADED = (
    "abc", "argparse", "ast", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "enum",
    "functools", "heapq", "inspect", "io", "itertools", "json", "linecache", "locale", "math", "operator", "pathlib",
    "random", "re", "runpy", "signal", "string", "struct", "tempfile", "textwrap", "threading", "time", "traceback",
    "types", "typing", "unittest", "weakref",
)  # fmt: skip


def main() -> None:
    """Serves until the host closes the socket."""
    control = socket.socket(fileno=0)
    # The launcher of the landlock backend passes the paths that folders have for this process.
    config = json.loads(control.recv(1 << 20)) | (json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
    for builtin in (site.setquit, site.setcopyright, site.sethelper):  # exit(), help(): -S leaves them out
        builtin()
    for name in PRELOADED:
        importlib.import_module(name)
    namespaces.become_subreaper()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    zygote = Zygote(control, config)
    control.send(b"ready")
    zygote.serve()


class Zygote:
    """The event loop over the control socket and the running sandboxes."""

    def __init__(self, control: socket.socket, config: dict[str, Any]):
        self.control = control
        self.config = config
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        self.layers = layers.Layers(config)
        self.sandboxes: dict[str, int] = {}  # id -> pidfd
        self.names: dict[int, str] = {}  # pidfd -> id
        self.pids: dict[int, int] = {}  # pidfd -> pid
        self.starting: dict[int, str] = {}  # read end of the pipe that delivers the pid -> id
        self.killed_early: set[str] = set()  # to be killed as soon as their pid is known

    def serve(self) -> None:
        """Handles events until end of file on the control socket."""
        while True:
            for fd, _ in self.poll.poll():
                if fd == self.control.fileno():
                    if not self.handle_message():
                        return
                elif fd in self.starting:
                    self.on_worker_started(fd)
                else:
                    self.on_worker_exited(fd)

    def handle_message(self) -> bool:
        """Handles one message of the host; returns False when the host has closed the socket."""
        message, fds, _, _ = socket.recv_fds(self.control, MAX_MESSAGE, 1)
        if not message:
            return False
        order, (name, _, plan) = message[:1], message[1:].decode().partition(" ")
        if order == b"!":
            sys.exit(DISMISSED)
        if order == b"+":
            self.spawn(name, json.loads(plan), fds[0])
            os.close(fds[0])
        elif order == b"~":
            self.layers.drop(name)
        else:
            if order == b"=" and (name in self.sandboxes or name in self.starting.values()):
                self.layers.frozen.add(name)
            if name in self.sandboxes:
                self.kill(self.sandboxes[name])
            elif name in self.starting.values():
                self.killed_early.add(name)
        return True

    def spawn(self, name: str, plan: dict[str, Any], sock: int) -> None:
        """Forks the process that builds a sandbox and reports the pid of its worker."""
        receive, report = os.pipe()
        try:
            self.layers.make(name)
            if os.fork() == 0:
                try:
                    self.build_sandbox(name, plan, sock, report)
                finally:
                    os._exit(1)
        except OSError as error:  # no process left: this sandbox fails, the pool goes on
            report_failure(sock, error)
        os.close(report)
        self.starting[receive] = name
        self.poll.register(receive, select.POLLIN)

    def build_sandbox(self, name: str, plan: dict[str, Any], sock: int, report: int) -> None:
        """In the child: creates the isolation, forks the worker, reports its pid; ends or becomes its supervisor."""
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            line = -1
            if self.config["isolation"] == "landlock":
                line = supervisor.fork_supervised(report, layers.sandbox_folders(self.config, name))
            else:
                if self.config["isolation"] == "namespaces":
                    namespaces.enter_sandbox_namespaces(plan["network"])
                pid = os.fork()
                if pid:
                    os.write(report, str(pid).encode())
                    os._exit(0)
            connection = os.dup2(sock, 3, inheritable=False) if sock != 3 else sock
            nothing = os.open(os.devnull, os.O_RDWR)
            for standard in range(3):  # also the socket between zygote and host
                os.dup2(nothing, standard)
            if line >= 0:
                line = os.dup2(line, 4, inheritable=False)
            os.closerange(max(line, 3) + 1, os.sysconf("SC_OPEN_MAX"))
            channel = socket.socket(fileno=connection)
        except BaseException as error:
            report_failure(sock, error)
            os._exit(1)
        worker.serve(channel, self.config, name, plan, self.layers.overlays, line)

    def on_worker_started(self, fd: int) -> None:
        """Reads the pid of a new worker. If there is none, the host reads the error on the socket of the worker."""
        text = os.read(fd, 32)
        name = self.starting.pop(fd)
        self.poll.unregister(fd)
        os.close(fd)
        try:
            pidfd = os.pidfd_open(int(text))
        except (ValueError, ProcessLookupError):
            self.killed_early.discard(name)
            self.layers.ended(name)
            return
        self.sandboxes[name], self.names[pidfd], self.pids[pidfd] = pidfd, name, int(text)
        self.poll.register(pidfd, select.POLLIN)
        if name in self.killed_early:
            self.killed_early.discard(name)
            self.kill(pidfd)

    def kill(self, pidfd: int) -> None:
        """Kills process 1 and so its whole namespace; a supervisor kills its sandbox before it ends."""
        try:
            if self.config["isolation"] == "none":
                signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
                processes.kill_descendants(self.pids[pidfd])
            has_supervisor = self.config["isolation"] == "landlock"
            signal.pidfd_send_signal(pidfd, signal.SIGTERM if has_supervisor else signal.SIGKILL)
        except ProcessLookupError:
            return  # it has ended

    def on_worker_exited(self, pidfd: int) -> None:
        """Removes a worker that has ended from the tables, and its layer unless it was frozen."""
        self.poll.unregister(pidfd)
        os.close(pidfd)
        name = self.names.pop(pidfd)
        del self.pids[pidfd]
        del self.sandboxes[name]
        self.layers.ended(name)


def report_failure(sock: int, error: BaseException) -> None:
    """Sends the host the error for which there will be no worker."""
    with socket.socket(fileno=os.dup(sock)) as channel:
        channel.sendall(frames.pack({"broken": f"{type(error).__name__}: {error}"}))
