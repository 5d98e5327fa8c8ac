"""Isolation of one sandbox without namespaces: nested Landlock domains.

    supervisor   may signal processes in its domain only (supervisor.py)
    worker       reads the system and /proc, writes its own workspace and /tmp
    command      the same without /proc; cannot signal or trace the worker, whose domain is further out

A process can only enter further domains. Landlock (Linux 5.13; Documentation/userspace-api/landlock.rst) checks
opening, creating, linking, renaming, truncating and removing files by their folder. It does not check stat: a process
that knows the path of a file sees that it exists, its size and its times. Nor does it check changes of modes, times and
owners; seccomp filters cover those (landlock_filter.py, supervisor.py).

Before ABI 6 (Linux 6.12) signals are not confined: a command may kill its worker, which counts as a failure of the
machine, and any process of the same user.
"""

import ctypes
import os
import signal
import struct
from collections.abc import Iterable

from . import files, namespaces

MIN_ABI = 3  # ABI of Linux 6.2; before it, truncating files is not restricted
SIGNAL_SCOPE_ABI = 6  # ABI of Linux 6.12, the first that confines signals
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = (
    444,
    445,
    446,
)  # system calls; the numbers are those of every architecture
ASK_VERSION, PATH_BENEATH = 1, 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE = 1 << 4, 1 << 5
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK = 1 << 6, 1 << 7, 1 << 8, 1 << 9
MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = 1 << 10, 1 << 11, 1 << 12
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # the only rights that a rule for a file may give

READ_EXECUTE = EXECUTE | READ_FILE | READ_DIR
READ = READ_FILE | READ_DIR
READ_WRITE = (
    READ_EXECUTE | WRITE_FILE | TRUNCATE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_FIFO | MAKE_SYM | REFER
)

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# Numbers about the machine that C libraries and interpreters read; none of them is about a process.
MACHINE = (
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/uptime", "/proc/loadavg", "/proc/version",
    "/proc/sys/vm/overcommit_memory", "/sys/devices/system/cpu",
)  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


def abi_version() -> int:
    """Returns the version of the kernel's Landlock; 0: it has none."""
    return max(0, _libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION))


def require_abi_version() -> int:
    """Returns abi_version(). Raises OSError with the fix when it is below MIN_ABI."""
    version = abi_version()
    if version == 0:
        raise OSError("this kernel has no Landlock (Linux 6.2 or newer with `landlock` in the boot option lsm= has)")
    if version < MIN_ABI:
        raise OSError(f"this kernel's Landlock is version {version}, and {MIN_ABI} is needed (Linux 6.2 or newer)")
    return version


class Domain:
    """A set of rules that any number of processes can enter."""

    def __init__(self, rules: Iterable[tuple[str, int]] | None):
        """rules: (path, rights) of what can be opened; missing paths are ignored. None: restrict signals only."""
        version = require_abi_version()
        self.confines_signals = version >= SIGNAL_SCOPE_ABI
        known = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
        connections = 0b11 if version >= 4 else 0  # TCP bind and connect
        scopes = 0b11 if self.confines_signals else 0  # abstract unix sockets, signals
        handled = (0, 0) if rules is None else (known, connections)
        attributes = struct.pack("=QQQ", *handled, scopes)
        self._fd = -1
        if rules is None and not scopes:
            return
        self._fd = _check(_libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "new rules")
        for path, rights in rules or ():
            self._allow(path, rights & known)

    def _allow(self, path: str, rights: int) -> None:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        with files.closing_fd(place):
            rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & OF_FILES, place)
            _check(_libc.syscall(ADD_RULE, self._fd, PATH_BENEATH, rule, 0), f"rule for {path}")

    def enter(self) -> None:
        """Enters the domain for good, with every process that this one starts from now on."""
        namespaces.set_no_new_privileges()
        if self._fd >= 0:
            _check(_libc.syscall(RESTRICT_SELF, self._fd, 0), "enter the Landlock domain")

    def require_confined(self, outside: int) -> None:
        """Raises OSError unless signals to process `outside`, of the same user, are refused.

        Checked before a process signals all others.
        """
        try:
            os.kill(outside, 0)
        except PermissionError:
            return
        raise OSError(f"signals reach process {outside}, which is outside of the Landlock domain")


def system_rules(python: str | None, more: Iterable[str]) -> list[tuple[str, int]]:
    """Returns the rules for what every sandbox can read and run: system programs, the interpreter, and `more`."""
    folders = [*SYSTEM, *([python] if python else []), *more]
    return [
        *((path, READ_EXECUTE) for path in folders),
        *((path, READ_FILE | WRITE_FILE) for path in DEVICES),
        *((path, READ) for path in MACHINE),
    ]


def die_with_parent(parent: int, by: signal.Signals) -> None:
    """Has the kernel send `by` to this process when its parent ends; ends at once if the parent has ended."""
    namespaces.set_parent_death_signal(by)
    if os.getppid() != parent:
        os._exit(0)


def _check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result
