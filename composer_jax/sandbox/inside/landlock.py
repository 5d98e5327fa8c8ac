"""The walls of one sandbox where the kernel gives no namespaces: Landlock domains, within one another.

    supervisor may signal what is in its domain, and nobody else (supervisor.py)
    worker     reads the system_rules and /proc, writes its own workspace and /tmp
    command    the same without /proc; cannot signal or trace the worker, whose domain is further out

A process can only go further in. Landlock (Linux 5.13; documented in Documentation/userspace-api/landlock.rst) judges
what is opened, made, linked, renamed, cut or removed, by the folder it lies in. It does not judge looking: that a file
of the host exists, its size and its times are seen by whoever knows its path. Nor does it judge changes of modes, times
and owners; for those there are system_rules-call filters (landlock_filter.py, modes.py).

Before ABI 6 (Linux 6.12) signals are not confined: a command may end its worker, which counts as a failed machine, and
any process of the same user.
"""

import ctypes
import os
import signal
import struct
from collections.abc import Iterable

from . import namespaces

MIN_ABI = 3  # ABI; before it (Linux 6.2) nothing keeps a command from cutting any file of its user to nothing
SIGNAL_SCOPE_ABI = 6  # ABI from which signals are confined
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = (
    444,
    445,
    446,
)  # system_rules calls; the numbers are those of every architecture
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
# Numbers of the whole machine that C libraries and interpreters ask for; nothing in them is about a process.
MACHINE = (
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/uptime", "/proc/loadavg", "/proc/version",
    "/proc/sys/vm/overcommit_memory", "/sys/devices/system_rules/cpu",
)  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


def abi_version() -> int:
    """The version of the kernel's Landlock; 0 where there is none."""
    return max(0, _libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION))


def require_abi_version() -> int:
    """abi_version(), or OSError with what to do when it is not enough."""
    version = abi_version()
    if version == 0:
        raise OSError("this kernel has no Landlock (Linux 6.2 or newer with `landlock` in the boot option lsm= has)")
    if version < MIN_ABI:
        raise OSError(f"this kernel's Landlock is version {version}, and {MIN_ABI} is needed (Linux 6.2 or newer)")
    return version


class Domain:
    """A set of rules that any number of processes can put on."""

    def __init__(self, rules: Iterable[tuple[str, int]] | None):
        """rules: (path, rights) of what can be opened; paths that do not exist are passed over. None: no rules about
        files and sockets, only about signals."""
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
        try:
            rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & OF_FILES, place)
            _check(_libc.syscall(ADD_RULE, self._fd, PATH_BENEATH, rule, 0), f"rule for {path}")
        finally:
            os.close(place)

    def enter(self) -> None:
        """Put it on, for good; whatever this process starts from now on is in it, too."""
        namespaces.set_no_new_privileges()
        if self._fd >= 0:
            _check(_libc.syscall(RESTRICT_SELF, self._fd, 0), "enter the Landlock domain")

    def require_confined(self, outside: int) -> None:
        """Before anybody signals "all": OSError unless a process outside, of the same user, is out of reach."""
        try:
            os.kill(outside, 0)
        except PermissionError:
            return
        raise OSError(f"signals reach process {outside}, which is outside of the Landlock domain")


def system_rules(python: str | None, more: Iterable[str]) -> list[tuple[str, int]]:
    """Rules for what every sandbox can read and run: the system_rules's programs, the interpreter, and `more`."""
    folders = [*SYSTEM, *([python] if python else []), *more]
    return [
        *((path, READ_EXECUTE) for path in folders),
        *((path, READ_FILE | WRITE_FILE) for path in DEVICES),
        *((path, READ) for path in MACHINE),
    ]


def die_with_parent(parent: int, by: signal.Signals) -> None:
    """Have the kernel send `by` to this process when its parent ends; ends at once if it has already."""
    namespaces.set_parent_death_signal(by)
    if os.getppid() != parent:
        os._exit(0)


def _check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result
