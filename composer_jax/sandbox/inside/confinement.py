"""What a worker without namespaces puts around itself, and around each of its commands."""

import os
import resource
import socket
from typing import Any

from . import landlock, landlock_filter, layers, namespaces, processes, quota

MARGIN = 16  # times the processes of one sandbox that all together may have at once before the kernel refuses more


class Confinement:
    """Made by the worker when its workspace is there; `confine_worker` for itself, `enter` in a command.

    most_threads: RLIMIT_NPROC of commands. Without a user namespace it counts all that the user has, so it is what was
    there plus many times what one sandbox may have: a last resort, the quota is stricter. Until the quota has looked, a
    fork bomb may use it all up, and then other sandboxes of the pool cannot fork either.
    """

    def __init__(self, config: dict[str, Any], name: str, line: int, mounted: layers.MountedWorkspace):
        """line: to the supervisor, a descriptor. mounted: what else can be read, by commands or by the worker only."""
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
        """Around the worker: it cannot go back, nor can anything that it starts."""
        supervisor = os.getppid()
        self._outer.enter()
        if self.confines_signals:
            self._outer.require_confined(supervisor)
        namespaces.drop_privileges(first_filter)
        namespaces.install_filter(self._filter)

    def confine_command(self) -> None:
        """Around this process, a command that is about to begin; takes place before its descriptors are closed."""
        self._inner.enter()
        listener = namespaces.install_notifying_filter(self._asking)
        socket.send_fds(self.line, [b"x"], [listener])
