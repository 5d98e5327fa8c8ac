"""Limits that the kernel does not hold where a sandbox has no file systems and no process namespace of its own.

They are looked at from outside: while a command or a background job runs, and once more when a command has ended. So
they may be passed for as long as two looks are apart, and what runs is stopped then.
"""

import os
import time

from . import disk, files, processes

PAUSE_FACTOR = 20  # times as long as a look at the disk took, until the next
MIN_ENTRIES, BYTES_PER_ENTRY = 256, 4096  # as many files as a file system in memory of that size would hold
MIB = 1 << 20


class Folder:
    """What a folder may come to hold. It is over when it holds more than that, and more than it did before, or
    folders that cannot be counted."""

    def __init__(self, root: str, name: str, size: int):
        self.root, self.name, self.size = root, name, size
        self.before = self.now = disk.disk_usage(root)
        self.most = disk.DiskUsage(self.now.size + size, self.now.entries + max(MIN_ENTRIES, size // BYTES_PER_ENTRY))

    def check(self) -> str:
        """One sentence when it is over, else nothing."""
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
    """Disk and processes of one sandbox."""

    def __init__(self, workspace: str, tmp: str, limits: dict[str, int]):
        self.folders = (
            Folder(workspace, "the workspace", limits["workspace_bytes"]),
            Folder(tmp, "the folder for temporary files", limits["tmp_bytes"]),
        )
        self.processes = limits["processes"]
        self._exceeded = ""  # which limit what runs has passed
        self._next_check = 0.0

    def is_exceeded(self) -> bool:
        """Whether what runs must be stopped: the command, or between two commands the shell's background jobs.

        May be called as often as one likes, also when nothing runs: processes are counted each time, and the disk is
        looked at for a small share of the time only. Whoever kills what runs then calls finish_command.
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
        """When nothing of the command is left: what it passed, or nothing. The next one is judged from here, unless
        jobs still run beside the shell: what they hold is not forgiven, and is_exceeded goes on to say so."""
        found = self._check_folders()
        words, self._exceeded = self._exceeded or found, ""
        if found:
            self._next_check = 0.0
        # One process is the shell itself; without a shell nothing outlives a command.
        if len(processes.running_descendants(os.getpid())) <= 1:
            for folder in self.folders:
                folder.before = folder.now
        return words

    def _check_folders(self) -> str:
        return next(filter(None, [folder.check() for folder in self.folders]), "")


class LimitedWorkspace(files.Workspace):
    """A workspace that refuses files for which its quota has no room."""

    def __init__(self, root: str, alias: str, max_bytes: int, quota: Quota):
        super().__init__(root, alias, max_bytes)
        self.folder = quota.folders[0]

    def write(self, path: str, data: bytes | memoryview) -> None:
        """As without a limit; what turns out not to fit is taken away again."""
        super().write(path, data)
        # Counted by what is added, and only when that is too much by what is there: many small files are cheap.
        before = self.folder.before
        self.folder.before = disk.DiskUsage(before.size + len(data) + BYTES_PER_ENTRY, before.entries + 1)
        if self.folder.before.size > self.folder.most.size or self.folder.before.entries > self.folder.most.entries:
            self.folder.before = before
            words = self.folder.check()
            if words:
                self.delete(path)
                raise files.FileRefused(f"no space left in the workspace for {path}")
            self.folder.before = self.folder.now
