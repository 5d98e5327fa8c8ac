"""The restrictions that a worker without namespaces puts on itself and on each of its commands."""

import os
import resource
import socket
from typing import Any

from . import landlock, landlock_filter, layers, namespaces, processes, quota

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
        self.quota = quota.Quota(workspace, tmp, limits)
        self.workspace = quota.LimitedWorkspace(workspace, layers.WORKSPACE, limits["workspace_bytes"], self.quota)
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        most = processes.count_user_threads() + MARGIN * limits["processes"]
        self.most_threads = most if hard == resource.RLIM_INFINITY else min(most, hard)
        readable = landlock.system_rules(
            config.get("python"), [config["inside"], f"{config['scratch']}/{layers.PROGRAMS}"]
        )
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
