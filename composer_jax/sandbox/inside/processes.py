"""Processes: listing, counting and killing the descendants of one without a process namespace, and signals."""

import os
import signal
import time
from resource import struct_rusage


def descendants(pid: int) -> list[int]:
    """Returns the descendants of a process, parents before their children; incomplete while they fork."""
    pids = _children(pid)
    for child in pids:
        pids += _children(child)
    return pids


def running_descendants(pid: int) -> list[int]:
    """Returns the descendants of a process without zombies."""
    return [child for child in descendants(pid) if _state(child) not in "ZX"]


def kill_descendants(pid: int, most: int = 1000) -> None:
    """Kills the descendants of a process that does not fork itself.

    A listing misses the children of a process that ends meanwhile, and after its end they are children of another one.
    So listings are repeated until two in a row show none that runs, at most `most` times: a fork bomb does not hold up
    the caller.
    """
    empty = 0
    for _ in range(most):
        running = running_descendants(pid)
        empty = 0 if running else empty + 1
        if empty == 2:
            return
        for child in running:
            send_signal(child, signal.SIGKILL)
        time.sleep(0.0005)


def kill_all_descendants(at_once: bool) -> dict[int, tuple[int, struct_rusage]]:
    """Kills all descendants of this process, which must be a subreaper; returns child pid -> (status, usage).

    at_once: signal all processes in one call, which also reaches those being forked. True only for process 1 of a
    namespace and for a process whose signals a Landlock domain confines: others would kill every process of the user.
    """
    ended: dict[int, tuple[int, struct_rusage]] = {}
    how = os.WNOHANG
    while True:
        try:
            child, status, usage = os.wait4(-1, how)
        except ChildProcessError:
            return ended
        how = os.WNOHANG
        if child:
            ended[child] = status, usage
        elif at_once:
            send_signal(-1, signal.SIGKILL)
            how = 0
        else:  # a process may fork between the listing and the kill: repeat until none is left
            for pid in descendants(os.getpid()):
                send_signal(pid, signal.SIGKILL)
            time.sleep(0.001)


def count_user_threads() -> int:
    """Returns the number of threads of the user of this process, as RLIMIT_NPROC counts them."""
    uid, total = os.getuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    total += count_threads(name)
            except FileNotFoundError:  # it has ended
                continue
    return total


def count_descendant_threads(pid: int, most: int) -> int:
    """Returns the number of threads of all descendants; stops above `most`, so that a fork bomb costs little."""
    pids, total = _children(pid), 0
    for child in pids:
        total += count_threads(child)
        if total > most:
            break
        pids += _children(child)
    return total


def count_threads(pid: int | str) -> int:
    """Returns the number of threads of a process; 0 when it has ended."""
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    except FileNotFoundError:
        return 0


def send_signal(pid: int, number: int) -> None:
    """Sends a signal to a process if it still exists, or to all (-1)."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _state(pid: int) -> str:
    """Returns the state letter of proc(5); X when the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _children(pid: int) -> list[int]:
    """Returns the children of all threads of a process."""
    pids: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                pids += map(int, file.read().split())
    except OSError:  # it has ended
        return pids
    return pids
