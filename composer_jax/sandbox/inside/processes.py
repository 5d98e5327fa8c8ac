"""Processes without a namespace of their own: which are descendants one, and how to end them all."""

import os
import signal
import time
from resource import struct_rusage


def descendants(pid: int) -> list[int]:
    """The descendants of a process, as far as they hold still; parents come before their children."""
    found = _children(pid)
    for child in found:
        found += _children(child)
    return found


def running_descendants(pid: int) -> list[int]:
    """The descendants of a process without the dead that nobody has buried."""
    return [found for found in descendants(pid) if _state(found) not in "ZX"]


def kill_descendants(pid: int) -> None:
    """Kills the descendants of a process that were found at once."""
    for found in descendants(pid):
        _kill(found)


def kill_all_descendants(at_once: bool) -> dict[int, tuple[int, struct_rusage]]:
    """Kills whatever is descendants this process, which must adopt orphans; status and usage of its children, by pid.

    at_once: one call reaches all, also those being forked right now. True only for process 1 of a namespace and for a
    process whose signals are confined to a Landlock domain: anybody else would kill every process of the user.
    """
    ended: dict[int, tuple[int, struct_rusage]] = {}
    how = os.WNOHANG
    while True:
        try:
            found, status, usage = os.wait4(-1, how)
        except ChildProcessError:
            return ended
        how = os.WNOHANG
        if found:
            ended[found] = status, usage
        elif at_once:
            _kill(-1)
            how = 0
        else:  # a process may slip away between being found and being killed: look until none is left
            for pid in descendants(os.getpid()):
                _kill(pid)
            time.sleep(0.001)


def count_user_threads() -> int:
    """How many count_threads the user of this process has, as the kernel's process limit counts them."""
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
    """Threads of all descendants; stops counting above `most`: whoever has too many leaves little time to count."""
    found, total = _children(pid), 0
    for child in found:
        total += count_threads(child)
        if total > most:
            break
        found += _children(child)
    return total


def count_threads(pid: int | str) -> int:
    """Threads of one process; 0 when it has ended."""
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    except FileNotFoundError:
        return 0


def _state(pid: int) -> str:
    """The letter that proc(5) has for it; X when it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _children(pid: int) -> list[int]:
    """Those of its first thread, which is where orphans come to; other count_threads may have children, too."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:  # it has ended
        return found
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
