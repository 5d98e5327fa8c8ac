"""The seccomp filter of a sandbox: a deny-list, assembled to classic BPF without any library.

It denies calls that programs under test do not need and that kernel exploits, escapes and uncounted memory rely on.
Denied calls fail with an errno, so that a program can report it; a foreign architecture is killed.
"""

import errno
import struct
from collections.abc import Mapping

# name: (x86_64, aarch64); None where the architecture has no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes' memory and file descriptors
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "ioprio_set": (251, 30),  # also of the worker
    "move_pages": (279, 239),
    # mounts, roots and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # parts of the kernel with a long record of holes
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "personality": (135, 92),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    # the machine itself
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "vhangup": (153, 58),
    # memory that no limit of ours counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
}
# Calls judged by their arguments.
CLONE, CLONE3, SOCKET, SOCKETPAIR, IOCTL, PRLIMIT64 = (56, 220), (435, 435), (41, 198), (53, 199), (16, 29), (302, 261)
# Scheduling calls are allowed, except on process 1, the worker.
SCHEDULING = ((142, 118), (144, 119), (203, 122), (314, 274))  # sched_set{param,scheduler,affinity,attr}
SETPRIORITY = (141, 140)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH value

NAMESPACE_FLAGS = 0x7E020000  # every CLONE_NEW* that clone takes
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6; vsock would reach the hypervisor past the network namespace
TIOCSTI, TIOCLINUX = 0x5412, 0x541C

LOAD, EQUAL, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NR, ARCH, ARG0, ARG1, ARG2 = 0, 4, 16, 24, 32  # byte offsets in struct seccomp_data (low words: both are little-endian)


def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Returns one instruction; if_true and if_false are the numbers of instructions to skip."""
    return struct.pack("<HBBI", code, if_true, if_false, value)


def refuse(error: int) -> bytes:
    """Returns the instruction that makes the call fail with this errno."""
    return step(RETURN, ERRNO | error)


def assemble(machine: str) -> bytes:
    """Returns the filter for `machine` (os.uname().machine) as an array of struct sock_filter, 8 bytes each.

    Raises KeyError for an architecture without a table.
    """
    column, audit = ARCHITECTURES[machine]
    eperm, allow = refuse(errno.EPERM), step(RETURN, ALLOW)
    program = [step(LOAD, ARCH), step(EQUAL, audit, 1, 0), step(RETURN, KILL), step(LOAD, NR)]
    if machine == "x86_64":  # the x32 numbers would bypass every check below
        program += [step(AT_LEAST, 0x40000000, 0, 1), eperm]
    for number in column_of(DENIED, column):
        program += [step(EQUAL, number, 0, 1), eperm]
    # clone3 hides its flags behind a pointer; ENOSYS makes every C library fall back to clone.
    program += [step(EQUAL, CLONE3[column], 0, 1), refuse(errno.ENOSYS)]
    program += judge(CLONE, column, ARG0, [step(ANY_BIT, NAMESPACE_FLAGS, 0, 1), eperm, allow])
    families = [step(EQUAL, family, len(FAMILIES) - i, 0) for i, family in enumerate(FAMILIES)]
    for call in (SOCKET, SOCKETPAIR):
        program += judge(call, column, ARG0, [*families, refuse(errno.EAFNOSUPPORT), allow])
    terminal = [step(EQUAL, TIOCSTI, 1, 0), step(EQUAL, TIOCLINUX, 0, 1), eperm, allow]
    program += judge(IOCTL, column, ARG1, terminal)
    # Limits of another process: a command could set those of the worker to zero and get its episode repeated.
    program += judge(PRLIMIT64, column, ARG0, [step(EQUAL, 0, 1, 0), eperm, allow])
    not_worker = [step(EQUAL, 1, 0, 1), eperm, allow]
    for call in SCHEDULING:
        program += judge(call, column, ARG0, not_worker)
    one_process = [step(EQUAL, 0, 1, 0), eperm, step(LOAD, ARG1)]  # groups and users would include the worker
    program += judge(SETPRIORITY, column, ARG0, one_process + not_worker)
    return b"".join([*program, allow])


def column_of(table: Mapping[str, tuple[int | None, int | None]], column: int) -> list[int]:
    """Returns the system call numbers of one architecture; calls that it lacks are left out."""
    return [number for number in (numbers[column] for numbers in table.values()) if number is not None]


def judge(call: tuple[int | None, int | None], column: int, argument: int, body: list[bytes]) -> list[bytes]:
    """Returns the instructions that run `body`, which must end in a return, on an argument of `call`.

    There are none for a call that the architecture lacks.
    """
    number = call[column]
    if number is None:
        return []
    return [step(EQUAL, number, 0, 1 + len(body)), step(LOAD, argument), *body]
