"""Process 1 of one sandbox: answers requests of the host, one after the other, until the host closes the socket.

As process 1 it cannot be signalled from inside, and when it ends the kernel kills every process of the sandbox.
Commands of the same uid cannot open its memory or descriptors. Between two requests only the persistent shell and its
background jobs are alive beside it. Without a process namespace, confinement.py and supervisor.py give the same
guarantees.
"""

import mmap
import os
import signal
import socket
from typing import Any

from . import changes, command, files, frames, layers, namespaces, processes, python, shell
from .confinement import Confinement


def serve(
    channel: socket.socket, config: dict[str, Any], name: str, plan: dict[str, Any], overlays: bool, line: int
) -> None:
    """Sets the sandbox up, reports that it is ready, and answers requests; never returns.

    name, plan, overlays: as layers.mount_workspace takes them. line: descriptor to the supervisor; -1: there is none.
    """
    try:
        worker = Worker(config)
        worker.set_up(name, plan, overlays, line)
        channel.sendall(frames.pack({"ready": True}))
        while (request := worker.request(channel)) is not None:
            channel.sendall(worker.answer(*request))
    except BaseException as error:
        try:
            channel.sendall(frames.pack({"broken": f"{type(error).__name__}: {error}"}))
        except OSError:
            pass
    finally:
        try:
            if config["isolation"] == "none":  # otherwise the kernel or the supervisor kills them
                processes.kill_all_descendants(at_once=False)
        finally:
            os._exit(0)


class Worker:
    """The state of one sandbox: its limits, its workspace, its commands and its shell."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.isolation: str = config["isolation"]
        self.limits: dict[str, int] = config["limits"]
        self.filter = bytes.fromhex(config["filter"])

    def set_up(self, name: str, plan: dict[str, Any], overlays: bool, line: int) -> None:
        """Mounts the workspace, drops privileges, and opens the workspace."""
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the kernel kills a sandbox before the trainer when memory runs out
        mounted = layers.mount_workspace(self.config, name, plan, overlays)
        root, max_bytes, confinement = mounted.root, self.limits["workspace_bytes"], None
        self.tmp_folders: tuple[str, ...] = ()  # those of this sandbox alone
        if self.isolation == "namespaces":
            namespaces.mount_private_file_systems(self.limits["tmp_bytes"])
            self.tmp_folders = namespaces.TMP_FOLDERS
            if plan["tests"]:
                namespaces.mount_tmpfs(layers.LOGS, self.limits["tmp_bytes"])
                os.mkdir(f"{layers.LOGS}/verifier")
            namespaces.drop_privileges(self.filter)
        else:
            namespaces.become_subreaper()
        os.umask(0o022)
        os.chdir(root)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if mounted.packages:
            python.add_packages(mounted.packages)
        if self.isolation == "landlock":
            confinement = Confinement(self.config, name, line, mounted)
            confinement.confine_worker(self.filter)
            self.workspace: files.WorkspaceFiles = confinement.workspace
            self.tmp_folders = (layers.sandbox_folders(self.config, name)[1],)
        else:
            self.workspace = files.WorkspaceFiles(root, layers.WORKSPACE, max_bytes)
        is_copy = mounted.layers is None and not plan["layers"]
        self.changes = changes.Changes(self.workspace.root, mounted.base, mounted.layers, max_bytes, is_copy)
        self.commands = command.Commands(root, self.limits, self.isolation, mmap.mmap(-1, mmap.PAGESIZE), confinement)
        self.shell = shell.Shell(self.commands)
        self.commands.on_exit, self.commands.spared_pids = self.shell.on_exit, self.shell.pids

    def request(self, channel: socket.socket) -> tuple[dict[str, Any], bytes] | None:
        """Returns the next request; None when the host has closed the socket."""
        if self.shell.pid:
            self.shell.wait_for(channel.fileno())
        return frames.receive(channel)

    def tmp_is_empty(self) -> bool:
        """Whether the folders for temporary files are empty; False where commands use those of the host."""
        try:
            return bool(self.tmp_folders) and not any(map(os.listdir, self.tmp_folders))
        except OSError:  # a command took the permission to read one
            return False

    def answer(self, header: dict[str, Any], body: bytes) -> bytes:
        """Answers a request with a frame. A mistake of the caller is the header field `refused`, never an exception."""
        try:
            operation = header["op"]
            if operation == "run":
                return frames.pack(*self.commands.run(header["argv"], body, header["timeout_s"]))
            if operation == "shell":
                return frames.pack(*self.shell.run(header["command"], header["timeout_s"]))
            if operation == "read":
                return frames.pack({}, self.workspace.read(header["path"]))
            if operation == "write":
                self.workspace.write(header["path"], body)
            elif operation == "delete":
                self.workspace.delete(header["path"])
            elif operation == "list":
                return frames.pack({"paths": self.workspace.paths()})
            elif operation == "write_files":
                self.workspace.write_files(header["files"], body)
            elif operation == "changes":
                report, data = self.changes.report()
                return frames.pack({**report, "tmp_is_empty": self.tmp_is_empty()}, data)
            elif operation == "apply":
                self.workspace.apply(header["changes"], body)
            else:
                return frames.pack({"broken": f"unknown operation {operation}"})
            return frames.pack({})
        except files.FileRefused as error:
            return frames.pack({"refused": str(error)})
