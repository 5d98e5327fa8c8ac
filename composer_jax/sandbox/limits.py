"""The resources that one sandbox may use."""

from dataclasses import dataclass

MIB = 1 << 20
REPLY_S = 30.0  # longest a file operation may take before the sandbox counts as dead
GRACE_S = 30.0  # how much longer than its own limit a command may take to report, on a machine that is overloaded


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one sandbox. Crossing one ends the command (see RunResult.outcome) or fails the call, never the host.

    The numbers are ours: generous for the tests of a small repository, small enough for 64 sandboxes on one
    machine.
    """

    timeout_s: float = 10.0  # wall-clock seconds of one command, unless run() gives another limit
    cpu_s: int = 30  # CPU seconds of one process
    memory_mb: int = 512  # MiB: address space of one process, and private memory of all processes together
    processes: int = 64  # processes and threads at once
    file_mb: int = 32  # MiB: largest file a command can write
    open_files: int = 256  # file descriptors of one process
    workspace_mb: int = 64  # MiB: changes under /workspace between two snapshots, and one reply of the worker
    tmp_mb: int = 32  # MiB: all files under /tmp, and again under /dev/shm
    output_kb: int = 64  # KiB kept of stdout, and again of stderr: the first and the last half of it
    output_stop_mb: int = 8  # MiB of stdout and stderr together after which the command is stopped

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"SandboxLimits.{name} is {value}; it must be above zero")

    def as_bytes(self) -> dict[str, int]:
        """The limits in the units of the worker: bytes, seconds and counts."""
        return {
            "cpu_s": int(self.cpu_s),
            "memory_bytes": self.memory_mb * MIB,
            "processes": self.processes,
            "file_bytes": self.file_mb * MIB,
            "open_files": self.open_files,
            "workspace_bytes": self.workspace_mb * MIB,
            "tmp_bytes": self.tmp_mb * MIB,
            "output_bytes": self.output_kb * 1024,
            "output_stop_bytes": self.output_stop_mb * MIB,
        }
