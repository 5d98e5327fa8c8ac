"""The second system-call filter, for sandboxes that share the host's namespaces: it refuses what namespaces would hide.

Landlock judges what is opened. These calls reach the host without opening anything it judges: sockets, the memory and
queues of System V and POSIX, other processes' scheduling, owners and attributes of files.
"""

import errno

from . import seccomp
from .seccomp import AND, ARG0, ARG1, ARG2, EQUAL, LOAD, NR, judge, refuse, step

# name: (x86_64, aarch64); None where the architecture has no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # sockets of others; one that was never connected could still be reached by its path or its number
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    # what another process left, found by a number that can be guessed
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # other processes and what they do with their files
    "process_mrelease": (448, 448),
    "inotify_add_watch": (254, 27),
    # owners, by a path that nobody judges
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
}
# The same of attributes: as on a file system that has none.
ATTRIBUTES: dict[str, tuple[int, int]] = {
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
# Calls judged by their arguments.
OPEN, OPENAT, OPENAT2, KILL = (2, None), (257, 56), (437, 437), (62, 129)
# Changes of modes and times: handed to the supervisor (chmod_broker.py).
MODE_CALLS: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}

FILE_FLAGS = (0x40086602, 0x401C5820, 0x40087602)  # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, FS_IOC_SETVERSION
AF_UNIX, SOCK_STREAM, SOCK_SEQPACKET, SOCK_KIND = 1, 1, 5, 15
USER_NOTIF = 0x7FC00000  # SECCOMP_RET_USER_NOTIF


def assemble(machine: str, confines_signals: bool) -> bytes:
    """The filter, as seccomp.assemble makes the first, which must be installed as well.

    confines_signals: whether Landlock does; otherwise at least no process may signal all others.
    """
    column, _ = seccomp.ARCHITECTURES[machine]
    eperm, allow = refuse(errno.EPERM), step(seccomp.RETURN, seccomp.ALLOW)
    program = [step(LOAD, NR)]
    for table, answer in ((DENIED, eperm), (ATTRIBUTES, refuse(errno.EOPNOTSUPP))):
        for numbers in table.values():
            if numbers[column] is not None:
                program += [step(EQUAL, numbers[column], 0, 1), answer]
    program += [step(EQUAL, seccomp.SOCKET[column], 0, 1), refuse(errno.EACCES)]
    # Pairs are connected for good, but for datagrams: those can be sent to any path.
    program += judge(seccomp.SOCKETPAIR, column, ARG0, [
        step(EQUAL, AF_UNIX, 1, 0), refuse(errno.EACCES),
        step(LOAD, ARG1), step(AND, SOCK_KIND),
        step(EQUAL, SOCK_STREAM, 2, 0), step(EQUAL, SOCK_SEQPACKET, 1, 0), refuse(errno.EACCES), allow,
    ])  # fmt: skip
    # Open for neither reading nor writing, but for ioctl: Landlock has no right for it. openat2 hides its flags behind
    # a pointer; no C library needs it.
    program += [step(EQUAL, OPENAT2[column], 0, 1), refuse(errno.ENOSYS)]
    for call, flags in ((OPEN, ARG1), (OPENAT, ARG2)):
        if call[column] is not None:
            program += judge(call, column, flags, [step(AND, 3), step(EQUAL, 3, 0, 1), eperm, allow])
    flags = [step(EQUAL, request, len(FILE_FLAGS) - i, 0) for i, request in enumerate(FILE_FLAGS)]
    program += judge(seccomp.IOCTL, column, ARG1, [*flags, allow, refuse(errno.EOPNOTSUPP)])
    # Process 1 is not the worker here, and the host's processes have numbers: on oneself only.
    only_self = [step(EQUAL, 0, 1, 0), eperm, allow]
    for call in seccomp.SCHEDULING:
        program += judge(call, column, ARG0, only_self)
    program += judge(seccomp.SETPRIORITY, column, ARG0, [step(EQUAL, 0, 1, 0), eperm, step(LOAD, ARG1), *only_self])
    if not confines_signals:
        program += judge(KILL, column, ARG0, [step(EQUAL, 0xFFFFFFFF, 0, 1), eperm, allow])
    return b"".join([*program, allow])


def assemble_notifying(machine: str) -> bytes:
    """A filter that leaves changes of modes and times to whoever holds its listener."""
    column, _ = seccomp.ARCHITECTURES[machine]
    program = [step(LOAD, NR)]
    for numbers in MODE_CALLS.values():
        if numbers[column] is not None:
            program += [step(EQUAL, numbers[column], 0, 1), step(seccomp.RETURN, USER_NOTIF)]
    return b"".join([*program, step(seccomp.RETURN, seccomp.ALLOW)])
