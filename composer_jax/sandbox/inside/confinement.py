"""The restrictions that a worker without namespaces puts on itself and on each of its commands.

The kernel enforces no limits on disk and processes without mounts and a process namespace. The worker checks them while
a command or a background job runs, and again when a command has ended. A limit can be exceeded between two checks; the
next check stops what runs.
"""

import os
import resource
import socket
import time
from typing import Any

from . import disk, files, landlock, landlock_filter, layers, namespaces, processes

PAUSE_FACTOR = 20  # pause between two checks of the disk, in durations of the check
MIN_ENTRIES, BYTES_PER_ENTRY = 256, 4096  # as many files as a tmpfs of that size would hold
MIB = 1 << 20
MARGIN = 16  # RLIMIT_NPROC in units of the process limit of one sandbox: it counts all processes of the user


class Confinement:
    """Made by the worker when its workspace exists; it calls `confine_worker`, and commands call `confine_command`.

    most_threads: RLIMIT_NPROC of commands. Without a user namespace the kernel counts all processes of the user, so the
    limit is the present number plus MARGIN times what one sandbox may have. The quota is stricter, but until its next
    check a fork bomb may use up the limit, and then other sandboxes of the pool cannot fork either.
    """

    def __init__(self, config: dict[str, Any], name: str, line: int, mounted: layers.MountedWorkspace):
        """line: descriptor of the socket to the supervisor. mounted: what else commands or the worker may read."""
        machine, limits = os.uname().machine, config["limits"]
        self.line = socket.socket(fileno=line)
        workspace, tmp = layers.sandbox_folders(config, name)
        os.mkdir(tmp)
        os.environ["HOME"] = os.environ["TMPDIR"] = tmp
        self.quota = Quota(workspace, tmp, limits)
        self.workspace = LimitedWorkspace(workspace, layers.WORKSPACE, limits["workspace_bytes"], self.quota)
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        most = processes.count_user_threads() + MARGIN * limits["processes"]
        self.most_threads = most if hard == resource.RLIM_INFINITY else min(most, hard)
        virtual_environment = [f"{config['scratch']}/{name}" for name in layers.VIRTUAL_ENVIRONMENT]
        readable = landlock.system_rules(config.get("python"), [config["inside"], *virtual_environment])
        own = [(workspace, landlock.READ_WRITE), (tmp, landlock.READ_WRITE)]
        if mounted.packages:
            own.append((mounted.packages, landlock.READ_EXECUTE))
        for_worker = [("/proc", landlock.READ)]
        if mounted.base is not None:
            for_worker.append((f"/proc/self/fd/{mounted.base}", landlock.READ))
        self._outer = landlock.Domain([*readable, *own, *for_worker])
        self._inner = landlock.Domain([*readable, *own])
        self.confines_signals = self._inner.confines_signals
        self._filter = landlock_filter.assemble(machine, self.confines_signals)
        self._asking = landlock_filter.assemble_notifying(machine)

    def confine_worker(self, first_filter: bytes) -> None:
        """Restricts the worker and every process that it starts, for good."""
        supervisor = os.getppid()
        self._outer.enter()
        if self.confines_signals:
            self._outer.require_confined(supervisor)
        namespaces.drop_privileges(first_filter)
        namespaces.install_filter(self._filter)

    def confine_command(self) -> None:
        """Restricts this process, a command about to start, before its descriptors are closed."""
        self._inner.enter()
        listener = namespaces.install_notifying_filter(self._asking)
        socket.send_fds(self.line, [b"x"], [listener])


class FolderQuota:
    """The limit of one folder.

    It is exceeded by more than `size` added bytes, too many entries, or folders that cannot be counted. A folder that
    was beyond the limit before may not grow.
    """

    def __init__(self, root: str, name: str, size: int):
        self.root, self.name, self.size = root, name, size
        self.before = self.now = disk.disk_usage(root)
        self.most = disk.DiskUsage(self.now.size + size, self.now.entries + max(MIN_ENTRIES, size // BYTES_PER_ENTRY))

    def check(self) -> str:
        """Returns one sentence when the limit is exceeded, else ""."""
        self.now = disk.disk_usage(self.root)
        if self.now.size > max(self.most.size, self.before.size):
            return f"{self.name} holds more than the {self.size // MIB} MiB that may be added to it"
        if self.now.entries > max(self.most.entries, self.before.entries):
            return f"{self.name} holds more files than may be added to it"
        if self.now.too_deep:
            return f"{self.name} holds folders deeper than {disk.MAX_PATH_CHARACTERS} characters of their paths"
        if self.now.closed:
            return f"{self.name} holds folders that are closed whenever they are opened to be counted"
        return ""


class Quota:
    """The limits on disk and processes of one sandbox."""

    def __init__(self, workspace: str, tmp: str, limits: dict[str, int]):
        self.folders = (
            FolderQuota(workspace, "the workspace", limits["workspace_bytes"]),
            FolderQuota(tmp, "the folder for temporary files", limits["tmp_bytes"]),
        )
        self.processes = limits["processes"]
        self._exceeded = ""  # one sentence about the exceeded limit
        self._next_check = 0.0

    def is_exceeded(self) -> bool:
        """Whether the running command, or background jobs between two commands, must be stopped.

        Can be called at any rate: it counts processes each time, but measures the disk only for a small fraction of the
        time. The caller kills the processes and then calls finish_command.
        """
        if processes.count_descendant_threads(os.getpid(), self.processes) > self.processes:
            self._exceeded = f"there were more than {self.processes} processes and threads at once"
        started = time.monotonic()
        if not self._exceeded and started >= self._next_check:
            self._exceeded = self._check_folders()
            ended = time.monotonic()
            self._next_check = ended + PAUSE_FACTOR * (ended - started)
        return self._exceeded != ""

    def finish_command(self) -> str:
        """Returns which limit a command exceeded, or "", after its processes have ended.

        The present disk usage becomes the allowance of the next command, unless jobs still run beside the shell: then
        is_exceeded stays true for what they hold.
        """
        excess = self._check_folders()
        sentence, self._exceeded = self._exceeded or excess, ""
        if excess:
            self._next_check = 0.0
        # One process is the shell itself; without a shell, no process outlives a command.
        if len(processes.running_descendants(os.getpid())) <= 1:
            for folder in self.folders:
                folder.before = folder.now
        return sentence

    def _check_folders(self) -> str:
        return next(filter(None, [folder.check() for folder in self.folders]), "")


class LimitedWorkspace(files.WorkspaceFiles):
    """A workspace that refuses files for which its quota has no room."""

    def __init__(self, root: str, alias: str, max_bytes: int, quota: Quota):
        super().__init__(root, alias, max_bytes)
        self.folder = quota.folders[0]

    def write(self, path: str, data: bytes | memoryview) -> None:
        """Writes a file, and deletes it again when it exceeds the quota."""
        super().write(path, data)
        # Adds up what is written, and measures the disk only when the sum is too much, so that small files are cheap.
        before = self.folder.before
        self.folder.before = disk.DiskUsage(before.size + len(data) + BYTES_PER_ENTRY, before.entries + 1)
        if self.folder.before.size > self.folder.most.size or self.folder.before.entries > self.folder.most.entries:
            self.folder.before = before
            if self.folder.check():
                self.delete(path)
                raise files.FileRefused(f"no space left in the workspace for {path}")
            self.folder.before = self.folder.now
