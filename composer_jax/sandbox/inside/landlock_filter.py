"""The second seccomp filter of the landlock backend: it refuses calls on what namespaces would hide.

Landlock checks what is opened. These calls reach the host without opening a file: sockets, memory and queues of System
V and POSIX, the scheduling of other processes, owners and attributes of files.
"""

import errno

from . import seccomp
from .seccomp import AND, ARG0, ARG1, ARG2, EQUAL, LOAD, NR, judge, refuse, step

# name: (x86_64, aarch64); None where the architecture has no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # sockets of other processes, which are reached by path or number
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    # objects of other processes, whose numbers can be guessed
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
    # other processes and their use of files
    "process_mrelease": (448, 448),
    "inotify_add_watch": (254, 27),
    # owners of files, by a path that Landlock does not check
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
}
# Attributes of files: refused as on a file system without them.
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
# Changes of modes and times: handed to the supervisor (supervisor.py).
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
    """Returns the filter in the form of seccomp.assemble, whose filter must be installed as well.

    confines_signals: whether Landlock confines signals; otherwise this filter refuses signals to all processes.
    """
    column, _ = seccomp.ARCHITECTURES[machine]
    eperm, allow = refuse(errno.EPERM), step(seccomp.RETURN, seccomp.ALLOW)
    program = [step(LOAD, NR)]
    for table, answer in ((DENIED, eperm), (ATTRIBUTES, refuse(errno.EOPNOTSUPP))):
        for number in seccomp.column_of(table, column):
            program += [step(EQUAL, number, 0, 1), answer]
    program += [step(EQUAL, seccomp.SOCKET[column], 0, 1), refuse(errno.EACCES)]
    # Pairs stay connected, except datagram sockets, which can send to any path.
    program += judge(seccomp.SOCKETPAIR, column, ARG0, [
        step(EQUAL, AF_UNIX, 1, 0), refuse(errno.EACCES),
        step(LOAD, ARG1), step(AND, SOCK_KIND),
        step(EQUAL, SOCK_STREAM, 2, 0), step(EQUAL, SOCK_SEQPACKET, 1, 0), refuse(errno.EACCES), allow,
    ])  # fmt: skip
    # Access mode 3 opens for ioctl only, which no Landlock right covers. openat2 hides its flags behind a pointer; no C
    # library needs it.
    program += [step(EQUAL, OPENAT2[column], 0, 1), refuse(errno.ENOSYS)]
    for call, flags in ((OPEN, ARG1), (OPENAT, ARG2)):
        program += judge(call, column, flags, [step(AND, 3), step(EQUAL, 3, 0, 1), eperm, allow])
    flags = [step(EQUAL, request, len(FILE_FLAGS) - i, 0) for i, request in enumerate(FILE_FLAGS)]
    program += judge(seccomp.IOCTL, column, ARG1, [*flags, allow, refuse(errno.EOPNOTSUPP)])
    # Without a process namespace, other pids are processes of the host: only 0, the caller, is allowed.
    only_self = [step(EQUAL, 0, 1, 0), eperm, allow]
    for call in seccomp.SCHEDULING:
        program += judge(call, column, ARG0, only_self)
    program += judge(seccomp.SETPRIORITY, column, ARG0, [step(EQUAL, 0, 1, 0), eperm, step(LOAD, ARG1), *only_self])
    if not confines_signals:
        program += judge(KILL, column, ARG0, [step(EQUAL, 0xFFFFFFFF, 0, 1), eperm, allow])
    return b"".join([*program, allow])


def assemble_notifying(machine: str) -> bytes:
    """Returns a filter that hands changes of modes and times to the holder of its listener."""
    column, _ = seccomp.ARCHITECTURES[machine]
    program = [step(LOAD, NR)]
    for number in seccomp.column_of(MODE_CALLS, column):
        program += [step(EQUAL, number, 0, 1), step(seccomp.RETURN, USER_NOTIF)]
    return b"".join([*program, step(seccomp.RETURN, seccomp.ALLOW)])
